"""Blocks of one group of layers: which are free, and how many block tables name each.

1. A block is free, or held by at least one block table.
2. Its reference count is the number of tables that name it.
3. A freed block's contents may be overwritten at once.
"""

from attrs import define, field

from kvtrio.core.types import BlockId


@define(eq=False)
class BlockPool:
    """``num_blocks`` numbered blocks; take, touch, free."""

    num_blocks: int
    ref_counts: list[int] = field(init=False)
    free_ids: list[BlockId] = field(init=False)
    """Taken from the end: the block freed last is still warm in the processor's caches."""

    def __attrs_post_init__(self) -> None:
        self.ref_counts = [0] * self.num_blocks
        self.free_ids = [BlockId(i) for i in reversed(range(self.num_blocks))]

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    def take(self) -> BlockId:
        """A free block with one reference. That one is free is the caller's promise."""
        assert self.free_ids, "the pool holds every place's longest request"
        block_id = self.free_ids.pop()
        assert self.ref_counts[block_id] == 0
        self.ref_counts[block_id] = 1
        return block_id

    def touch(self, block_id: BlockId) -> None:
        """One more table names a held block."""
        assert self.ref_counts[block_id] > 0
        self.ref_counts[block_id] += 1

    def free(self, block_ids: list[BlockId]) -> None:
        """One table less names each of these; the last reference frees the block."""
        for block_id in reversed(block_ids):
            assert self.ref_counts[block_id] > 0
            self.ref_counts[block_id] -= 1
            if not self.ref_counts[block_id]:
                self.free_ids.append(block_id)
