"""RAM for the state of past requests: who has to go for whom, and which places have memory.

1. The bytes of all kinds that share a room never exceed its limit. They are computed from the
   kinds' own counts, and stored nowhere else.
2. The least value per byte goes first, over all kinds, on one clock that rises with each loss; but
   before all others short strangers beyond their share, and pinned ones last (see ``eviction``).
3. A kind with a share of its own is alone in its room, and one of it counts one byte.
4. Of places beyond the device's share only those have memory that were taken since it was last
   given back, and their bytes never exceed the limit either: free ones are given back, whatever
   their kind, before a place without memory is taken. What is kept fits, so they always suffice.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from attrs import define, field, frozen

from kvtrio.core.batch import GiveBack
from kvtrio.core.blocks import Arena
from kvtrio.core.config import RamBudget
from kvtrio.core.eviction import Order
from kvtrio.core.types import BlockId, Tier


class Offer(NamedTuple):
    """What a kind would lose next; made at each loss, so a tuple."""

    rank: int
    """Lower ones go first; see ``eviction.Order.rank``."""
    value: float
    item: Any
    """The kind's own."""


class Kind(Protocol):
    """Blocks, parts of blocks, or checkpoints."""

    item_bytes: int

    def num_in_ram(self, num_more: int = 0) -> int:
        """How many count there, if there were so many more."""
        ...

    def offer(self, now: float) -> Offer | None:
        """What goes next; None: nothing may."""
        ...

    def lose(self, item: Any, now: float) -> None:
        """What was offered."""
        ...


@define(eq=False)
class Room:
    """See the module's rules."""

    limit: int
    """Bytes."""
    kinds: list[Kind] = field(init=False, factory=list)
    orders: list[Order[Any]] = field(init=False, factory=list)
    """On this room's clock."""
    level: float = field(init=False, default=0.0)
    """Value of the last one lost."""

    def enter(self, kind: Kind, *orders: Order[Any]) -> None:
        self.kinds.append(kind)
        self.orders += orders

    @property
    def num_bytes(self) -> int:
        return sum(kind.item_bytes * kind.num_in_ram() for kind in self.kinds)

    def make(self, kind: Kind, value: float, now: float, is_must: bool = False) -> bool:
        """Room for one more of ``kind``; False if all there is worth more than ``value``, or none
        may go. ``is_must``: it comes whatever it is worth."""
        # For what can never fit no other kind has to go, nor does one that has nothing there: parts
        # of the device's share are in the order of those beyond it.
        kinds = self.kinds if kind.item_bytes <= self.limit else [kind]
        while self._lacks(kind):
            loser: Kind = kind
            least: Offer | None = None
            for each in kinds:
                offer = each.offer(now) if each is kind or each.num_in_ram() else None
                if offer and (least is None or offer[:2] < least[:2]):
                    loser, least = each, offer
            if least is None or (least.value > value and not is_must):
                return False
            self.rise(least.value)
            loser.lose(least.item, now)
        return True

    def _lacks(self, kind: Kind) -> bool:
        used = 0
        for each in self.kinds:
            used += each.item_bytes * each.num_in_ram(each is kind)
        return used > self.limit

    def rise(self, value: float) -> None:
        """Something of this value is lost."""
        if value > self.level:
            self.level = value
            for order in self.orders:
                order.level = value


@frozen(eq=False)
class Shelf:
    """The places of one kind in one memory, numbered alike in each of its groups."""

    groups: Sequence[int]
    arenas: tuple[Arena, ...]
    tier: Tier
    """By which backends know the memory."""
    num_own: int
    """Places of the device's share, which count nowhere."""
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of those with memory beyond the device's share."""
        first = self.arenas[0]
        num_there = first.num_blocks - len(first.bare_ids)
        return max(0, num_there - self.num_own) * self.item_bytes

    @property
    def spare_bytes(self) -> int:
        """What could be given back."""
        return min(self.num_bytes, len(self.arenas[0].free_ids) * self.item_bytes)


@define(eq=False)
class Memory:
    """Which places have memory."""

    limit: int
    """Bytes."""
    plan: Callable[[GiveBack], None]
    """In order with the copies in front of the next step."""
    shelves: list[Shelf] = field(init=False, factory=list)

    def add(self, shelf: Shelf) -> None:
        """Its places beyond the device's share are bare."""
        if not shelf.arenas:
            return
        for arena in shelf.arenas:
            assert len(arena.free_ids) == arena.num_blocks, "nothing was taken yet"
            num_bare = arena.num_blocks - shelf.num_own
            arena.bare_ids = arena.free_ids[:num_bare]
            arena.free_ids = arena.free_ids[num_bare:]
        self.shelves.append(shelf)

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self.shelves)

    def lend(self, arenas: tuple[Arena, ...]) -> None:
        """Memory for one bare place of each."""
        shelf = next(each for each in self.shelves if each.arenas is arenas)
        for arena in arenas:
            assert not arena.free_ids, "places with memory are taken first"
            arena.free_ids.append(arena.bare_ids.pop())
        while self.num_bytes > self.limit:
            others = [each for each in self.shelves if each is not shelf]
            donor = max(others, key=lambda each: each.spare_bytes)
            assert donor.spare_bytes, "what is kept fits"
            self._give_back(donor)

    def _give_back(self, shelf: Shelf) -> None:
        for group, arena in zip(shelf.groups, shelf.arenas, strict=True):
            place = arena.free_ids.pop()
            arena.bare_ids.append(place)
            self.plan(GiveBack(group, place, shelf.tier))


@frozen(eq=False)
class SharedRam:
    """What all kinds share under one budget."""

    budget: RamBudget
    room: Room
    memory: Memory

    @classmethod
    def of(cls, budget: RamBudget, plan: Callable[[GiveBack], None]) -> "SharedRam":
        return cls(budget, Room(budget.num_bytes), Memory(budget.num_bytes, plan))


def take_places(arenas: tuple[Arena, ...], ram: SharedRam | None) -> tuple[BlockId, ...]:
    """One place of each; where RAM is shared, with memory."""
    if ram is not None and arenas and not arenas[0].free_ids:
        ram.memory.lend(arenas)
    return tuple([arena.take() for arena in arenas])
