"""What the core orders of the disk is done beside the steps, and reported.

1. Writing and removing keep their order; reading is another's work, so that nobody who waits for
   state waits for somebody else's writes.
2. Nothing that fails here is more than a report: a write that did not happen, state that is lost.
3. What is being written when the engine ends is written to its end, and its report dropped.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import trio
from attrs import define, field, frozen

from kvtrio.core.events import Fetched, Written
from kvtrio.core.keeping import LEAST_BYTES, Fetch, Order, Remove, Touch, Write
from kvtrio.core.machine import Core
from kvtrio.core.stored import Stored, StoredHead, StoreError, StoreFault
from kvtrio.engine.offload import Offload
from kvtrio.engine.records import Observer

AT_ONCE_BYTES = 16 << 20
"""Written before it is reported."""


class Files(Protocol):
    """Where state lies outside memory; ``kvtrio.store`` has one. All raise ``StoreError`` only.

    ``read`` is called while one of the others may be under way.
    """

    def write(self, stored: Stored) -> StoredHead:
        """Returns the head with the file's size."""
        ...

    def read(self, key: bytes, state_offset: int) -> Stored: ...

    def remove(self, key: bytes, state_offset: int) -> None: ...

    def touch(self, key: bytes, state_offset: int, time_s: float) -> None:
        """``time_s``: seconds since 1970."""
        ...


@frozen(eq=False)
class Disk:
    """Files, and what is needed to work with them beside the event loop."""

    files: Files
    beside: Offload
    """Two jobs at once."""
    clock: Callable[[], float]
    """Seconds since 1970."""


Report = Callable[[Sequence[Written | Fetched]], None]
"""Tells the core."""


@define(eq=False)
class Mover:
    """``collect`` orders under the core's lock, ``start`` them on the loop; ``run`` does them."""

    disk: Disk
    _orders: deque[Order] = field(init=False, factory=deque)
    _lost: deque[StoreFault] = field(init=False, factory=deque)
    _writes: deque[Write | Remove | Touch] = field(init=False, factory=deque)
    _reads: deque[Fetch] = field(init=False, factory=deque)
    _has_writes: trio.Event = field(init=False, factory=trio.Event)
    _has_reads: trio.Event = field(init=False, factory=trio.Event)
    _is_writing: bool = field(init=False, default=False)

    def is_settled(self, core: Core) -> bool:
        """Nothing is to be written or removed, now or soon. Under the core's lock."""
        return core.is_settled and not (self._orders or self._writes or self._is_writing)

    def collect(self, core: Core) -> bool:
        """What the core orders, and what it lost; whether that is anything. In any thread."""
        assert core.fetches is not None
        orders, lost = core.fetches.keeper.take_orders(), core.fetches.take_lost()
        self._orders += orders
        self._lost += lost
        return bool(orders or lost)

    def start(self, observer: Observer) -> None:
        while self._lost:
            observer.lost(self._lost.popleft())
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, Fetch):
                self._reads.append(order)
                self._has_reads.set()
            else:
                self._writes.append(order)
                self._has_writes.set()

    async def run(self, report: Report) -> None:
        """Ends by cancellation only."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_all, report, name="disk writer")
            nursery.start_soon(self._read_all, report, name="disk reader")

    async def _write_all(self, report: Report) -> None:
        while True:
            await self._has_writes.wait()
            orders, num_bytes = list[Write | Remove | Touch](), 0
            while self._writes and num_bytes < AT_ONCE_BYTES:
                orders.append(self._writes.popleft())
                num_bytes += _num_bytes(orders[-1])
            if not self._writes:
                self._has_writes = trio.Event()
            self._is_writing = True
            reports = await self.disk.beside.run(_write, self.disk, orders)
            self._is_writing = False
            report(reports)

    async def _read_all(self, report: Report) -> None:
        while True:
            await self._has_reads.wait()
            fetch = self._reads.popleft()
            if not self._reads:
                self._has_reads = trio.Event()
            report([await self.disk.beside.run(_read, self.disk, fetch)])


def _num_bytes(order: Write | Remove | Touch) -> int:
    num_bytes = sum(map(len, order.stored.parts)) if isinstance(order, Write) else 0
    return max(num_bytes, LEAST_BYTES)


def _write(disk: Disk, orders: Sequence[Write | Remove | Touch]) -> list[Written]:
    """In order; a report for each write."""
    reports = list[Written]()
    for order in orders:
        if isinstance(order, Write):
            head = order.stored.head
            reports.append(Written(head.key, head.state_offset, _write_one(disk, order.stored)))
            continue
        names = order.names if isinstance(order, Touch) else ((order.key, order.state_offset),)
        for name in names:
            _change(disk, order, *name)
    return reports


def _write_one(disk: Disk, stored: Stored) -> int | None:
    try:
        return disk.files.write(stored).size
    except StoreError:
        return None


def _change(disk: Disk, order: Remove | Touch, key: bytes, state_offset: int) -> None:
    """Where that fails, the files know what is there, and keep to the limit."""
    try:
        if isinstance(order, Remove):
            disk.files.remove(key, state_offset)
        else:
            disk.files.touch(key, state_offset, disk.clock())
    except StoreError:
        pass


def _read(disk: Disk, fetch: Fetch) -> Fetched:
    found = read_all(disk, fetch.heads)
    stored = tuple(each if isinstance(each, Stored) else None for each in found)
    faults = tuple(each for each in found if isinstance(each, StoreFault))
    return Fetched(fetch.number, stored, faults)


def read_all(disk: Disk, heads: Sequence[StoredHead]) -> list[Stored | StoreFault]:
    """What is there, or why it is not."""
    found = list[Stored | StoreFault]()
    for head in heads:
        try:
            found.append(disk.files.read(head.key, head.state_offset))
        except StoreError as error:
            found.append(error.fault)
    return found
