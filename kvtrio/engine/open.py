"""Start and stop of the engine."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import trio
from attrs import define, field

from kvtrio.core import invariants
from kvtrio.core.admission import predicted_first_token_s, predicted_start_s
from kvtrio.core.events import Conversation, Submit
from kvtrio.core.machine import Core, CoreStatistics
from kvtrio.core.types import RequestId
from kvtrio.engine.executor import Executor, thread_safe_clock
from kvtrio.engine.group import HandleGroup
from kvtrio.engine.handle import EngineStopped, Handle, Refused
from kvtrio.engine.hub import Hub
from kvtrio.engine.loop import run_steps
from kvtrio.engine.mover import Disk, Mover
from kvtrio.engine.news import cost_of
from kvtrio.engine.records import CostRecord, Observer
from kvtrio.engine.saved import Restoring, SavedPlace, erase_place, save, save_place
from kvtrio.engine.tap import Tap


@define(eq=False)
class Engine:
    """What the HTTP side sees. Made by ``open_engine``; for tasks of the same trio run."""

    _hub: Hub
    _executor: Executor
    _disk: Disk | None = None
    _ids: "count[int]" = field(init=False, factory=lambda: count(1))

    def new_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def submit(self, submit: Submit) -> Handle:
        """Admit a request and wake the loop; takes effect at once, even while a step runs.

        Raises ``Refused`` (nothing has changed) or, after the engine's end, ``EngineStopped``.
        """
        return self._hub.submit(submit)

    def submit_all(self, submits: Sequence[Submit]) -> HandleGroup:
        """Admit all of ``submits`` or none; otherwise as ``submit``."""
        handles: list[Handle] = []
        try:
            for submit in submits:
                handles.append(self.submit(submit))
        except (Refused, EngineStopped):
            for handle in handles:
                handle.close()
            raise
        return HandleGroup(tuple(handles))

    def abort(self, request_id: RequestId) -> None:
        """End a request as soon as no step uses its state; its handle tells ``Finished``."""
        self._hub.abort(request_id)

    def drain(self) -> None:
        """Admit nothing more; what was admitted finishes."""
        self._hub.drain()

    def abort_all(self) -> None:
        """End all requests, now; their readers get what is ready, then ``EngineStopped``."""
        self._hub.abort_all()

    async def wait_idle(self) -> None:
        """Return when no request is waiting or running."""
        await self._hub.wait_idle()

    async def settle(self) -> None:
        """Return when nobody asks for anything and all state is on disk, or cannot be."""
        await self._hub.settle()

    async def load_adapter(self, data: Any) -> int:
        """Give the model an adapter, between two steps; returns its handle."""
        return await self._executor.load_adapter(data)

    async def unload_adapter(self, adapter_id: int) -> None:
        """Take it away. No request may use it, waiting ones included."""
        await self._executor.unload_adapter(adapter_id)

    async def save_place(self, place: int, namespace: bytes = b"") -> SavedPlace:
        """What a place holds of a namespace, as soon as nobody runs there. ``EngineStopped`` after
        the end."""
        return await save_place(self._hub, self._disk, place, namespace)

    def save(self, conversation: Conversation) -> SavedPlace:
        """What there is of a conversation, wherever it ran: in memory or on disk."""
        return save(self._hub, self._disk, conversation)

    async def wait_for_place(self, place: int) -> None:
        """Return when nobody runs in a place. ``EngineStopped`` after the end."""
        await self._hub.when_idle(place, lambda core, now: None)

    def restore(self, place: int | None, conversation: Conversation) -> Restoring:
        """Begin to bring a session into memory, for ``place`` or for none; see ``Restoring``."""
        trail = self._hub.look(lambda core: core.trail(conversation))
        return Restoring(place, trail, self._hub)

    async def erase_place(self, place: int, namespace: bytes = b"") -> int:
        """Forget what a place holds of a namespace, as soon as nobody runs there, and its state
        unless others share it. Returns how many tokens it held."""
        return await erase_place(self._hub, place, namespace)

    @property
    def is_idle(self) -> bool:
        """No request is waiting or running."""
        return self._hub.is_idle

    def cost(self) -> CostRecord:
        """What steps cost, as learned so far."""
        return self._hub.look(cost_of)

    def predicted_start_s(self) -> float:
        """Seconds until a request that came now would get a place."""
        return self._hub.look(lambda core: predicted_start_s(core, self._hub.now))

    def predicted_first_token_s(self, submit: Submit) -> float:
        """Seconds until a request would get its first token if it came now."""
        now = self._hub.now
        return self._hub.look(lambda core: predicted_first_token_s(core, submit, now))

    def statistics(self) -> CoreStatistics:
        return self._hub.look(Core.statistics)


@asynccontextmanager
async def open_engine(
    core: Core,
    executor: Executor,
    observer: Observer,
    *,
    paranoid: bool = False,
    tap: Tap | None = None,
    disk: Disk | None = None,
) -> AsyncIterator[Engine]:
    """Run ``core`` on ``executor`` while the body runs; leaving it waits for the step under way.

    What the executor raises cancels the body and leaves as an exception group. Handles that outlive
    the engine raise ``EngineStopped``. ``paranoid`` checks the core's invariants after each change.
    """
    check = invariants.check if paranoid else _trust
    assert (disk is None) == (core.fetches is None)
    mover = Mover(disk) if disk is not None else None
    hub = Hub(core, observer, thread_safe_clock(), check, tap, mover)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_steps, hub, executor, name="engine loop")
            if mover is not None:
                nursery.start_soon(mover.run, hub.report, name="disk mover")
            yield Engine(hub, executor, disk)
            nursery.cancel_scope.cancel()
    finally:
        hub.stop()


def _trust(core: Core) -> None:
    pass
