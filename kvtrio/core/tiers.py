"""The cache: published blocks on the device and in RAM, under one limit each.

1. Blocks of a tier never outnumber its limit.
2. A held block lies on the device. So does its parent, and its parent's parent.
3. A cached block may leave the device when no child is there, and be dropped when it has no child.
4. Device and host may be one arena (the device is the host): then a move changes a block's tier
   and nothing is copied. Otherwise a move is a pair of places in ``copies``, to be performed in
   order before the next step.
"""

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field, frozen

from kvtrio.core.batch import Copy
from kvtrio.core.blocks import Arena, Block
from kvtrio.core.config import CoreConfig
from kvtrio.core.eviction import Candidates, worth
from kvtrio.core.identity import TokenTrail
from kvtrio.core.index import Match, PrefixIndex
from kvtrio.core.types import BlockId, Tier

MAX_GHOSTS = 16384
"""Keys of lost blocks that are remembered, to tell "evicted" from "never seen"."""


@define(kw_only=True)
class TierMoves:
    """What the cache moved and lost since the last report, in blocks."""

    num_promoted: int = 0
    num_demoted: int = 0
    num_dropped: int = 0
    num_dropped_tokens: int = 0
    num_superseded: int = 0
    """Blocks whose tokens a longer block holds now; nothing was lost."""
    longest_idle_s: float = 0.0
    """Longest time since its last use among the lost."""


@frozen
class Position:
    """Where a block goes: below its parent, with the tokens of a trail."""

    parent: Block
    trail: TokenTrail


