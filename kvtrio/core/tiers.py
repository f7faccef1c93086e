"""The cache: published blocks on the device and in RAM, under one limit each.

1. A held block lies on the device. So does its parent, and its parent's parent.
2. A cached block may leave the device when no child is there, and be dropped when it has no child.
3. Checkpoints of recurrent layers hang on published blocks and have memory of their own, and so
   have the parts of blocks in groups with a sliding window.
"""

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field

from kvtrio.core.blocks import Block
from kvtrio.core.checkpoints import Checkpoints
from kvtrio.core.eviction import Candidates, worth
from kvtrio.core.identity import TokenTrail
from kvtrio.core.index import Match, PrefixIndex
from kvtrio.core.keeping import Keeper
from kvtrio.core.messages import message
from kvtrio.core.parts import Parts
from kvtrio.core.pins import Pins
from kvtrio.core.room import Offer
from kvtrio.core.storage import Storage, TierMoves
from kvtrio.core.types import Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST
"""Asking an enum for a member costs as much as a call, and these are asked for with each block."""
MAX_GHOSTS = 16384
"""Keys of lost blocks that are remembered, to tell "evicted" from "never seen"."""


@message
class Position:
    """Where a block goes: below its parent, with the tokens of a trail."""

    parent: Block
    trail: TokenTrail


