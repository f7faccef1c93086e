"""Where states of recurrent layers lie: slots in two memories, and copies between them.

1. Slots of a tier never outnumber its limit; on the device every place's request can have one.
2. As with blocks, device and host may be one arena: then a move changes a slot's tier and nothing
   is copied.
"""

from attrs import define, field

from kvtrio.core.batch import Copy
from kvtrio.core.blocks import Arena, Slot
from kvtrio.core.config import CoreConfig
from kvtrio.core.room import SharedRam, Shelf, take_places
from kvtrio.core.types import BlockId, Tier


@define(eq=False)
class Slots:
    """Places, counts and planned copies; see the module's rules."""

    config: CoreConfig
    copies: list[Copy]
    """Those planned for the next step, of blocks too."""
    ram: SharedRam | None
    """None: each kind of state has its own share."""
    arenas: dict[Tier, tuple[Arena, ...]] = field(init=False)
    limits: dict[Tier, int] = field(init=False)
    num_used: dict[Tier, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        config = self.config
        assert config.num_state_slots >= config.num_places, "every place has a running state"
        self.limits = {Tier.DEVICE: config.num_state_slots, Tier.HOST: config.num_host_state_slots}
        self.num_used = dict.fromkeys(Tier, 0)
        groups = config.point_groups
        if config.is_unified:
            arenas = tuple(Arena(sum(self.limits.values())) for _ in groups)
            self.arenas = dict.fromkeys(Tier, arenas)
        else:
            self.arenas = {tier: tuple(Arena(self.limits[tier]) for _ in groups) for tier in Tier}
        if self.ram is not None:
            self.ram.memory.add(
                Shelf(
                    groups=groups,
                    arenas=self.arenas[Tier.HOST],
                    tier=Tier.DEVICE if config.is_unified else Tier.HOST,
                    num_own=self.limits[Tier.DEVICE] if config.is_unified else 0,
                    item_bytes=self.ram.budget.state_bytes,
                )
            )

    def free(self, slot: Slot) -> None:
        """Give its room back."""
        self.num_used[slot.tier] -= 1
        for arena, (_, place) in zip(self.arenas[slot.tier], slot.places, strict=True):
            arena.free(place)

    def _new(self, tier: Tier) -> Slot:
        """There must be room."""
        self.num_used[tier] += 1
        return Slot(self._take_places(tier), tier)

    def _take_places(self, tier: Tier) -> tuple[tuple[int, BlockId], ...]:
        ids = take_places(self.arenas[tier], self.ram)
        return tuple(zip(self.config.point_groups, ids, strict=True))

    def _transfer(self, slot: Slot, tier: Tier) -> None:
        """Move a slot with its state; there must be room."""
        self.num_used[slot.tier] -= 1
        self.num_used[tier] += 1
        if not self.config.is_unified:
            source = Slot(slot.places, slot.tier)
            slot.places, slot.tier = self._take_places(tier), tier
            self._plan(source, slot)
            for arena, (_, place) in zip(self.arenas[source.tier], source.places, strict=True):
                arena.free(place)
        slot.tier = tier

    def _plan(self, source: Slot, target: Slot) -> None:
        """Before the next step, copy a state."""
        tiers = (Tier.DEVICE, Tier.DEVICE)
        if not self.config.is_unified:
            tiers = (source.tier, target.tier)
        for (group, one), (_, other) in zip(source.places, target.places, strict=True):
            self.copies.append(Copy(group, one, other, 0, *tiers))
