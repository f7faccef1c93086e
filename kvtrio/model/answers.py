"""What was answered to whom: a bounded store of texts with the token ids that spell them.

1. Namespaces share nothing but the limit.
2. The bytes held never exceed the limit; what was used least recently goes first.
3. With E entries and a text of n bytes a look-up compares O(n log E) bytes; it does no work per
   entry or per token.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from operator import attrgetter
from threading import Lock

from attrs import define, field, frozen

ENTRY_OVERHEAD_BYTES = 768
"""What an entry takes beside its text and numbers."""
NUMBER_BYTES = array("I").itemsize


@frozen(eq=False)
class Borders:
    """Where generated tokens end: with ``counts[i]`` tokens, ``ends[i]`` bytes of text are spelled.
    Both strictly ascending."""

    ends: "array[int]" = field(factory=lambda: array("I"), repr=False)
    counts: "array[int]" = field(factory=lambda: array("I"), repr=False)

    def __len__(self) -> int:
        return len(self.ends)

    def first(self, number: int) -> "Borders":
        return Borders(self.ends[:number], self.counts[:number])

    def index(self, place: int) -> int | None:
        """Of the border at byte ``place``."""
        index = bisect_left(self.ends, place)
        return index if index < len(self) and self.ends[index] == place else None


@frozen(eq=False)
class Entry:
    """A conversation up to the end of an answer."""

    namespace: bytes
    text: bytes = field(repr=False)
    ids: "array[int]" = field(repr=False)
    borders: Borders

    @property
    def key(self) -> tuple[bytes, bytes]:
        return self.namespace, self.text

    @property
    def num_bytes(self) -> int:
        numbers = len(self.ids) + 2 * len(self.borders)
        texts = len(self.namespace) + len(self.text)
        return texts + NUMBER_BYTES * numbers + ENTRY_OVERHEAD_BYTES


@define(eq=False)
class AnswerStore:
    """May be used from several threads at once."""

    limit_bytes: int
    """0 holds nothing."""
    num_bytes: int = field(init=False, default=0)
    _by_use: "OrderedDict[tuple[bytes, bytes], Entry]" = field(
        init=False, factory=OrderedDict, repr=False
    )
    """By namespace and text; least recently used first."""
    _by_text: dict[bytes, list[Entry]] = field(init=False, factory=dict, repr=False)
    """By namespace, in the order of the texts."""
    _lock: Lock = field(init=False, factory=Lock, repr=False)

    @property
    def num_entries(self) -> int:
        return len(self._by_use)

    def put(self, entry: Entry, in_place_of: Entry | None = None) -> None:
        """Hold ``entry``, unless it alone is beyond the limit."""
        if entry.num_bytes > self.limit_bytes:
            return
        with self._lock:
            if in_place_of is not None:
                self._discard(in_place_of.key)
            self._discard(entry.key)
            self._insert(entry)
            while self.num_bytes > self.limit_bytes:
                self._discard(next(iter(self._by_use)))

    def find(self, namespace: bytes, text: bytes) -> tuple[Entry, Borders] | None:
        """The entry that has most in common with ``text``, and its borders in that part."""
        with self._lock:
            shelf = self._by_text.get(namespace, [])
            # What shares most with a text stands beside it in the order of texts.
            place = bisect_left(shelf, text, key=attrgetter("text"))
            near = shelf[max(place - 1, 0) : place + 1]
        found = [(entry, _shared_borders(entry, text)) for entry in near]
        found = [(entry, borders) for entry, borders in found if borders]
        if not found:
            return None
        entry, borders = max(found, key=lambda each: each[1].ends[-1])
        with self._lock:
            if entry.key in self._by_use:
                self._by_use.move_to_end(entry.key)
        return entry, borders

    def _insert(self, entry: Entry) -> None:
        insort(self._by_text.setdefault(entry.namespace, []), entry, key=attrgetter("text"))
        self._by_use[entry.key] = entry
        self.num_bytes += entry.num_bytes

    def _discard(self, key: tuple[bytes, bytes]) -> None:
        entry = self._by_use.pop(key, None)
        if entry is None:
            return
        shelf = self._by_text[entry.namespace]
        del shelf[bisect_left(shelf, entry.text, key=attrgetter("text"))]
        if not shelf:
            del self._by_text[entry.namespace]
        self.num_bytes -= entry.num_bytes


def _shared_borders(entry: Entry, text: bytes) -> Borders:
    shared = _num_shared_bytes(entry.text, text)
    return entry.borders.first(bisect_right(entry.borders.ends, shared))


def _num_shared_bytes(one: bytes, two: bytes) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
