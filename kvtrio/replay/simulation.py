"""A scenario played in virtual time: the server's own core and policies, and a machine made of
seven numbers. The same input gives the same log, byte for byte.

Steps that only decode are taken many at a time (``core.stretch``), unless ``is_merged`` says
otherwise; the log is the same.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from attrs import define, field, frozen

from kvtrio.core.batch import Batch, Chunk
from kvtrio.core.config import CoreConfig
from kvtrio.core.events import (
    Abort,
    Cached,
    Finished,
    Output,
    Rejected,
    Submit,
    Tick,
    TokenOut,
)
from kvtrio.core.machine import Core
from kvtrio.core.policy import Policy
from kvtrio.core.stretch import Listener, Machine, Stretch, StretchStep, can_stretch
from kvtrio.core.types import RequestId
from kvtrio.engine.live import account
from kvtrio.engine.records import (
    CostRecord,
    Gaps,
    Observer,
    RequestRecord,
    StepRecord,
    breach_of,
)
from kvtrio.engine.telling import COST_EVERY, NO_MOVES, USAGE_EVERY
from kvtrio.replay.arrivals import Arrivals
from kvtrio.replay.leaving import as_left
from kvtrio.replay.machines import KnownCost, StepSeconds
from kvtrio.replay.scenario import Action, Request, What
from kvtrio.replay.scenario_file import Scenario
from kvtrio.replay.simulated_core import PLAIN_KEYS, SimulatedCore
from kvtrio.replay.traffic import Traffic


@frozen(kw_only=True)
class SimulatedServer:
    """What stands in for a server."""

    config: CoreConfig
    policy: Policy
    machine: StepSeconds
    is_closed: bool = False
    """Turns wait for the end of the turn before; see ``arrivals``."""
    is_merged: bool = True
    check: Callable[[Core], None] = lambda core: None
    """After every event and step; see ``core.invariants``."""

    def core(self, scenario: Scenario) -> Core:
        """As after a start."""
        return SimulatedCore(
            self.config,
            self.policy,
            PLAIN_KEYS,
            KnownCost(self.machine),
            conversations=[request.session for request in scenario.requests],
            stops={each.id: each.stop for each in scenario.requests if each.stop is not None},
        )


@define(eq=False)
class _Live:
    """An admitted request, until its end."""

    request: Request
    submit: Submit
    gaps: Gaps = field(factory=Gaps)


@define(eq=False)
class Simulation:
    """``run`` it once."""

    server: SimulatedServer
    scenario: Scenario
    observer: Observer
    wants_step: Callable[[int, float], bool] = lambda step, duration_s: True
    """Whether the observer has any use for a step, by number and duration, that kept its limit."""
    now: float = field(init=False, default=0.0)
    num_steps: int = field(init=False, default=0)
    num_left_out: int = field(init=False, default=0)
    """Actions that have no meaning here: saving, restoring and erasing."""
    _core: Core = field(init=False)
    _traffic: Traffic = field(init=False)
    _arrivals: Arrivals = field(init=False)
    _live: dict[RequestId, _Live] = field(init=False, factory=dict)
    _leaving: list[tuple[float, RequestId]] = field(init=False, factory=list)
    """(time, request) of clients that leave before the first token, who knows where."""
    _unready: set[RequestId] = field(init=False, factory=set)
    """Of these, the ones that leave before anything is computed."""

    def __attrs_post_init__(self) -> None:
        self._core = self.server.core(self.scenario)
        self._traffic = Traffic(self.scenario)
        self._arrivals = Arrivals(self.scenario, self.server.is_closed)

    def run(self) -> Iterator[float]:
        """Play to the end of the last answer; yields the time now and then, to be shown."""
        while True:
            self._deliver()
            if self._core.has_work:
                self._go_on()
            elif (next_s := self._next_s()) < inf:
                self.now = max(self.now, next_s)
            else:
                break
            yield self.now
        if self.num_steps:
            self.observer.cost(CostRecord.of(self._core.cost))

    # --- what comes ---

    def _next_s(self) -> float:
        leaving_s = self._leaving[0][0] if self._leaving else inf
        return min(self._arrivals.next_s, leaving_s)

    def _deliver(self) -> None:
        for at_s, event in self._arrivals.take(self.now):
            if isinstance(event, Action):
                self._act(event)
            else:
                self._admit(event, at_s)
        while self._leaving and self._leaving[0][0] <= self.now:
            at_s, request_id = heappop(self._leaving)
            if request_id in self._live:
                self._abort(request_id, max(at_s, self.now))

    def _admit(self, request: Request, at_s: float) -> None:
        submit = self._traffic.submit(request)
        self._live[submit.request_id] = _Live(request, submit)
        if request.left_s is not None and not (request.output_tokens or request.ready_tokens):
            heappush(self._leaving, (at_s + request.left_s, submit.request_id))
            if request.ready_tokens == 0:
                self._unready.add(submit.request_id)
        self._tell(self._core.handle(submit, at_s), at_s)
        self.server.check(self._core)

    def _abort(self, request_id: RequestId, now: float) -> None:
        self._tell(self._core.handle(Abort(request_id), now), now)
        self.server.check(self._core)

    def _act(self, action: Action) -> None:
        """Adapters of each request are in the scenario, so scales have nothing to set."""
        if action.what is What.RESTART:
            self._core = self.server.core(self.scenario)
            gc.collect()  # blocks of the old one know each other
        elif action.what is not What.SCALES:
            self.num_left_out += 1

    # --- steps ---

    def _go_on(self) -> None:
        core = self._core
        if self.server.is_merged and can_stretch(core, self.now):
            machine = Machine(seconds=self.server.machine.seconds, tokens=self._traffic.tokens)
            listener = Listener(step=self._note_stretch, tokens=self._note_tokens)
            self.now = Stretch(core, machine, listener, self.now).run(self._next_s)
            self.server.check(core)
            return
        if core.waiting:
            self._tell(core.handle(Tick(), self.now), self.now)
        if self._unready and len(core.running) < core.config.num_places:
            for request_id in sorted(self._unready):
                self._abort(request_id, self.now)
        batch = core.schedule(self.now)
        self.server.check(core)
        if batch is not None:
            self._step(batch)
        elif (next_s := self._next_s()) < inf:
            self.now = max(self.now, next_s)
        else:
            assert not core.has_work, "the policy runs nobody, for ever"

    def _step(self, batch: Batch) -> None:
        core, begun_s = self._core, self.now
        num_rows = sum(map(self._is_decode, batch.chunks))
        self.now = begun_s + self.server.machine.seconds(core.load)
        outputs = core.update(batch, self._traffic.answer(batch, core), self.now)
        self.server.check(core)
        self._tell(outputs, self.now)
        moves = core.cache.take_moves()
        if moves != NO_MOVES:
            self.observer.moved(moves)
        num_prefill = batch.num_tokens - num_rows
        duration_s, size = self.now - begun_s, core.config.block_size
        self._note_step(
            StepRecord(
                step=batch.step,
                num_chunks=len(batch.chunks),
                num_prefill_tokens=num_prefill,
                num_decode_rows=num_rows,
                num_waiting=len(core.waiting),
                num_running=len(core.running),
                duration_s=duration_s,
                predicted_s=batch.predicted_s,
                limit_s=batch.limit_s,
                breach=breach_of(batch, num_prefill, size, duration_s),
            )
        )

    def _is_decode(self, chunk: Chunk) -> bool:
        return chunk.start >= len(self._live[chunk.request_id].submit.token_ids)

    # --- what is told ---

    def _note_tokens(self, request_id: RequestId, times: Sequence[float]) -> None:
        gaps = self._live[request_id].gaps
        for now in times:
            gaps.add(now)

    def _note_stretch(self, step: StretchStep) -> None:
        """As ``_tell`` and ``_step`` would."""
        self.now = step.now
        if step.finished:
            self._end(step.finished)
        if step.moves is not None:
            self.observer.moved(step.moves)
        limit_s, num_rows = self._core.config.max_gap_s, step.load.num_decode_rows
        if not self.wants_step(step.step, step.duration_s) and step.duration_s <= limit_s:
            self._count_step(step.step)
            return
        batch = Batch(step=step.step, chunks=(), predicted_s=step.predicted_s, limit_s=limit_s)
        self._note_step(
            StepRecord(
                step=step.step,
                num_chunks=num_rows,
                num_prefill_tokens=0,
                num_decode_rows=num_rows,
                num_waiting=0,
                num_running=len(self._core.running),
                duration_s=step.duration_s,
                predicted_s=step.predicted_s,
                limit_s=limit_s,
                breach=breach_of(batch, 0, 1, step.duration_s),
            )
        )

    def _note_step(self, record: StepRecord) -> None:
        self.observer.step(record)
        self._count_step(record.step)

    def _count_step(self, step: int) -> None:
        self.num_steps += 1
        if (step + 1) % COST_EVERY == 0:
            self.observer.cost(CostRecord.of(self._core.cost))
        if (step + 1) % USAGE_EVERY == 0:
            self.observer.usage(self._core.statistics())

    def _tell(self, outputs: Sequence[Output], now: float) -> None:
        finished: list[Finished] = []
        for output in outputs:
            match output:
                case TokenOut(request_id):
                    self._live[request_id].gaps.add(now)
                case Finished():
                    finished.append(output)
                case Cached():
                    self.observer.cached(output)
                case Rejected():
                    self.observer.rejected(output)
                    self._forget(output.request_id, now)
        self._end(finished)

    def _end(self, finished: Sequence[Finished]) -> None:
        records: list[RequestRecord] = []
        for each in finished:
            live = self._live[each.request_id]
            told = as_left(each, live.request)
            records.append(account(told, live.submit, live.gaps, told.longest_gap))
            self._forget(each.request_id, self.now)
        for record in records:
            self.observer.request(record)

    def _forget(self, request_id: RequestId, now: float) -> None:
        del self._live[request_id]
        self._unready.discard(request_id)
        self._traffic.end(request_id)
        self._arrivals.end(request_id, now)
