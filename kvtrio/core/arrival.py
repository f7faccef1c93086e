"""How state from outside comes into the cache.

1. Its blocks go below the longest part of its sequence that is there, in order, without a gap.
2. The whole path is held on the device while a part of it is entered, and let go after that.
3. What does not fit beside all that runs waits; what is there already is left as it is.
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
        """Take in pieces for about so many bytes, at least one; returns the bytes.

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
        cache.acquire(Match(blocks, None, 0, len(blocks) * trail.block_size), now)
        arrival.num_tokens = max(arrival.num_tokens, len(path) * trail.block_size)
        num_left = num_bytes
        while arrival.pieces and num_left > 0 and len(path) - len(blocks) < room:
            piece = arrival.pieces.popleft()
            if piece.start > (path[-1].end if path else 0):
                arrival.pieces.clear()  # what lies between is missing
            elif piece.is_state:
                self._enter_state(arrival, piece, path, now)
            else:
                self._enter_block(arrival, piece, path, now)
            num_left -= max(sum(map(len, piece.parts)), LEAST_BYTES)
        cache.release(path, now)
        return num_bytes - num_left

    def _enter_block(
        self, arrival: Arrival, piece: Incoming, path: list[Block], now: float
    ) -> None:
        cache, index = self.cache, piece.start // self.cache.config.block_size
        if index < len(path):
            return
        parent = path[-1] if path else cache.index.root
        arrival.num_tokens = max(arrival.num_tokens, piece.end)
        if cache.index.covering(parent, arrival.trail.tags[piece.start : piece.end]):
            return
        own = cache.take(now)
        cache.load(Load(tuple(zip(cache.groups, own.ids, strict=True)), piece.parts))
        block = cache.publish(own, Position(parent, arrival.trail), piece.num_tokens, now)
        assert block is own, "nothing there has its tokens"
        block.is_from_disk = True
        cache.moves.num_from_disk += 1
        if cache.keeper is not None and piece.is_kept:
            cache.keeper.forget_block(block)
        path.append(block)

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
        if (slot := states.spare(now)) is not None:
            self.cache.load(Load(slot.places, piece.parts, slot.tier))
            found = states.hand_over(block, piece.num_tokens, slot)
            if self.cache.keeper is not None and piece.is_kept and found is not None:
                self.cache.keeper.forget_state(found)


def has_sizes(config: CoreConfig, piece: Incoming) -> bool:
    """Whether its parts are of the sizes that state has here."""
    groups = config.point_groups if piece.is_state else config.token_groups
    sizes = [config.groups[group].part_bytes(config.block_size) for group in groups]
    return list(map(len, piece.parts)) == sizes
