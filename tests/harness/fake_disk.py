"""Files that are no files: what the core orders is done in a dict, and reported when asked."""

from collections import deque
from collections.abc import Callable

from attrs import define, evolve, field

from kvtrio.core.events import Fetched, Written
from kvtrio.core.keeping import Fetch, Order, Remove, Touch, Write
from kvtrio.core.machine import Core
from kvtrio.core.stored import Stored, StoredHead, StoreError, StoreFault


@define(eq=False)
class FakeDisk:
    """``limit`` bytes; ``fails(name)`` says whether reading or writing an entry fails this time."""

    limit: int
    fails: Callable[[str], bool] = lambda name: False
    files: dict[tuple[bytes, int], Stored] = field(factory=dict)
    orders: deque[Order] = field(factory=deque)
    num_writes: int = 0

    def listen(self, core: Core) -> None:
        """Take the core's orders."""
        assert core.cache.keeper is not None
        self.orders += core.cache.keeper.take_orders()

    def heads(self) -> tuple[StoredHead, ...]:
        return tuple(stored.head for stored in self.files.values())

    def do_one(self, core: Core, now: float) -> None:
        """The oldest order."""
        match self.orders.popleft():
            case Write(stored):
                report = self._write(stored)
                assert core.handle(report, now) == []
            case Remove(key, state_offset):
                self.files.pop((key, state_offset), None)
            case Touch():
                pass
            case Fetch(number, heads):
                found = [self._read(head) for head in heads]
                faults = tuple(each for each in found if isinstance(each, StoreFault))
                stored = tuple(each if isinstance(each, Stored) else None for each in found)
                assert core.handle(Fetched(number, stored, faults), now) == []

    def _write(self, stored: Stored) -> Written:
        name, size = (stored.head.key, stored.head.state_offset), _size(stored)
        assert name not in self.files, "it is there"
        if self.fails("write"):
            return Written(*name, None)
        used = sum(each.head.size for each in self.files.values())
        assert used + size <= self.limit, "the limit holds at every instant"
        self.files[name] = evolve(stored, head=evolve(stored.head, size=size))
        self.num_writes += 1
        return Written(*name, size)

    def _read(self, head: StoredHead) -> Stored | StoreFault:
        stored = self.files.get((head.key, head.state_offset))
        if stored is None:
            return StoreFault.NOT_FOUND
        return StoreFault.DAMAGED if self.fails("read") else stored


def _size(stored: Stored) -> int:
    """A head takes less than any part, so that a file's size tells whether its part is there."""
    return sum(map(len, stored.parts)) + 20


@define(eq=False)
class MemoryFiles:
    """Implements the engine's ``Files`` in memory. ``fails`` as above."""

    fails: Callable[[str], bool] = lambda name: False
    files: dict[tuple[bytes, int], Stored] = field(factory=dict)
    num_reads: int = 0

    def heads(self) -> tuple[StoredHead, ...]:
        return tuple(stored.head for stored in self.files.values())

    def write(self, stored: Stored) -> StoredHead:
        if self.fails("write"):
            raise StoreError(StoreFault.NO_SPACE)
        head = evolve(stored.head, size=_size(stored))
        self.files[head.key, head.state_offset] = evolve(stored, head=head)
        return head

    def read(self, key: bytes, state_offset: int) -> Stored:
        self.num_reads += 1
        if self.fails("read"):
            raise StoreError(StoreFault.IO)
        if (key, state_offset) not in self.files:
            raise StoreError(StoreFault.NOT_FOUND)
        return self.files[key, state_offset]

    def remove(self, key: bytes, state_offset: int) -> None:
        self.files.pop((key, state_offset), None)

    def touch(self, key: bytes, state_offset: int, time_s: float) -> None:
        """Its order counts, and that is the core's."""
