"""Which cached block goes first.

Value is what it costs to compute the block again, on a clock that rises with every loss
(GreedyDual: N. Young, 1994; Cao and Irani, 1997): a block that is not used again falls behind by
standing still. Cost counts position, since a late token attends to everything before it. Blocks
go leaf first; that is the caller's doing, who names only blocks that may go.

Short strangers (probes, titles: leaves that end early) compete among themselves once they fill
their share, so however many come, a conversation keeps its state.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from attrs import define, field

from kvtrio.core.blocks import Block

SHORT_TOKENS = 256
"""A leaf that ends before this position belongs to a short stranger."""
SHORT_SHARE = 8
"""Short strangers may fill one part in this many before they displace each other."""
FIRST, USUAL, LAST = range(3)
"""Short strangers beyond their share, most, and what is pinned."""
FAR_TOKENS = 4096
"""Where a token costs twice what the first one does."""
LEAST_CLEARED = 64
"""Entries that a heap may have, dead or alive."""


class Item(Protocol):
    """A block, or its part."""

    value: float
    pinned_until_s: float
    stamp: int
    is_candidate: bool
    is_short: bool

    @property
    def end(self) -> int:
        """Tokens of the sequence that it is of."""
        ...


T = TypeVar("T", bound=Item)
Entry = tuple[float, int, int, T]
"""(order, entry's number, item's stamp, item): alive while the item still has that stamp."""


def worth(num_tokens: int, start: int, block_size: int) -> float:
    """Cost to compute a block again, in whole blocks at the start of a prompt."""
    return num_tokens / block_size * (1 + start / FAR_TOKENS)


@define(eq=False)
class Heap(Generic[T]):
    """Entries, the least first; ``top`` is the first one that is alive."""

    entries: list[Entry[T]] = field(init=False, factory=list)
    _most: int = field(init=False, default=LEAST_CLEARED)

    def push(self, entry: Entry[T]) -> None:
        heappush(self.entries, entry)
        if len(self.entries) > self._most:
            # Without losses nobody else would clear dead entries away.
            self.entries = [each for each in self.entries if each[3].stamp == each[2]]
            heapify(self.entries)
            self._most = max(2 * len(self.entries), LEAST_CLEARED)

    def top(self) -> T | None:
        entries = self.entries
        while entries:
            _, _, stamp, item = entries[0]
            if item.stamp == stamp:
                return item
            heappop(entries)
        return None


@define(eq=False)
class Order(Generic[T]):
    """What may go in one tier, least value first. ``limit``: items in the tier."""

    limit: int
    level: float = field(init=False, default=0.0)
    """Value of the last victim."""
    num_short: int = field(init=False, default=0)
    _num_entries: int = field(init=False, default=0)
    _long: Heap[T] = field(init=False, factory=Heap)
    _short: Heap[T] = field(init=False, factory=Heap)
    _pinned: Heap[T] = field(init=False, factory=Heap)

    def add(self, item: T, now: float) -> None:
        assert not item.is_candidate
        item.is_candidate = True
        self._num_entries += 1
        if item.pinned_until_s > now:
            self._pinned.push((item.pinned_until_s, self._num_entries, item.stamp, item))
            return
        item.is_short = item.end < SHORT_TOKENS
        self.num_short += item.is_short
        heap = self._short if item.is_short else self._long
        heap.push((item.value, self._num_entries, item.stamp, item))

    def discard(self, item: T) -> None:
        """It may not go any more. Its heap entry dies by its stamp."""
        assert item.is_candidate
        self.num_short -= item.is_short
        item.stamp += 1
        item.is_candidate = item.is_short = False

    def lowest(self, now: float) -> T | None:
        """What to lose next; None if there is no candidate."""
        while (first := self._pinned.top()) and first.pinned_until_s <= now:
            self.discard(first)
            self.add(first, now)
        short, long = self._short.top(), self._long.top()
        if short is None:
            return long or self._pinned.top()
        if long is None or self._has_many_short:
            return short
        return short if short.value <= long.value else long

    def rank(self, item: T, now: float) -> int:
        """Of a candidate, where other kinds compete with it: lower ones go first."""
        if item.pinned_until_s > now:
            return LAST
        return FIRST if item.is_short and self._has_many_short else USUAL

    @property
    def _has_many_short(self) -> bool:
        return SHORT_SHARE * self.num_short > self.limit

    def rise(self, victim: T) -> None:
        """``victim`` is being lost: the clock rises to its value."""
        if victim.value > self.level:
            self.level = victim.value


@define(eq=False)
class Candidates(Order[Block]):
    """The blocks of one tier that may go."""

    needs_states: bool = False
    """The model has recurrent layers: it cannot resume behind the last checkpoint, so that blocks
    there are worth nothing."""

    def use(self, block: Block, now: float) -> None:
        """The block was used: it rises to the clock's level plus its worth."""
        block.last_used_s = now
        block.value = self.value_now(block)

    def value_now(self, block: Block) -> float:
        """As if it was used now."""
        if self.needs_states and not block.num_states:
            return self.level
        return self.level + block.worth

    def devalue(self, block: Block, now: float) -> None:
        """Nobody can resume behind it any more."""
        block.value = self.level
        if block.is_candidate:
            self.discard(block)
            self.add(block, now)
