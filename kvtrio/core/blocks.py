"""Blocks: runs of ``block_size`` token places, the same in every group of layers with K and V; and
slots: states of all recurrent layers behind one position.

1. A block is held (by at least one request), cached (in the index, nobody's) or gone.
2. ``num_refs`` is the number of block tables naming it, plus one per copy under way from it.
3. ``ids`` are places in the arena of its tier, one per group; no two blocks share one.
4. A block is published once, after its tokens were computed, and never written again.
5. A slot is a running request's, a checkpoint's or free; a checkpoint hangs on the published block
   that holds its position's last token, and ends with it at the latest.
6. Nobody holds a checkpoint: who resumes from one copies it, and copies run in order before the
   step, so what was copied from may be given away at once.
7. What groups with a sliding window have of a block is its part, which comes with the block and may
   go before it; see ``parts``.
"""

from array import array

from attrs import define, field

from kvtrio.core.identity import Identity, tags_of
from kvtrio.core.types import BlockId, Tier

NO_TAGS = tags_of()


@define(eq=False)
class Slot:
    """Room for one state: a place in each group of recurrent layers."""

    places: tuple[tuple[int, BlockId], ...]
    """(group, place), ascending."""
    tier: Tier = Tier.DEVICE


@define(eq=False)
class Checkpoint:
    """The state behind the first ``offset`` tokens of a published block."""

    slot: Slot
    block: "Block"
    offset: int
    """1 to the block's tokens."""
    level: float = 0.0
    """Eviction's clock when it was last used."""
    entry: int = 0
    """Number of its entry in the order of eviction; 0: it is gone."""

    @property
    def position(self) -> int:
        return self.block.start + self.offset


@define(eq=False)
class Part:
    """What groups with a sliding window have of a block."""

    ids: tuple[BlockId, ...]
    """Per such group."""
    block: "Block"
    tier: Tier = Tier.DEVICE
    num_refs: int = 1
    """Requests whose next tokens see it, plus copies under way from it."""
    is_wanted: bool = False
    """Somebody may want to resume where it is seen."""
    worth: float = 0.0
    """Cost to compute again what can be resumed from while it is there; see ``parts``."""
    value: float = 0.0
    """Eviction order within a tier: its worth on the tier's clock."""
    end: int = 0
    """Position of the last one that let it go."""
    pinned_until_s: float = 0.0
    stamp: int = 0
    is_candidate: bool = False
    is_short: bool = False


@define(eq=False)
class Block:
    """One run of token places, and, once published, what they hold."""

    ids: tuple[BlockId, ...]
    """Per group with K and V of all tokens. A model without any has blocks all the same: the index
    is made of them."""
    tier: Tier = Tier.DEVICE
    num_refs: int = 1
    key: bytes | None = None
    """None: not published."""
    parent: "Block | None" = None
    start: int = 0
    """Position of the first token."""
    tags: "array[int]" = NO_TAGS
    """Token ids with context numbers, see ``identity``; fewer than a block's only in a leaf."""
    end: int = 0
    """Position behind the last token."""
    worth: float = 0.0
    """Cost to compute it again; see ``eviction``."""
    identities: tuple[Identity, ...] = ()
    """Those of ``tags``, in order: kept alive, so that their numbers stay theirs."""
    children: "list[Block]" = field(factory=list)
    """Sorted by tags: the longest common prefix with any tokens is with a neighbour of their
    place in that order, so that matching does not depend on the number of children."""
    num_device_children: int = 0
    last_used_s: float = 0.0
    value: float = 0.0
    """Eviction order within a tier; see ``eviction``."""
    pinned_until_s: float = 0.0
    """0: not pinned."""
    stamp: int = 0
    """Times that the block left the candidates for eviction."""
    is_candidate: bool = False
    part: Part | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    """By offset."""
    num_states: int = 0
    """Checkpoints here and in all blocks behind."""
    is_from_disk: bool = False
    """It came from outside, and nobody has used it since."""
    is_short: bool = False
    """Counted among the short strangers; see ``eviction``."""


@define(eq=False)
class Arena:
    """Numbered places of one group in one memory."""

    num_blocks: int
    free_ids: list[BlockId] = field(init=False)
    """Taken from the end: what was freed last is still warm in the processor's caches."""
    bare_ids: list[BlockId] = field(init=False, factory=list)
    """Without memory, see ``room``: not to be taken before they are lent some."""

    def __attrs_post_init__(self) -> None:
        self.free_ids = [BlockId(i) for i in reversed(range(self.num_blocks))]

    def take(self) -> BlockId:
        return self.free_ids.pop()

    def free(self, block_id: BlockId) -> None:
        self.free_ids.append(block_id)
