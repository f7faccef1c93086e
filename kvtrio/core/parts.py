"""Where the parts of blocks lie that groups with a sliding window have, and which are kept.

1. A part is held (by requests whose next tokens see it), cached (its block is published) or gone;
   a held one lies on the device.
2. Parts of a tier never outnumber its limit; ``config.window_blocks`` says why running requests
   always have room on the device.
3. Where device and host are one memory, parts know one tier, the device, with room for both.
4. The part of least value goes first. It is worth what can be resumed from while it is there, on a
   clock that rises with each loss, as for blocks (see ``eviction``).
5. A leaf without its part is worth nothing, for nobody can resume within it or behind it.
"""

from attrs import define, field

from kvtrio.core.batch import Copy
from kvtrio.core.blocks import Arena, Block, Part
from kvtrio.core.config import CoreConfig
from kvtrio.core.eviction import FAR_TOKENS, Candidates, Order
from kvtrio.core.keeping import Keeper
from kvtrio.core.room import Offer, Room, SharedRam, Shelf, take_places
from kvtrio.core.types import BlockId, Tier

PASSED_SHARE = 1 / 8
"""Of its worth that a window keeps when a sequence goes on: next turns resume from the last one."""


@define(eq=False)
class Parts:
    """take / hold / bring / release / adopt / drop; see the module's rules."""

    config: CoreConfig
    copies: list[Copy]
    """Those planned for the next step, of blocks too."""
    ram: SharedRam | None
    """None: each kind of state has its own share."""
    blocks: dict[Tier, Candidates]
    """Whose worth depends on their parts."""
    keeper: Keeper | None = None
    """None: there is no disk tier."""
    limits: dict[Tier, int] = field(init=False)
    num_used: dict[Tier, int] = field(init=False)
    """Held and cached."""
    arenas: dict[Tier, tuple[Arena, ...]] = field(init=False)
    order: dict[Tier, Order[Part]] = field(init=False)
    """Those that nobody holds."""
    room: Room = field(init=False)
    """In RAM."""
    item_bytes: int = field(init=False, default=1)
    _scale: float = field(init=False, default=1.0)
    """What a part's worth is on that clock."""
    _beyond: Tier = field(init=False)
    """The tier whose parts may lie in RAM: the device's that outnumber its share, or RAM's."""

    def __attrs_post_init__(self) -> None:
        config, groups = self.config, self.config.window_groups
        device, host = config.num_window_blocks, config.num_host_window_blocks
        self.limits = {Tier.DEVICE: device, Tier.HOST: host}
        if config.is_unified:
            self.limits = {Tier.DEVICE: device + host, Tier.HOST: 0}
        self.num_used = dict.fromkeys(Tier, 0)
        self.arenas = {tier: tuple(Arena(self.limits[tier]) for _ in groups) for tier in Tier}
        self.order = {tier: Order[Part](self.limits[tier]) for tier in Tier}
        self._beyond = Tier.DEVICE if config.is_unified else Tier.HOST
        if self.ram is None:
            self.room = Room(host)
        else:
            self._share(self.ram)
        self.room.enter(self, self.order[self._beyond])

    def _share(self, ram: SharedRam) -> None:
        budget, self.room = ram.budget, ram.room
        self.item_bytes, self._scale = budget.part_bytes, budget.block_bytes / budget.part_bytes
        self.order[self._beyond].limit = budget.num_with_parts
        ram.memory.add(
            Shelf(
                groups=self.config.window_groups,
                arenas=self.arenas[self._beyond],
                tier=self._beyond,
                num_own=self._num_own,
                item_bytes=budget.part_bytes,
            )
        )

    @property
    def _num_own(self) -> int:
        """Of the tier beyond: those that count nowhere."""
        return self.config.num_window_blocks if self.config.is_unified else 0

    # --- what requests do ---

    def take(self, block: Block, now: float) -> Part:
        """A new block's, held once."""
        self._make_room(now)
        return Part(self._take_ids(Tier.DEVICE), block)

    def hold(self, part: Part) -> None:
        """It goes on to be where it is; see ``bring``."""
        part.num_refs += 1
        if part.is_candidate:
            self.order[part.tier].discard(part)

    def bring(self, part: Part, now: float) -> None:
        """To the device, a held one."""
        if part.tier is Tier.HOST:
            self._make_room(now)
            self._transfer(part, Tier.DEVICE)

    def release(self, part: Part, now: float) -> None:
        """One hold less. What was of an unpublished block is gone if it was the last."""
        assert part.num_refs > 0
        part.num_refs -= 1
        if part.num_refs:
            return
        if part.block.key is None:
            self.drop(part)
        else:
            self._enter(part, now)

    def keep(self, part: Part, position: int) -> None:
        """Somebody may go on from ``position``, which sees the part: it is worth what that is."""
        part.worth = self.worth(position)
        part.is_wanted, part.end = True, position

    def worth(self, position: int) -> float:
        """What it costs to compute the first ``position`` tokens again, in whole blocks at the
        start of a prompt, for each block of the window before ``position``."""
        num_seen = max(min(position, self.config.window), self.config.block_size)
        return position / num_seen * (1 + position / (2 * FAR_TOKENS))

    def copy(self, source: Part, target: Part, num_tokens: int) -> None:
        """Before the next step, copy the first places of a held part into another."""
        self._plan(source.ids, target.ids, (Tier.DEVICE, Tier.DEVICE), num_tokens)

    # --- what the cache does ---

    def adopt(self, known: Block, own: Block) -> None:
        """``known`` takes the place of ``own``, which has the same contents and whose part its
        request holds: the request goes on to hold one of the two."""
        mine, theirs = own.part, known.part
        assert mine is not None
        if theirs is None:
            known.part, own.part, mine.block = mine, None, known
            if self.keeper is not None:
                self.keeper.block_comes(known)
            return
        self.hold(theirs)
        if theirs.tier is Tier.HOST:
            # Its contents are on the device already: trade places instead of copying.
            theirs.ids, mine.ids = mine.ids, theirs.ids
            theirs.tier, mine.tier = Tier.DEVICE, Tier.HOST
        mine.num_refs = 0
        self.drop(mine)

    def drop(self, part: Part) -> None:
        """Nobody holds it."""
        assert not part.num_refs
        if part.is_candidate:
            self.order[part.tier].discard(part)
        part.block.part = None
        self._free_ids(part.ids, part.tier)

    # --- room ---

    def _make_room(self, now: float) -> None:
        if self.config.is_unified:
            has_room = self.room.make(self, 0.0, now, is_must=True)
            assert has_room, "the device holds what all places see"
            return
        device = self.order[Tier.DEVICE]
        while self.num_used[Tier.DEVICE] >= self.limits[Tier.DEVICE]:
            victim = device.lowest(now)
            assert victim is not None, "the device holds what all places see"
            device.rise(victim)
            value = self.room.level + victim.worth * self._scale
            has_room = self.room.make(self, value, now)
            if not victim.is_candidate:
                continue  # it went with its block, for which there was no room
            if has_room:
                self._demote(victim, now)
            else:
                self.lose(victim, now)

    def num_in_ram(self, num_more: int = 0) -> int:
        """See ``room.Kind``."""
        return max(0, self.num_used[self._beyond] + num_more - self._num_own)

    def offer(self, now: float) -> Offer | None:
        """See ``room.Kind``."""
        order = self.order[self._beyond]
        lowest = order.lowest(now)
        return None if lowest is None else Offer(order.rank(lowest, now), lowest.value, lowest)

    def _demote(self, part: Part, now: float) -> None:
        self.order[Tier.DEVICE].discard(part)
        self._transfer(part, Tier.HOST)
        self._enter(part, now)

    def _enter(self, part: Part, now: float) -> None:
        """Among those that may go."""
        order = self.order[part.tier]
        # What is worth nothing goes before all that is, however old.
        part.value = order.level + part.worth * self._scale if part.worth else 0.0
        order.add(part, now)

    def lose(self, item: Part, now: float) -> None:
        """It goes, unless the disk takes it."""
        block = item.block
        if self.keeper is not None and item.is_wanted:
            self.keeper.block_goes(block)
        self.drop(item)
        if not block.children:
            self.blocks[block.tier].devalue(block, now)

    # --- places ---

    def _transfer(self, part: Part, tier: Tier) -> None:
        ids = self._take_ids(tier)
        self._plan(part.ids, ids, (part.tier, tier), len(part.block.tags))
        self._free_ids(part.ids, part.tier)
        part.ids, part.tier = ids, tier

    def _take_ids(self, tier: Tier) -> tuple[BlockId, ...]:
        self.num_used[tier] += 1
        return take_places(self.arenas[tier], self.ram)

    def _free_ids(self, ids: tuple[BlockId, ...], tier: Tier) -> None:
        self.num_used[tier] -= 1
        for arena, block_id in zip(self.arenas[tier], ids, strict=True):
            arena.free(block_id)

    def _plan(
        self,
        sources: tuple[BlockId, ...],
        targets: tuple[BlockId, ...],
        tiers: tuple[Tier, Tier],
        num_tokens: int,
    ) -> None:
        for group, one, other in zip(self.config.window_groups, sources, targets, strict=True):
            self.copies.append(Copy(group, one, other, num_tokens, *tiers))
