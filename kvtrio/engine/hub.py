"""Core, open handles and observers: the one place where the engine meets the core.

1. The core is touched under ``_lock`` only: by the loop's tasks, for a moment, and between two
   steps by whoever runs them, the model's own thread. So no step waits for the loop's turn.
2. Handles, observers and all else belong to the loop. What the core says is queued under the lock,
   whoever asked it, and handed out on the loop in that order. Only a token whose reader waits, and
   left an outlet to take it, is handed out where its step is booked.
3. ``_has_input`` is set whenever the core was told something since the loop last waited.
4. ``_is_idle`` is set exactly while no request lives, and after the end.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import trio
from attrs import define, field

from kvtrio.core.batch import Batch, StepResult
from kvtrio.core.config import CoreConfig
from kvtrio.core.events import (
    Abort,
    Bring,
    Cached,
    Drain,
    Fetched,
    Input,
    Lost,
    Output,
    Read,
    Rejected,
    Submit,
    Tick,
    Written,
)
from kvtrio.core.exchange import Answer
from kvtrio.core.machine import Core
from kvtrio.core.types import RequestId
from kvtrio.engine.handle import EngineStopped, Handle, Refused
from kvtrio.engine.live import Live
from kvtrio.engine.mover import Mover
from kvtrio.engine.news import News, Stepped, cost_of
from kvtrio.engine.records import Observer
from kvtrio.engine.tap import Tap
from kvtrio.engine.telling import NO_MOVES, Teller

T = TypeVar("T")

QUIET_S = 0.05
"""The loop hears of what nobody waits for at least this often."""


@define(eq=False)
class Hub:
    """See the module's rules. ``clock`` gives seconds, in any thread; ``check`` runs after every
    change."""

    _core: Core
    _observer: Observer
    _clock: Callable[[], float]
    _check: Callable[[Core], None]
    _tap: Tap | None = None
    _mover: Mover | None = None
    """None: there is no disk tier."""
    _lock: threading.Lock = field(init=False, factory=threading.Lock)
    _news: deque[News] = field(init=False, factory=deque)
    _is_awaited: bool = field(init=False, default=False)
    """Somebody waits for something among the news."""
    _delivered_s: float = field(init=False, default=0.0)
    _launched_s: float = field(init=False, default=0.0)
    """When the step under way was decided."""
    _live: dict[RequestId, Live] = field(init=False, factory=dict)
    _has_input: trio.Event = field(init=False, factory=trio.Event)
    _is_idle: trio.Event = field(init=False, factory=trio.Event)
    _has_news: trio.Event = field(init=False, factory=trio.Event)
    """Set, and another takes its place, at each delivery, where there is a disk tier."""
    _teller: Teller = field(init=False)
    _has_stopped: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        assert not self._core.has_work
        self._is_idle.set()
        self._teller = Teller(
            live=self._live,
            observer=self._observer,
            tap=self._tap,
            block_size=self._core.config.block_size,
            look=self.look,
        )

    # --- callers ---

    def submit(self, submit: Submit) -> Handle:
        """Admit a request; raises ``Refused``, or ``EngineStopped`` after the end."""
        if self._has_stopped:
            raise EngineStopped
        longest = self._longest_answer(submit)
        handle = Handle(submit.request_id, longest, self.abort, self._clock, self._lock)
        with self._lock:
            outputs = self._core.handle(submit, self._clock())
            self._check(self._core)
            if not outputs:
                self._live[submit.request_id] = Live(handle, submit)
        match outputs:
            case [Rejected() as rejected]:
                self._observer.rejected(rejected)
                raise Refused(rejected)
        assert not outputs, "a request that is admitted has nothing to tell yet"
        if self._tap is not None:
            self._tap.admitted(submit, self._clock())
        if self._is_idle.is_set():
            self._is_idle = trio.Event()
        self._has_input.set()
        return handle

    def _longest_answer(self, submit: Submit) -> int:
        room = self._core.config.max_context - len(submit.token_ids)
        return room if submit.max_new_tokens is None else min(room, submit.max_new_tokens)

    def abort(self, request_id: RequestId) -> None:
        """End a request; its reader, if there is one, gets what was ready and its account."""
        self._tell(Abort(request_id))

    def drain(self) -> None:
        self._tell(Drain())

    def abort_all(self) -> None:
        """Abort what waits and runs. Its readers learn it at once, not when a step has ended."""
        for request_id, live in list(self._live.items()):
            live.handle.stop()
            self.abort(request_id)

    async def ask(self, event_of: Callable[[int], Read | Bring]) -> Answer:
        """Have state moved in front of coming steps. Raises ``EngineStopped`` after the end."""
        if self._has_stopped:
            raise EngineStopped
        number = self._teller.questions.new()
        self._tell(event_of(number))
        return await self._teller.questions.answer_to(number)

    async def when_idle(self, place: int, act: Callable[[Core, float], T]) -> T:
        """Do something for a moment, as soon as nobody runs in a place."""
        while True:
            if self._has_stopped:
                raise EngineStopped
            with self._lock:
                if self._core.places.running[place] is None:
                    self._has_input.set()  # for what is ordered
                    result = act(self._core, self._clock())
                    self._check(self._core)
                    return result
            await self._teller.has_ended.wait()

    def look(self, at: Callable[[Core], T]) -> T:
        """At the core, for a moment; nothing may be changed."""
        with self._lock:
            return at(self._core)

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def config(self) -> CoreConfig:
        return self._core.config

    async def settle(self) -> None:
        """Return when what is to be on disk is there, and what is to go is not; with nobody asking.
        At once without a disk tier."""
        while self._mover and not (self._has_stopped or self.look(self._mover.is_settled)):
            await self._has_news.wait()

    def report(self, reports: Sequence[Written | Fetched | Lost]) -> None:
        """What became of the core's orders."""
        self._tell(*reports)

    def _tell(self, *events: Input) -> None:
        with self._lock:
            for event in events:
                self._take_in(event)
        self.deliver()
        self._has_input.set()

    @property
    def is_idle(self) -> bool:
        return self._is_idle.is_set()

    async def wait_idle(self) -> None:
        """Return when no request is waiting or running; at once after the engine's end."""
        await self._is_idle.wait()
        while self._live and not self._has_stopped:
            await self._is_idle.wait()  # somebody submitted before this task had its turn

    # --- the loop ---

    def schedule(self) -> Batch | None:
        """Decide the first step; those after it are decided by ``decide``."""
        with self._lock:
            batch = self._plan()
        self.deliver()
        return batch

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run."""
        return self._core.has_work

    async def wait_for_input(self) -> None:
        """Wait until the core is told something; what it was told since ``schedule`` counts."""
        await self._has_input.wait()
        self._has_input = trio.Event()

    def stop(self) -> None:
        """The loop has ended: wake all that wait, so that nobody waits for ever."""
        self._has_stopped = True
        for live in self._live.values():
            live.handle.stop()
        self._is_idle.set()
        self._teller.stop()
        self._has_news.set()
        if self._core.cost.num_observed:
            self._observer.cost(self.look(cost_of))

    # --- whoever runs the steps ---

    def book(self, batch: Batch, result: StepResult) -> None:
        """Account for a finished step. In any thread."""
        with self._lock:
            now, core = self._clock(), self._core
            outputs = core.update(batch, result, now)
            self._check(core)
            stepped = Stepped(
                batch=batch,
                duration_s=now - self._launched_s,
                num_waiting=len(core.waiting),
                num_running=len(core.running),
            )
            moves, answers = core.cache.take_moves(), core.exchange.take_answers()
            self._queue(News(now, outputs, moves, stepped, answers))
            self._take_orders()

    @property
    def is_awaited(self) -> bool:
        """Whether it is time to deliver. In any thread."""
        return self._is_awaited or self._clock() - self._delivered_s > QUIET_S

    def decide(self) -> Batch | None:
        """The step after a booked one. In any thread."""
        with self._lock:
            return self._plan()

    # --- under the lock ---

    def _plan(self) -> Batch | None:
        if self._core.waiting:
            self._take_in(Tick())  # who runs is late for nothing
        batch = self._core.schedule(self._clock())
        self._check(self._core)
        self._launched_s = now = self._clock()
        if answers := self._core.exchange.take_answers():
            self._queue(News(now, [], NO_MOVES, answers=answers))
        self._take_orders()
        return batch

    def _take_in(self, event: Input) -> None:
        outputs = self._core.handle(event, now := self._clock())
        self._check(self._core)
        if outputs:
            self._queue(News(now, outputs, self._core.cache.take_moves()))
        self._take_orders()

    def _take_orders(self) -> None:
        if self._mover is not None and self._mover.collect(self._core):
            self._is_awaited = True

    def _queue(self, news: News) -> None:
        news.taken = [self._is_taken(output, news.now) for output in news.outputs]
        self._news.append(news)
        if news.answers or not all(news.taken):
            self._is_awaited = True

    def _is_taken(self, output: Output, now: float) -> bool:
        if isinstance(output, Cached):
            return False
        return self._live[output.request_id].handle.offer(output, now)

    # --- out, on the loop ---

    def deliver(self) -> None:
        """Hand out what has happened."""
        self._is_awaited, self._delivered_s = False, self._clock()
        while self._news:
            self._teller.tell(self._news.popleft())
        if self._mover is not None:
            self._mover.start(self._observer)
            self._has_news.set()
            self._has_news = trio.Event()
        if not self._live:
            self._is_idle.set()