@define(eq=False)
class TieredCache(Storage):
    """match / acquire / take / release / publish; see the module's rules."""

    keeper: Keeper | None = None
    """None: there is no disk tier."""
    index: PrefixIndex = field(init=False)
    candidates: dict[Tier, Candidates] = field(init=False)
    ghosts: OrderedDict[bytes, float] = field(init=False, factory=OrderedDict)
    """Key of a lost block: when it was last used."""
    pins: Pins = field(init=False)
    states: Checkpoints | None = field(init=False, default=None)
    """None: the model has no recurrent layers."""
    parts: Parts | None = field(init=False, default=None)
    """None: the model has no windows."""
    moves: TierMoves = field(init=False, factory=TierMoves)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        size = self.config.block_size
        self.index = PrefixIndex(size)
        if self.keeper is not None:
            self.keeper.is_settled = self.is_settled
        needs_states = bool(self.config.point_groups)
        self.candidates = {tier: Candidates(self.limits[tier], needs_states) for tier in Tier}
        if self.ram is not None:
            self.candidates[HOST].limit = self.ram.budget.num_with_parts
        self.pins = Pins(sum(order.limit for order in self.candidates.values()) // 2)
        self.room.enter(self, self.candidates[HOST])
        shared = (self.config, self.copies, self.ram, self.candidates, self.keeper)
        if needs_states:
            self.states = Checkpoints(*shared)
        if self.config.window_groups:
            self.parts = Parts(*shared)

    # --- what requests do ---

    def match(self, trail: TokenTrail, limit: int, known: list[Block] | None = None) -> Match:
        """As ``PrefixIndex.match``."""
        return self.index.match(trail, limit, known)

    def hold(self, match: Match, now: float) -> None:
        """Hold all blocks of a match, the partial one too, wherever they lie; see ``bring``."""
        self._touch(_blocks(match), now)

    def bring(self, match: Match, now: float) -> None:
        """To the device, held ones."""
        for block in _blocks(match):
            if block.tier is HOST:
                self._promote(block, now)

    def take(self, now: float) -> Block:
        """A new block, held once, and its part; ``CoreConfig.num_blocks`` says why there is always
        room."""
        self._make_room(now)
        block = self.new_block(now)
        if self.parts is not None:
            block.part = self.parts.take(block, now)
        return block

    def copy(self, source: Block, target: Block, num_tokens: int) -> None:
        """As ``Storage.copy``, and of the part."""
        super().copy(source, target, num_tokens)
        if self.parts is not None and source.part is not None and target.part is not None:
            self.parts.copy(source.part, target.part, num_tokens)

    def release(self, blocks: Sequence[Block], now: float) -> None:
        """One hold less on each. Unpublished blocks that nobody holds are gone at once."""
        device = self.candidates[DEVICE]
        for block in reversed(blocks):
            assert block.num_refs > 0
            block.num_refs -= 1
            if block.num_refs:
                continue
            if block.key is None:
                self.remove(block)
                continue
            device.use(block, now)
            if not block.num_device_children:
                self._reconsider(block, now)

    def publish(self, block: Block, place: "Position", num_tokens: int, now: float) -> Block:
        """Put a held block with ``num_tokens`` computed tokens into the index.

        Returns the block that the caller now holds in its place: itself, or an equal one that
        was there before.
        """
        parent, trail, size = place.parent, place.trail, self.config.block_size
        start = parent.end
        tags = trail.tags[start : start + num_tokens]
        key = trail.key_of(start // size, num_tokens)
        if parent.children:
            if known := self.index.find(parent, key, tags):
                return self._adopt(known, block, now)
            if self.index.covering(parent, tags):
                return block
        block.key, block.tags = key, tags
        block.start, block.end = start, start + num_tokens
        block.worth = worth(num_tokens, start, size)
        block.identities = trail.identities(block.end)
        self.ghosts.pop(key, None)
        shorter = self.index.insert(block, parent)
        if self.keeper is not None:
            self.keeper.block_comes(block)
        self._count_child(parent, +1, now)
        if shorter and self.states:
            self.states.move(shorter, block)
        if shorter and shorter.is_candidate:
            self._supersede(shorter, now)
        return block

    def take_moves(self) -> TierMoves:
        moves, self.moves = self.moves, TierMoves()
        return moves

    def forget(self, path: Sequence[Block], now: float) -> None:
        """Lose the blocks of a path that nobody else has a use for: from its end to the first that
        is held or goes on with other tokens."""
        for block in reversed(path):
            if block.num_refs or block.children:
                return
            self._drop(block, now)

    # --- tiers ---

    def _touch(self, blocks: Sequence[Block], now: float) -> None:
        for block in blocks:
            block.num_refs += 1
            block.last_used_s = now
            if block.is_candidate:
                self.candidates[block.tier].discard(block)

    def _make_room(self, now: float) -> None:
        device = self.candidates[DEVICE]
        while self.is_full(DEVICE):
            victim = device.lowest(now)
            assert victim is not None, "the device holds every place's longest request"
            device.rise(victim)
            value = self.candidates[HOST].value_now(victim)
            # One with a child in RAM cannot be lost before that.
            if self.room.make(self, value, now, is_must=bool(victim.children)):
                self._demote(victim, now)
            else:
                self.lose(victim, now)

    def offer(self, now: float) -> Offer | None:
        """See ``room.Kind``."""
        order = self.candidates[HOST]
        lowest = order.lowest(now)
        return None if lowest is None else Offer(order.rank(lowest, now), lowest.value, lowest)

    def _demote(self, block: Block, now: float) -> None:
        """Move a candidate to RAM, where there is room."""
        self.candidates[DEVICE].discard(block)
        block.value = self.candidates[HOST].value_now(block)
        self.transfer(block, HOST)
        self.moves.num_demoted += 1
        self._count_child(block.parent, -1, now)
        self._reconsider(block, now)

    def _promote(self, block: Block, now: float) -> None:
        """Move a held block to the device."""
        self._make_room(now)
        self.transfer(block, DEVICE)
        self.moves.num_promoted += 1
        self._count_child(block.parent, +1, now)

    def _adopt(self, known: Block, own: Block, now: float) -> Block:
        """Hold ``known`` instead of ``own``, which has the same contents and is nobody else's."""
        assert own.key is None
        assert own.num_refs == 1
        self._touch((known,), now)
        if known.tier is HOST:
            # Its contents are on the device already: trade places instead of copying.
            known.ids, own.ids = own.ids, known.ids
            known.tier, own.tier = DEVICE, HOST
            self._count_child(known.parent, +1, now)
        if self.parts is not None:
            self.parts.adopt(known, own)
        own.num_refs = 0
        self.remove(own)
        return known

    def lose(self, item: Block, now: float) -> None:
        """Lose a block that has no child, unless the disk takes it."""
        if self.keeper is not None:
            self.keeper.block_goes(item)
            for checkpoint in item.checkpoints:
                self.keeper.state_goes(checkpoint)
        self._drop(item, now)

    def _drop(self, block: Block, now: float) -> None:
        """Lose a block that has no child."""
        assert block.key is not None
        self._remember(block.key, block.last_used_s)
        moves, idle_s = self.moves, now - block.last_used_s
        moves.num_dropped += 1
        moves.num_dropped_tokens += len(block.tags)
        if idle_s > moves.longest_idle_s:
            moves.longest_idle_s = idle_s
        self._take_out(block, now)

    def _supersede(self, block: Block, now: float) -> None:
        self.moves.num_superseded += 1
        self._take_out(block, now)

    def _take_out(self, block: Block, now: float) -> None:
        parent = block.parent
        if block.is_candidate:
            self.candidates[block.tier].discard(block)
        if block.pinned_until_s:
            self.pins.unpin(block)
        if block.checkpoints and self.states:
            self.states.drop_all(block, now)
        if block.part is not None and self.parts is not None:
            self.parts.drop(block.part)
        if self.keeper is not None:
            self.keeper.forget_block(block)
        self.index.remove(block)
        self.remove(block)
        self._count_child(parent, -1 if block.tier is DEVICE else 0, now)

    # --- bookkeeping ---

    def _count_child(self, parent: Block | None, change: int, now: float) -> None:
        """A child of ``parent`` came to the device, left it, or is gone from RAM (0)."""
        assert parent is not None
        parent.num_device_children += change
        if not parent.num_refs:
            self._reconsider(parent, now)

    def _reconsider(self, block: Block, now: float) -> None:
        """Enter a block that nobody holds among the candidates of its tier, or take it out."""
        is_kept = block.num_device_children if block.tier is DEVICE else block.children
        if is_kept or block.key is None:
            if block.is_candidate:
                self.candidates[block.tier].discard(block)
            return
        order = self.candidates[block.tier]
        if self.parts is not None and block.part is None and not block.children:
            # Nobody can resume in it.
            order.devalue(block, now)
        if not block.is_candidate:
            order.add(block, now)

    def _remember(self, key: bytes, last_used_s: float) -> None:
        self.ghosts[key] = last_used_s
        if len(self.ghosts) > MAX_GHOSTS:
            self.ghosts.popitem(last=False)


def _blocks(match: Match) -> Sequence[Block]:
    return [*match.blocks, match.partial] if match.partial else match.blocks
