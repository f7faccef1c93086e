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
FAR_TOKENS = 4096
"""Where a token costs twice what the first one does."""


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
class Order(Generic[T]):
    """What may go in one tier, least value first. ``limit``: items in the tier."""

    limit: int
    level: float = field(init=False, default=0.0)
    """Value of the last victim."""
    num_short: int = field(init=False, default=0)
    _num_entries: int = field(init=False, default=0)
    _long: list[Entry[T]] = field(init=False, factory=list)
    _short: list[Entry[T]] = field(init=False, factory=list)
    _pinned: list[Entry[T]] = field(init=False, factory=list)

    def add(self, item: T, now: float) -> None:
        assert not item.is_candidate
        item.is_candidate = True
        self._num_entries += 1
        if item.pinned_until_s > now:
            _push(self._pinned, (item.pinned_until_s, self._num_entries, item.stamp, item))
            return
        item.is_short = item.end < SHORT_TOKENS
        self.num_short += item.is_short
        heap = self._short if item.is_short else self._long
        _push(heap, (item.value, self._num_entries, item.stamp, item))

    def discard(self, item: T) -> None:
        """It may not go any more. Its heap entry dies by its stamp."""
        assert item.is_candidate
        self.num_short -= item.is_short
        item.stamp += 1
        item.is_candidate = item.is_short = False

    def lowest(self, now: float) -> T | None:
        """What to lose next; None if there is no candidate."""
        while (first := _top(self._pinned)) and first.pinned_until_s <= now:
            self.discard(first)
            self.add(first, now)
        short, long = _top(self._short), _top(self._long)
        if short is None:
            return long or _top(self._pinned)
        if long is None or SHORT_SHARE * self.num_short > self.limit:
            return short
        return short if short.value <= long.value else long

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


def _is_live(entry: Entry[T]) -> bool:
    _, _, stamp, item = entry
    return item.stamp == stamp


def _push(heap: list[Entry[T]], entry: Entry[T]) -> None:
    heappush(heap, entry)
    if len(heap) & (len(heap) - 1) == 0:
        # At each doubling: without losses nobody else would clear dead entries away.
        heap[:] = filter(_is_live, heap)
        heapify(heap)


def _top(heap: list[Entry[T]]) -> T | None:
    while heap:
        _, _, stamp, item = heap[0]
        if item.stamp == stamp:
            return item
        heappop(heap)
    return None
