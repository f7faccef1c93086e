"""All that is there of a sequence, in memory or on disk only: what a saved session is made of.

1. Blocks are in order and without a gap, from the sequence's first token on; what memory has is
   taken from there, and the disk gives what goes on behind it.
2. Of the disk, only what holds no token that is not the sequence's: a file is taken whole.
"""

from collections.abc import Sequence

from attrs import frozen

from kvtrio.core.config import CoreConfig
from kvtrio.core.disk import DiskTier, Entry
from kvtrio.core.heads import Wanted, wanted_of
from kvtrio.core.identity import KeyMaker, TokenTrail
from kvtrio.core.index import Match
from kvtrio.core.session import Parts, StateName
from kvtrio.core.stored import StoredHead

Lying = Wanted | StoredHead
"""In memory, or on disk only."""


@frozen
class Found:
    """Blocks and states, each kind in order."""

    blocks: tuple[Lying, ...]
    states: tuple[Lying, ...]
    num_tokens: int


def found(match: Match, trail: TokenTrail, disk: DiskTier | None) -> Found:
    """``match``: what memory has of the sequence."""
    path = [*match.blocks, *([match.partial] if match.partial is not None else [])]
    wanted = wanted_of(path, match.num_tokens)
    blocks = [each for each in wanted if each.checkpoint is None]
    states = {end_of(each): each for each in wanted if each.checkpoint is not None}
    if disk is None or not disk.entries:
        return Found(tuple(blocks), tuple(states.values()), match.num_tokens)
    behind = _behind(disk, trail, len(match.blocks))
    end = max(match.num_tokens, behind[-1].end if behind else 0)
    kept: Sequence[Lying] = blocks
    if end > match.num_tokens:
        kept = [*blocks[: len(match.blocks)], *behind]
    on_disk = {head.end: head for head in _states(disk, trail, end)}
    in_order = sorted((on_disk | states).items())
    return Found(tuple(kept), tuple(state for _, state in in_order), end)


def end_of(lying: Lying) -> int:
    """Position behind its last token."""
    if isinstance(lying, StoredHead):
        return lying.end
    return lying.block.start + lying.num_tokens


def name_of(lying: Lying, keys: KeyMaker, config: CoreConfig) -> StateName:
    """Whether a block is whole is as of now: its part may go before it is read."""
    windows = config.window_groups
    if isinstance(lying, StoredHead):
        sizes = (config.groups[i].part_bytes(config.block_size) for i in config.kept_groups)
        is_whole = not windows or lying.state_offset > 0 or lying.size >= sum(sizes)
        return StateName(lying.key, lying.state_offset, is_whole)
    head = lying.head(keys)
    is_whole = not windows or lying.checkpoint is not None or lying.block.part is not None
    return StateName(head.key, head.state_offset, is_whole)


def is_whole(config: CoreConfig, parts: Parts) -> bool:
    """Whether a block has what its groups with a sliding window had."""
    return not config.window_groups or all(parts)


def _behind(disk: DiskTier, trail: TokenTrail, index: int) -> list[StoredHead]:
    """The sequence's blocks on disk from ``index`` on."""
    follows = disk.follow(trail, index, len(trail.tags))
    return [each.head for each in follows if not each.head.state_offset and _is_in(each, trail)]


def _is_in(entry: Entry, trail: TokenTrail) -> bool:
    head = entry.head
    if head.end > len(trail.tags):
        return False
    return head.key == trail.key_of(head.start // trail.block_size, len(head.token_ids))


def _states(disk: DiskTier, trail: TokenTrail, end: int) -> list[StoredHead]:
    size, heads = trail.block_size, list[StoredHead]()
    for index in range(-(-end // size) if disk.states else 0):
        heads += [entry.head for entry in disk.states_at(trail, index, end)]
    return heads