@define(eq=False)
class TieredCache:
    """match / acquire / take / release / publish; see the module's rules."""

    config: CoreConfig
    index: PrefixIndex = field(init=False)
    arenas: dict[Tier, tuple[Arena, ...]] = field(init=False)
    limits: dict[Tier, int] = field(init=False)
    num_used: dict[Tier, int] = field(init=False)
    """Blocks in each tier, held and cached."""
    candidates: dict[Tier, Candidates] = field(init=False)
    copies: list[Copy] = field(init=False, factory=list)
    """Planned since the last step, in order."""
    ghosts: OrderedDict[bytes, float] = field(init=False, factory=OrderedDict)
    """Key of a lost block: when it was last used."""
    moves: TierMoves = field(init=False, factory=TierMoves)

    def __attrs_post_init__(self) -> None:
        config = self.config
        self.index = PrefixIndex(config.block_size)
        self.limits = {Tier.DEVICE: config.num_blocks, Tier.HOST: config.num_host_blocks}
        self.num_used = dict.fromkeys(Tier, 0)
        self.candidates = {tier: Candidates(self.limits[tier], config.block_size) for tier in Tier}
        groups = range(len(config.groups))
        if config.is_unified:
            arenas = tuple(Arena(sum(self.limits.values())) for _ in groups)
            self.arenas = dict.fromkeys(Tier, arenas)
        else:
            self.arenas = {tier: tuple(Arena(self.limits[tier]) for _ in groups) for tier in Tier}

    # --- what requests do ---

    def match(self, trail: TokenTrail, limit: int) -> Match:
        """Longest known prefix of the first ``limit`` tokens; changes nothing."""
        return self.index.match(trail, limit)

    def acquire(self, match: Match, now: float) -> None:
        """Hold all blocks of a match, the partial one too, on the device."""
        blocks = [*match.blocks, match.partial] if match.partial else list(match.blocks)
        for block in blocks:
            self._touch(block, now)
        for block in blocks:
            if block.tier is Tier.HOST:
                self._promote(block, now)

    def take(self, now: float) -> Block:
        """A new block, held once; ``CoreConfig.num_blocks`` says why there is always room."""
        self._make_room(now)
        self.num_used[Tier.DEVICE] += 1
        return Block(self._take_ids(Tier.DEVICE), last_used_s=now)

    def copy(self, source: Block, target: Block, num_tokens: int) -> None:
        """Before the next step, copy the first places of a held block into another."""
        self._plan(source.ids, target.ids, (Tier.DEVICE, Tier.DEVICE), num_tokens)

    def release(self, blocks: Sequence[Block], now: float) -> None:
        """One hold less on each. Unpublished blocks that nobody holds are gone at once."""
        for block in reversed(blocks):
            assert block.num_refs > 0
            block.num_refs -= 1
            if block.num_refs:
                continue
            if block.key is None:
                self._forget(block)
            else:
                self.candidates[Tier.DEVICE].use(block, now)
                self._reconsider(block, now)

    def publish(self, block: Block, place: "Position", num_tokens: int, now: float) -> Block:
        """Put a held block with ``num_tokens`` computed tokens into the index.

        Returns the block that the caller now holds in its place: itself, or an equal one that
        was there before.
        """
        parent, trail, size = place.parent, place.trail, self.config.block_size
        start = parent.end
        tags = tuple(trail.tags[start : start + num_tokens])
        key = trail.key_of(start // size, num_tokens)
        if known := self.index.find(parent, key, tags):
            return self._adopt(known, block, now)
        if self.index.covers(parent, tags):
            return block
        block.key, block.start, block.tags = key, start, tags
        block.contexts = tuple(context for at, context in trail.contexts if at < start + num_tokens)
        self.ghosts.pop(key, None)
        shorter = self.index.insert(block, parent)
        self._count_child(parent, +1, now)
        if shorter and shorter.is_candidate:
            self._supersede(shorter, now)
        return block

    def take_copies(self) -> tuple[Copy, ...]:
        copies = tuple(self.copies)
        self.copies.clear()
        return copies

    def take_moves(self) -> TierMoves:
        moves, self.moves = self.moves, TierMoves()
        return moves

    # --- tiers ---

    def _touch(self, block: Block, now: float) -> None:
        block.num_refs += 1
        block.last_used_s = now
        self._reconsider(block, now)

    def _make_room(self, now: float) -> None:
        device = self.candidates[Tier.DEVICE]
        while self.num_used[Tier.DEVICE] >= self.limits[Tier.DEVICE]:
            victim = device.lowest(now)
            assert victim is not None, "the device holds every place's longest request"
            device.rise(victim)
            if self._make_room_in_ram(victim, now):
                self._demote(victim, now)
            else:
                self._drop(victim, now)

    def _make_room_in_ram(self, victim: Block, now: float) -> bool:
        """Room for a block that leaves the device; False if RAM holds nothing worth less."""
        ram = self.candidates[Tier.HOST]
        while self.num_used[Tier.HOST] >= self.limits[Tier.HOST]:
            lowest = ram.lowest(now)
            is_least = lowest is None or lowest.value > ram.level + worth(victim, ram.block_size)
            if is_least and not victim.children:
                return False
            assert lowest is not None, "a block that has no room in RAM has no child there"
            ram.rise(lowest)
            self._drop(lowest, now)
        return True

    def _demote(self, block: Block, now: float) -> None:
        ram = self.candidates[Tier.HOST]
        block.value = ram.level + worth(block, ram.block_size)
        self._move(block, Tier.HOST, now)
        self.moves.num_demoted += 1

    def _promote(self, block: Block, now: float) -> None:
        self._make_room(now)
        self._move(block, Tier.DEVICE, now)
        self.moves.num_promoted += 1

    def _move(self, block: Block, tier: Tier, now: float) -> None:
        if block.is_candidate:
            self.candidates[block.tier].discard(block)
        self.num_used[block.tier] -= 1
        self.num_used[tier] += 1
        if not self.config.is_unified:
            ids = self._take_ids(tier)
            self._plan(block.ids, ids, (block.tier, tier), len(block.tags))
            self._free_ids(block.ids, block.tier)
            block.ids = ids
        block.tier = tier
        self._count_child(block.parent, +1 if tier is Tier.DEVICE else -1, now)
        self._reconsider(block, now)

    def _adopt(self, known: Block, own: Block, now: float) -> Block:
        """Hold ``known`` instead of ``own``, which has the same contents and is nobody else's."""
        assert own.key is None
        assert own.num_refs == 1
        self._touch(known, now)
        if known.tier is Tier.HOST:
            # Its contents are on the device already: trade places instead of copying.
            known.ids, own.ids = own.ids, known.ids
            known.tier, own.tier = Tier.DEVICE, Tier.HOST
            self._count_child(known.parent, +1, now)
        own.num_refs = 0
        self._forget(own)
        return known

    def _drop(self, block: Block, now: float) -> None:
        """Lose a block that has no child."""
        assert block.key is not None
        self._remember(block.key, block.last_used_s)
        self.moves.num_dropped += 1
        self.moves.num_dropped_tokens += len(block.tags)
        self.moves.longest_idle_s = max(self.moves.longest_idle_s, now - block.last_used_s)
        self._take_out(block, now)

    def _supersede(self, block: Block, now: float) -> None:
        self.moves.num_superseded += 1
        self._take_out(block, now)

    def _take_out(self, block: Block, now: float) -> None:
        parent = block.parent
        if block.is_candidate:
            self.candidates[block.tier].discard(block)
        self.index.remove(block)
        self._forget(block)
        self._count_child(parent, -1 if block.tier is Tier.DEVICE else 0, now)

    # --- bookkeeping ---

    def _count_child(self, parent: Block | None, change: int, now: float) -> None:
        """A child of ``parent`` came to the device, left it, or is gone from RAM (0)."""
        assert parent is not None
        parent.num_device_children += change
        self._reconsider(parent, now)

    def _reconsider(self, block: Block, now: float) -> None:
        """Enter the block among the candidates of its tier, or take it out."""
        may_go = block.num_refs == 0 and block.key is not None
        if block.tier is Tier.DEVICE:
            may_go = may_go and block.num_device_children == 0
        else:
            may_go = may_go and not block.children
        if may_go and not block.is_candidate:
            self.candidates[block.tier].add(block, now)
        elif block.is_candidate and not may_go:
            self.candidates[block.tier].discard(block)

    def _remember(self, key: bytes, last_used_s: float) -> None:
        self.ghosts[key] = last_used_s
        if len(self.ghosts) > MAX_GHOSTS:
            self.ghosts.popitem(last=False)

    def _forget(self, block: Block) -> None:
        self.num_used[block.tier] -= 1
        self._free_ids(block.ids, block.tier)

    def _take_ids(self, tier: Tier) -> tuple[BlockId, ...]:
        return tuple(arena.take() for arena in self.arenas[tier])

    def _free_ids(self, ids: tuple[BlockId, ...], tier: Tier) -> None:
        for arena, block_id in zip(self.arenas[tier], ids, strict=True):
            arena.free(block_id)

    def _plan(
        self,
        sources: tuple[BlockId, ...],
        targets: tuple[BlockId, ...],
        tiers: tuple[Tier, Tier],
        num_tokens: int,
    ) -> None:
        for group, (source, target) in enumerate(zip(sources, targets, strict=True)):
            self.copies.append(Copy(group, source, target, num_tokens, *tiers))
