"""What published blocks and checkpoints are called outside memory."""

from collections.abc import Sequence

from attrs import evolve, frozen

from kvtrio.core.batch import NOWHERE, Save
from kvtrio.core.blocks import Block, Checkpoint
from kvtrio.core.config import CoreConfig
from kvtrio.core.identity import TAG_SHIFT, TOKEN_MASK, KeyMaker, flat_runs
from kvtrio.core.stored import RunOfContext, StoredHead


@frozen(eq=False)
class Wanted:
    """The first tokens of a published block, or a state behind them: to be read out, if it is
    still there then."""

    block: Block
    num_tokens: int
    checkpoint: Checkpoint | None = None
    key: bytes | None = None
    """The block's when it was found: it is gone as soon as it has another or none."""

    @property
    def is_there(self) -> bool:
        if self.checkpoint is not None:
            return self.checkpoint.entry != 0
        return self.block.key is not None and self.block.key == self.key

    def head(self, keys: KeyMaker) -> StoredHead:
        if self.checkpoint is not None:
            return head_of_state(keys, self.checkpoint)
        return head_of_block(keys, self.block, self.num_tokens)

    def save(self, head: StoredHead, config: CoreConfig) -> Save:
        """How to read it."""
        if self.checkpoint is not None:
            slot = self.checkpoint.slot
            return Save(head, slot.places, slot.tier)
        block, part, windows = self.block, self.block.part, config.window_groups
        places = list(zip(config.token_groups, block.ids, strict=True))
        places += zip(windows, part.ids if part else (NOWHERE,) * len(windows), strict=True)
        # Where parts know one tier, the memory is one, and nobody asks.
        elsewhere = windows if part is not None and part.tier is not block.tier else ()
        return Save(head, tuple(sorted(places)), block.tier, elsewhere)


def wanted_of(blocks: Sequence[Block], num_tokens: int) -> list[Wanted]:
    """The first tokens of a path: its blocks, each with the states on it behind it."""
    found: list[Wanted] = []
    for block in blocks:
        here = min(len(block.tags), num_tokens - block.start)
        found.append(Wanted(block, here, key=block.key))
        found += [
            Wanted(block, each.offset, each) for each in block.checkpoints if each.offset <= here
        ]
    return found


def head_of_block(keys: KeyMaker, block: Block, num_tokens: int) -> StoredHead:
    """Of a published block's first tokens."""
    assert block.key is not None
    assert block.parent is not None
    start, parent = block.start, block.parent.key or keys.root_key()
    token_ids = tuple(tag & TOKEN_MASK for tag in block.tags[:num_tokens])
    runs = _runs(block, num_tokens)
    key = block.key
    if num_tokens < len(block.tags):
        pairs = [(run.offset, run.digest) for run in runs]
        key = keys.block_key(parent, start, token_ids, flat_runs(pairs))
    return StoredHead(key, parent, start, token_ids, runs)


def head_of_state(keys: KeyMaker, checkpoint: Checkpoint) -> StoredHead:
    """Of a state on a published block."""
    offset = checkpoint.offset
    return evolve(head_of_block(keys, checkpoint.block, offset), state_offset=offset)


def _runs(block: Block, num_tokens: int) -> tuple[RunOfContext, ...]:
    digests = {identity.number: identity.digest for identity in block.identities}
    runs, last = list[RunOfContext](), -1
    for offset, tag in enumerate(block.tags[:num_tokens]):
        if (number := tag >> TAG_SHIFT) != last:
            runs.append(RunOfContext(offset, digests[number]))
            last = number
    return tuple(runs)
