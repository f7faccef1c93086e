"""Arrivals through a core against a made-up machine, step by step: no trio, no backend, no threads.

The core's only clock is the one kept here, so hours of traffic take seconds.
"""

import random
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import pairwise

from attrs import define, field, frozen

from harness.core_fakes import NumberMatcher, answer
from kvtrio.core.config import CoreConfig, Group
from kvtrio.core.cost import Load, load_of
from kvtrio.core.events import Abort, Finished, Output, Rejected, Submit, Tick, TokenOut
from kvtrio.core.identity import AdapterUse, KeyMaker, Segment
from kvtrio.core.machine import Core
from kvtrio.core.policy import Policy
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import RequestId, StateClass

Machine = Callable[[Load], float]
GROUPS = (Group(StateClass.TOKEN, None, 1),)


def affine(coefficients: tuple[float, ...], noise: float = 0.0, seed: int = 1) -> Machine:
    """A machine whose steps cost a sum over the load's features, give or take ``noise``."""
    rng = random.Random(seed)

    def seconds(load: Load) -> float:
        exact = sum(c * f for c, f in zip(coefficients, load.features(), strict=True))
        return exact * rng.uniform(1 - noise, 1 + noise)

    return seconds


# Seconds per step, prefill token, prefill token x position, decode row, row x position, adapter,
# prefill chunk.
H100_LIKE = (0.006, 0.00004, 2e-10, 0.00004, 1e-9, 0.0005, 0.0005)
TWO_CORES_LIKE = (0.004, 0.0012, 5e-8, 0.003, 2e-7, 0.002, 0.005)


@frozen(kw_only=True)
class Arrival:
    """One request; its prompt is its own, so that nothing is shared unless ``seed`` is."""

    at_s: float
    num_prompt: int
    num_output: int
    tenant: bytes = b""
    priority: int = 0
    deadline_s: float | None = None
    leaves_s: float | None = None
    seed: int | None = None
    adapter: int = 0
    """0: none."""
    place: int | None = None


@frozen
class Step:
    start_s: float
    seconds: float
    predicted_s: float
    limit_s: float
    load: Load
    num_blocks_read: int
    """Blocks that the prefill chunks touch."""


@define
class Run:
    """What happened."""

    steps: list[Step] = field(factory=list)
    tokens_s: dict[int, list[float]] = field(factory=dict)
    finished: dict[int, Finished] = field(factory=dict)
    rejected: dict[int, Rejected] = field(factory=dict)
    service: list[tuple[float, dict[bytes, float]]] = field(factory=list)
    """After each step, the counters of the tenants that are waiting."""
    num_idle: int = 0
    """Schedules that planned nothing although requests were there."""
    arrivals: list[Arrival] = field(factory=list)

    def gaps(self) -> list[float]:
        """Between tokens of one request."""
        return [b - a for times in self.tokens_s.values() for a, b in pairwise(times)]

    def first_token_s(self, number: int) -> float:
        return self.tokens_s[number][0] - self.arrivals[number].at_s


def make_core(policy: Policy, **changes: object) -> Core:
    sizes: dict[str, object] = {
        "groups": GROUPS,
        "block_size": 16,
        "num_places": 64,
        "max_context": 32_768,
        "max_waiting": 2000,
        "max_batch_tokens": 8192,
    }
    config = CoreConfig(**{**sizes, **changes})  # type: ignore[arg-type]
    return Core(config, policy, KeyMaker(b"secret of the tests", b"root"))


@define
class Simulation:
    """``run`` it once."""

    core: Core
    machine: Machine
    check: Callable[[Core], None] = lambda core: None
    now: float = 0.0
    run_: Run = field(init=False, factory=Run)
    _events: list[tuple[float, int, object]] = field(init=False, factory=list)

    def run(self, arrivals: Iterable[Arrival], until_s: float = 1e9) -> Run:
        """Play the arrivals to the end of the last answer, or to ``until_s``."""
        self.run_.arrivals = sorted(arrivals, key=lambda arrival: arrival.at_s)
        for number, arrival in enumerate(self.run_.arrivals):
            heappush(self._events, (arrival.at_s, 2 * number, submit_of(number, arrival)))
            if arrival.leaves_s is not None:
                event = (arrival.leaves_s, 2 * number + 1, Abort(RequestId(number)))
                heappush(self._events, event)
        while (self._events or self.core.has_work) and self.now < until_s:
            self._deliver()
            self._step()
        return self.run_

    def _deliver(self) -> None:
        if not self.core.has_work and self._events:
            self.now = max(self.now, self._events[0][0])
        while self._events and self._events[0][0] <= self.now:
            at_s, _, event = heappop(self._events)
            self._take(self.core.handle(event, at_s))  # type: ignore[arg-type]
            self.check(self.core)

    def _step(self) -> None:
        self._take(self.core.handle(Tick(), self.now))
        batch = self.core.schedule(self.now)
        self.check(self.core)
        if batch is None:
            self.run_.num_idle += self.core.has_work
            if self._events:
                self.now = max(self.now, self._events[0][0])
            return
        load, size = load_of(batch), self.core.config.block_size
        seconds = self.machine(load)
        reads = [chunk for chunk in batch.chunks if len(chunk.token_ids) > 1]
        blocks = sum(-(-chunk.end // size) - chunk.start // size for chunk in reads)
        start_s, self.now = self.now, self.now + seconds
        step = Step(start_s, seconds, batch.predicted_s, batch.limit_s, load, blocks)
        self.run_.steps.append(step)
        self._take(self.core.update(batch, answer(batch), self.now))
        self.check(self.core)
        waiting = {request.submit.tenant for request in self.core.waiting}
        counters = self.core.service.counters
        self.run_.service.append((self.now, {tenant: counters[tenant] for tenant in waiting}))

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, TokenOut):
                self.run_.tokens_s.setdefault(output.request_id, []).append(self.now)
            elif isinstance(output, Finished | Rejected):
                kept = self.run_.finished if isinstance(output, Finished) else self.run_.rejected
                assert output.request_id not in self.run_.finished
                assert output.request_id not in self.run_.rejected
                kept[output.request_id] = output  # type: ignore[assignment]


def submit_of(number: int, arrival: Arrival) -> Submit:
    seed = number if arrival.seed is None else arrival.seed
    return Submit(
        request_id=RequestId(number),
        token_ids=tuple((seed * 40_000 + i) & 0x3FFFFFFF for i in range(arrival.num_prompt)),
        max_new_tokens=arrival.num_output,
        sampling=SamplingParams(temperature=0.0),
        matcher=NumberMatcher(),
        tenant=arrival.tenant,
        priority=arrival.priority,
        deadline_s=arrival.deadline_s,
        segments=(Segment(0, (_adapter(arrival.adapter),) if arrival.adapter else ()),),
        place=arrival.place,
    )


def _adapter(number: int) -> AdapterUse:
    return AdapterUse(number, number.to_bytes(32, "little"), 1.0)
