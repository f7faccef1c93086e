"""Where blocks lie: two memories, how many blocks each holds, and copies between them.

1. Blocks of a tier never outnumber its limit; who makes room is the cache's business.
2. Device and host may be one arena (the device is the host): then a move changes a block's tier
   and nothing is copied. Otherwise a move is a pair of places in ``copies``, to be performed in
   order before the next step.
"""

from attrs import define, field

from kvtrio.core.batch import NOWHERE, Copy, GiveBack, Load, Move, Save
from kvtrio.core.blocks import Arena, Block
from kvtrio.core.config import CoreConfig
from kvtrio.core.room import Room, SharedRam, Shelf, take_places
from kvtrio.core.types import BlockId, Tier

Target = tuple[Tier, int, BlockId]
"""Memory, group, place."""


@define(kw_only=True)
class TierMoves:
    """What the cache moved and lost since the last report, in blocks."""

    num_promoted: int = 0
    num_demoted: int = 0
    num_from_disk: int = 0
    """From disk, or with a session, into memory."""
    num_dropped: int = 0
    num_dropped_tokens: int = 0
    num_superseded: int = 0
    """Blocks whose tokens a longer block holds now; nothing was lost."""
    longest_idle_s: float = 0.0
    """Longest time since its last use among the lost."""


@define(eq=False)
class Storage:
    """Places, counts and planned copies; see the module's rules."""

    config: CoreConfig
    groups: tuple[int, ...] = field(init=False)
    """Those with K and V of all tokens."""
    arenas: dict[Tier, tuple[Arena, ...]] = field(init=False)
    limits: dict[Tier, int] = field(init=False)
    ram: SharedRam | None = field(init=False, default=None)
    """None: each kind of state has its own share."""
    room: Room = field(init=False)
    """In RAM."""
    item_bytes: int = field(init=False, default=1)
    """What a block counts there."""
    num_used: dict[Tier, int] = field(init=False)
    """Blocks in each tier, held and cached."""
    copies: list[Copy] = field(init=False, factory=list)
    """Planned since the last step, in order."""
    loads: list[Move] = field(init=False, factory=list)
    """What comes before ``copies``: loads, and the copies planned before one of them."""
    _num_seen: int = field(init=False, default=0)
    _targets: set[Target] = field(init=False, factory=set)
    """Where the first so many of all these moves go."""

    def __attrs_post_init__(self) -> None:
        config = self.config
        self.limits = {Tier.DEVICE: config.num_blocks, Tier.HOST: config.num_host_blocks}
        self.num_used = dict.fromkeys(Tier, 0)
        self.groups = groups = config.token_groups
        if config.is_unified:
            arenas = tuple(Arena(sum(self.limits.values())) for _ in groups)
            self.arenas = dict.fromkeys(Tier, arenas)
        else:
            self.arenas = {tier: tuple(Arena(self.limits[tier]) for _ in groups) for tier in Tier}
        self.room = Room(config.num_host_blocks)
        if config.ram is not None:
            self.ram = SharedRam.of(config.ram, self.load)
            self._share(self.ram)

    def _share(self, ram: SharedRam) -> None:
        is_unified, num_own = self.config.is_unified, self.limits[Tier.DEVICE]
        self.room, self.item_bytes = ram.room, ram.budget.block_bytes
        ram.memory.add(
            Shelf(
                groups=self.groups,
                arenas=self.arenas[Tier.HOST],
                tier=self._memory(Tier.HOST),
                num_own=num_own if is_unified else 0,
                item_bytes=self.item_bytes,
            )
        )

    def num_in_ram(self, num_more: int = 0) -> int:
        """See ``room.Kind``."""
        return self.num_used[Tier.HOST] + num_more

    def is_full(self, tier: Tier) -> bool:
        return self.num_used[tier] >= self.limits[tier]

    def new_block(self, now: float) -> Block:
        """On the device, held once; there must be room."""
        self.num_used[Tier.DEVICE] += 1
        return Block(self._take_ids(Tier.DEVICE), last_used_s=now)

    def remove(self, block: Block) -> None:
        self.num_used[block.tier] -= 1
        self._free_ids(block.ids, block.tier)

    def transfer(self, block: Block, tier: Tier) -> None:
        """Move a block with its contents; there must be room."""
        self.num_used[block.tier] -= 1
        self.num_used[tier] += 1
        if not self.config.is_unified:
            ids = self._take_ids(tier)
            self._plan(block.ids, ids, (block.tier, tier), len(block.tags))
            self._free_ids(block.ids, block.tier)
            block.ids = ids
        block.tier = tier

    def copy(self, source: Block, target: Block, num_tokens: int) -> None:
        """Before the next step, copy the first places of a held block into another."""
        self._plan(source.ids, target.ids, (Tier.DEVICE, Tier.DEVICE), num_tokens)

    def load(self, load: Load | GiveBack) -> None:
        """Before the next step, fill a place with what comes from outside, or give it back."""
        self.loads += self.copies
        self.copies.clear()
        self.loads.append(load)

    def is_settled(self, save: Save) -> bool:
        """Whether what is to be read lies there now, and does not come with a planned move."""
        while self._num_seen < len(self.loads) + len(self.copies):
            at = self._num_seen - len(self.loads)
            move = self.copies[at] if at >= 0 else self.loads[self._num_seen]
            self._num_seen += 1
            if isinstance(move, Copy):
                self._targets.add((self._memory(move.target_tier), move.group, move.target))
            elif isinstance(move, Load):
                self._targets.update(self._places(move))
        return self._targets.isdisjoint(self._places(save))

    def _places(self, move: Save | Load) -> list[Target]:
        places = [(group, place) for group, place in move.places if place != NOWHERE]
        if isinstance(move, Load):
            return [(self._memory(move.tier), group, place) for group, place in places]
        return [(self._memory(move.tier_of(group)), group, place) for group, place in places]

    def _memory(self, tier: Tier) -> Tier:
        return Tier.DEVICE if self.config.is_unified else tier

    def take_loads(self) -> tuple[Move, ...]:
        loads = tuple(self.loads)
        self.loads.clear()
        self._num_seen = 0
        self._targets.clear()
        return loads

    def take_copies(self) -> tuple[Copy, ...]:
        copies = tuple(self.copies)
        self.copies.clear()
        return copies

    def _take_ids(self, tier: Tier) -> tuple[BlockId, ...]:
        return take_places(self.arenas[tier], self.ram)

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
        for group, source, target in zip(self.groups, sources, targets, strict=True):
            self.copies.append(Copy(group, source, target, num_tokens, *tiers))
