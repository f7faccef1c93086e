"""How state from outside comes into the cache.

1. Its blocks go below the longest part of its sequence that is there, in order, without a gap.
2. The whole path is held on the device while a part of it is entered, and let go after that.
3. What does not fit beside all that runs waits; what is there already is left as it is,
   but for a block that lost its part in groups with a sliding window.
4. Only what is written counts as moved: an arrival that waits has its turn again behind a step, and
   where nothing was written there may be none.
"""

from collections import deque

from attrs import define, field, frozen

from kvtrio.core.batch import Load
from kvtrio.core.blocks import Block
from kvtrio.core.config import CoreConfig
from kvtrio.core.identity import TokenTrail
from kvtrio.core.index import Match
from kvtrio.core.keeping import LEAST_BYTES
from kvtrio.core.stored import Incoming
from kvtrio.core.tiers import Position, TieredCache
from kvtrio.core.types import Tier


@define(eq=False)
class Arrival:
    """A part of a sequence, in order of position, each block before the states on it; verified."""

    number: int
    trail: TokenTrail
    pieces: deque[Incoming]
    """Not there yet."""
    is_fetched: bool = False
    """From the disk tier, for a request."""
    num_tokens: int = 0
    """So many from the start are there."""
    known: list[Block] = field(init=False, factory=list)
    """Published blocks of the sequence, as far as they were looked up."""


@frozen(eq=False)
class Entrance:
    """See the module's rules."""

    cache: TieredCache

    def enter(self, arrival: Arrival, num_bytes: int, num_held: int, now: float) -> int:
        """Take in pieces until about so many bytes are written; returns the bytes.

        ``num_held``: blocks of running requests. Where there is no room beside them nothing
        happens; where nothing runs and there is none, nothing ever will.
        """
        cache, trail = self.cache, arrival.trail
        blocks = cache.match(trail, len(trail.tags), arrival.known).blocks
        room = cache.limits[Tier.DEVICE] - num_held - len(blocks)
        if room < 1:
            if not num_held:
                arrival.pieces.clear()
            return 0
        path = list(blocks)
        found = Match(blocks, None, 0, len(blocks) * trail.block_size)
        cache.hold(found, now)
        cache.bring(found, now)
        arrival.num_tokens = max(arrival.num_tokens, len(path) * trail.block_size)
        num_left = num_bytes
        while arrival.pieces and num_left > 0 and len(path) - len(blocks) < room:
            piece = arrival.pieces.popleft()
            if piece.start > (path[-1].end if path else 0):
                arrival.pieces.clear()  # what lies between is missing
                break
            num_loads = len(cache.loads)
            if piece.is_state:
                self._enter_state(arrival, piece, path, now)
            else:
                self._enter_block(arrival, piece, path, now)
            if len(cache.loads) > num_loads:
                num_left -= max(sum(map(len, piece.parts)), LEAST_BYTES)
        cache.release(path, now)
        return num_bytes - num_left

    def _enter_block(
        self, arrival: Arrival, piece: Incoming, path: list[Block], now: float
    ) -> None:
        cache, index = self.cache, piece.start // self.cache.config.block_size
        if index < len(path):
            self._complete(path[index], piece, now)
            return
        parent = path[-1] if path else cache.index.root
        arrival.num_tokens = max(arrival.num_tokens, piece.end)
        if cache.index.covering(parent, arrival.trail.tags[piece.start : piece.end]):
            return
        own = cache.take(now)
        kept = cache.config.kept_groups
        full = tuple(piece.parts[kept.index(group)] for group in cache.groups)
        cache.load(Load(tuple(zip(cache.groups, own.ids, strict=True)), full))
        block = cache.publish(own, Position(parent, arrival.trail), piece.num_tokens, now)
        assert block is own, "nothing there has its tokens"
        block.is_from_disk = True
        cache.moves.num_from_disk += 1
        if cache.keeper is not None and piece.is_kept:
            cache.keeper.forget_block(block)
        path.append(block)
        self._fill(block, piece, now)

    def _complete(self, block: Block, piece: Incoming, now: float) -> None:
        """A block that is there may have lost its part, and the piece have it."""
        parts = self.cache.parts
        if parts is not None and block.part is None and len(block.tags) == piece.num_tokens:
            block.part = parts.take(block, now)
            self._fill(block, piece, now)

    def _fill(self, block: Block, piece: Incoming, now: float) -> None:
        """A block's part, new: with what the piece has of it, or not at all."""
        cache, part = self.cache, block.part
        if cache.parts is None or part is None:
            return
        windows = cache.config.window_groups
        found = tuple(piece.parts[cache.config.kept_groups.index(group)] for group in windows)
        if all(found):
            cache.load(Load(tuple(zip(windows, part.ids, strict=True)), found))
            cache.parts.keep(part, piece.end)
            cache.parts.release(part, now)
        else:
            part.num_refs = 0
            cache.parts.drop(part)

    def _enter_state(
        self, arrival: Arrival, piece: Incoming, path: list[Block], now: float
    ) -> None:
        states, index = self.cache.states, piece.start // self.cache.config.block_size
        parent = path[index - 1] if index else self.cache.index.root
        tags = arrival.trail.tags[piece.start : piece.end]
        block = self.cache.index.covering(parent, tags)
        if states is None or block is None:
            return
        if any(known.offset == piece.num_tokens for known in block.checkpoints):
            return
        if (slot := states.spare(now)) is None:
            return
        if self.cache.index.covering(parent, tags) is not block:
            states.free(slot)  # the room was the block's
        else:
            self.cache.load(Load(slot.places, piece.parts, slot.tier))
            found = states.hand_over(block, piece.num_tokens, slot)
            if self.cache.keeper is not None and piece.is_kept and found is not None:
                self.cache.keeper.forget_state(found)


def has_sizes(config: CoreConfig, piece: Incoming) -> bool:
    """Whether its parts are of the sizes that state has here; groups with a sliding window may all
    lack theirs."""
    groups = config.point_groups if piece.is_state else config.kept_groups
    sizes = [config.groups[group].part_bytes(config.block_size) for group in groups]
    without = [0 if i in config.window_groups else n for i, n in zip(groups, sizes, strict=True)]
    return list(map(len, piece.parts)) in (sizes, without)
