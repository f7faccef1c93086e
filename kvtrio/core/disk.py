"""What lies on disk, as the core knows it: heads, an order of leaving, and a limit in bytes.

1. An entry is a block or a state; it is found by its key, or by its parent and its tokens.
2. The sizes of all entries, those that are still being written included, stay within the limit.
3. What others lie behind goes after them: an entry whose parent has gone could not be found.
4. Of those that may go, the one that was not used for longest goes first.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import TypeVar

from attrs import define, field

from kvtrio.core.identity import TOKEN_MASK, TokenTrail
from kvtrio.core.index import common_prefix
from kvtrio.core.stored import StoredHead

K = TypeVar("K")

Name = tuple[bytes, int]
"""Key and state offset."""


@define(eq=False)
class Entry:
    """A block or a state on disk, or on its way there."""

    head: StoredHead
    size: int
    """Bytes; at most so many while it is written."""
    is_there: bool
    """It can be read."""
    used: int = 0
    """The clock when it was last used; 0: it is gone."""

    @property
    def name(self) -> Name:
        return self.head.key, self.head.state_offset

    def __lt__(self, other: "Entry") -> bool:
        return self.head.token_ids < other.head.token_ids


@define(eq=False)
class DiskTier:
    """add / follow / use / lowest / drop; see the module's rules."""

    limit: int
    """Bytes."""
    num_bytes: int = field(init=False, default=0)
    entries: dict[Name, Entry] = field(init=False, factory=dict)
    blocks: dict[bytes, list[Entry]] = field(init=False, factory=dict)
    """Per parent, sorted by tokens."""
    states: dict[tuple[bytes, tuple[int, ...]], list[Entry]] = field(init=False, factory=dict)
    """By parent and tokens."""
    num_below: Counter[bytes] = field(init=False, factory=Counter)
    """Per parent, blocks and states."""
    _heap: list[tuple[int, Entry]] = field(init=False, factory=list)
    _clock: int = field(init=False, default=0)

    def add(self, head: StoredHead, size: int, *, is_there: bool) -> Entry:
        """One more; there must be room, and none of that name."""
        entry = Entry(head, size, is_there)
        assert entry.name not in self.entries
        self.entries[entry.name] = entry
        self.num_bytes += size
        self.num_below[head.parent] += 1
        if head.state_offset:
            self.states.setdefault((head.parent, head.token_ids), []).append(entry)
        else:
            siblings = self.blocks.setdefault(head.parent, [])
            siblings.insert(bisect_left(siblings, entry), entry)
        self.use([entry])
        return entry

    def note_written(self, entry: Entry, size: int) -> None:
        """It can be read, and has its final size."""
        assert not entry.is_there
        assert size <= entry.size, "room was made for it"
        self.num_bytes += size - entry.size
        entry.size, entry.is_there = size, True

    def drop(self, entry: Entry) -> None:
        """It is gone."""
        head = entry.head
        assert entry.used, "it is gone already"
        entry.used = 0
        del self.entries[entry.name]
        self.num_bytes -= entry.size
        self.num_below[head.parent] -= 1
        if not self.num_below[head.parent]:
            del self.num_below[head.parent]
            if parent := self.entries.get((head.parent, 0)):
                self._push(parent)
        if head.state_offset:
            _take_out(self.states, (head.parent, head.token_ids), entry)
        else:
            _take_out(self.blocks, head.parent, entry)

    def use(self, entries: Iterable[Entry]) -> None:
        """They were used, the last one first."""
        for entry in reversed(list(entries)):
            self._clock += 1
            entry.used = self._clock
            self._push(entry)

    def has_room(self, size: int) -> bool:
        return self.num_bytes + size <= self.limit

    def lowest(self, spared: bytes) -> Entry | None:
        """The one to lose next: not the block with key ``spared``, nor what is being written."""
        kept, found = list[tuple[int, Entry]](), None
        while self._heap and found is None:
            used, entry = self._heap[0]
            if entry.used != used or self.has_others_behind(entry):
                heappop(self._heap)
            elif entry.head.key == spared or not entry.is_there:
                kept.append(heappop(self._heap))
            else:
                found = entry
        for item in kept:
            heappush(self._heap, item)
        return found

    def shorter(self, head: StoredHead) -> Entry | None:
        """A block that begins like a new one and has nothing behind it: of no use beside it."""
        siblings = self.blocks.get(head.parent, [])
        at = bisect_left(siblings, head.token_ids, key=_tokens)
        before = siblings[at - 1] if at else None
        if before is None or not before.is_there or before.head.runs != head.runs:
            return None
        tokens = before.head.token_ids
        is_beginning = len(tokens) < len(head.token_ids) and head.token_ids[: len(tokens)] == tokens
        return before if is_beginning else None

    # --- looking for a sequence ---

    def follow(self, trail: TokenTrail, index: int, limit: int) -> list[Entry]:
        """What is there of a sequence's first ``limit`` tokens from block ``index`` on, in order:
        each block before the states on it. Of whole blocks the keys alone are compared: who reads
        them compares their tokens."""
        found, size = list[Entry](), trail.block_size
        parent = trail.key(index - 1) if index else trail.keys.root_key()
        while (index + 1) * size <= limit:
            entry = self.entries.get((trail.key(index), 0))
            if entry is None or not entry.is_there:
                break
            found += [entry, *self.states_at(trail, index, limit)]
            parent, index = trail.key(index), index + 1
        if (last := self._longest(trail, parent, index, limit)) is not None:
            found.append(last)
        found += self.states_at(trail, index, limit)
        return found

    def _longest(self, trail: TokenTrail, parent: bytes, index: int, limit: int) -> Entry | None:
        """The block of those after ``parent`` that has most tokens in common with the sequence."""
        start = index * trail.block_size
        wanted = tokens_of(trail, start, min(start + trail.block_size, limit))
        siblings = self.blocks.get(parent, [])
        at = bisect_left(siblings, wanted, key=_tokens)
        best, longest = None, 0
        for entry in siblings[max(at - 1, 0) : at + 1]:
            num = common_prefix(entry.head.token_ids, wanted)
            if num > longest and entry.is_there and is_under(entry.head, trail, num):
                best, longest = entry, num
        return best

    def states_at(self, trail: TokenTrail, index: int, limit: int) -> list[Entry]:
        """Those on block ``index`` of the sequence, or on what will be it."""
        if not self.states:
            return []
        parent = trail.key(index - 1) if index else trail.keys.root_key()
        if not self.num_below[parent]:
            return []
        start = index * trail.block_size
        tokens = tokens_of(trail, start, min(start + trail.block_size, limit))
        found = list[Entry]()
        for offset in range(1, len(tokens) + 1):
            for entry in self.states.get((parent, tokens[:offset]), ()):
                if entry.is_there and is_under(entry.head, trail, offset):
                    found.append(entry)
        return found

    def along(self, trail: TokenTrail) -> list[Entry]:
        """All that lies on a sequence and has no token that is not the sequence's, in order; what
        is being written, too."""
        found, size = list[Entry](), trail.block_size
        parent = trail.keys.root_key()
        for start in range(0, len(trail.tags), size):
            tokens = tokens_of(trail, start, start + size)
            found += [entry for entry in self.blocks.get(parent, ()) if _begins(entry, tokens)]
            for offset in range(1, len(tokens) + 1):
                found += self.states.get((parent, tokens[:offset]), ())
            if len(tokens) < size:
                break
            parent = trail.key(start // size)
        return [entry for entry in found if is_under(entry.head, trail, len(entry.head.token_ids))]

    # --- order ---

    def _push(self, entry: Entry) -> None:
        heappush(self._heap, (entry.used, entry))
        if len(self._heap) > 2 * len(self.entries) + 64:
            self._heap[:] = [item for item in self._heap if item[1].used == item[0]]
            heapify(self._heap)

    def has_others_behind(self, entry: Entry) -> bool:
        """It comes into the order again when they have gone."""
        return not entry.head.state_offset and bool(self.num_below[entry.head.key])


def tokens_of(trail: TokenTrail, start: int, end: int) -> tuple[int, ...]:
    return tuple(tag & TOKEN_MASK for tag in trail.tags[start:end])


def is_under(head: StoredHead, trail: TokenTrail, num_tokens: int) -> bool:
    """Whether the first tokens of an entry were computed under what the sequence has there."""
    mine = [run for run in head.runs if run.offset < num_tokens]
    theirs = trail.runs(head.start, head.start + num_tokens)
    return [(run.offset, run.digest) for run in mine] == theirs


def _begins(entry: Entry, tokens: tuple[int, ...]) -> bool:
    own = entry.head.token_ids
    return tokens[: len(own)] == own


def _tokens(entry: Entry) -> tuple[int, ...]:
    return entry.head.token_ids


def _take_out(groups: dict[K, list[Entry]], key: K, entry: Entry) -> None:
    groups[key].remove(entry)
    if not groups[key]:
        del groups[key]
