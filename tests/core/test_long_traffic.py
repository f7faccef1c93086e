"""A hundred thousand random events: one terminal event each, and the rules after every one."""

import random

import pytest

from harness.core_fakes import NumberMatcher, answer, make_core, submit
from harness.memory import Memory
from kvtrio.core import invariants
from kvtrio.core.config import Group
from kvtrio.core.events import Abort, Finished, Rejected, Tick, TokenOut
from kvtrio.core.identity import AdapterUse, Segment
from kvtrio.core.types import FinishReason, Retain, StateClass
from kvtrio.schedulers.fair import Fair
from kvtrio.schedulers.fcfs import FCFS
from kvtrio.schedulers.priority import Priority
from kvtrio.schedulers.stall_free import StallFree

NUM_EVENTS = 25_000
"""For each of the four policies."""
STATE = Group(StateClass.POINT, None, 0, 64)
HYBRID = {
    "groups": (STATE, Group(StateClass.TOKEN, None, 8), STATE),
    "num_state_slots": 4,
    "num_host_state_slots": 5,
    "checkpoint_spacing": 4,
    "checkpoint_grid": 8,
}
WINDOWS = {
    "groups": (Group(StateClass.WINDOW, 6, 8), Group(StateClass.TOKEN, None, 8)),
    "max_context": 48,
    "num_host_window_blocks": 3,
    "checkpoint_spacing": 4,
    "checkpoint_grid": 8,
}


class Traffic:
    """Submits, leavers, steps and the passing of time, from one seeded source."""

    def __init__(self, policy, seed, **sizes):
        self.rng = random.Random(seed)
        sizes = {"num_places": 2, "max_context": 24, "num_host_blocks": 6, **sizes}
        self.core = make_core(policy, **sizes)
        self.memory = Memory.of(self.core.config)
        self.now, self.number, self.batch = 0.0, 0, None
        self.histories, self.open, self.terminal = {}, {}, {}

    def one(self):
        """One event, then the rules."""
        self.now += self.rng.expovariate(20.0)
        chance = self.rng.random()
        if chance < 0.2:
            self.submit()
        elif chance < 0.24 and self.open:
            self.take(self.core.handle(Abort(self.rng.choice(list(self.open))), self.now))
        elif self.batch is None:
            self.take(self.core.handle(Tick(), self.now))
            self.batch = self.core.schedule(self.now)
        else:
            self.update()
        invariants.check(self.core)

    def submit(self):
        rng, self.number = self.rng, self.number + 1
        stem = [1 + (i * i + rng.randrange(3)) % 3 for i in range(rng.randrange(4))]
        tail = tuple(rng.randrange(1, 3) for _ in range(rng.randrange(0, 22)))
        if self.histories and rng.random() < 0.4:
            known = rng.choice(list(self.histories.values()))
            stem = [token for token, _ in known[: rng.randrange(len(known) + 1)]]
            tail = tail[: rng.randrange(1, 8)]
        prompt = (*stem, *tail)
        uses = (AdapterUse(1, b"a" * 32, 0.5),) if rng.random() < 0.2 else ()
        event = submit(
            self.number,
            token_ids=prompt,
            max_new_tokens=rng.randrange(1, 8),
            matcher=NumberMatcher(frozenset({4})),
            eos_ids=frozenset({5}),
            segments=(Segment(0, uses),),
            retain=rng.choice([Retain.NORMAL, Retain.NORMAL, Retain.AUXILIARY, Retain.PIN]),
            retain_s=1.0,
            tenant=b"%d" % rng.randrange(3),
            priority=rng.randrange(3),
            deadline_s=self.now + rng.uniform(0, 2) if rng.random() < 0.2 else None,
            place=rng.choice([None, None, 0, 1]),
        )
        self.open[event.request_id] = event
        self.histories[event.request_id] = [(token, uses) for token in prompt]
        self.take(self.core.handle(event, self.now))

    def update(self):
        batch, self.batch = self.batch, None
        self.memory.run(batch, self.histories)
        token = self.rng.choice([1, 1, 2, 2, 3, 4, 5])
        self.take(self.core.update(batch, answer(batch, token), self.now))

    def take(self, outputs):
        for output in outputs:
            if isinstance(output, Finished | Rejected):
                self.open.pop(output.request_id)
                assert output.request_id not in self.terminal
                self.terminal[output.request_id] = output
                del self.histories[output.request_id]
            elif isinstance(output, TokenOut):
                uses = self.open[output.request_id].segments[0].adapters
                self.histories[output.request_id].append((output.sampled.token_id, uses))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        (FCFS, {}),
        (StallFree, {}),
        (Fair, {}),
        (Priority, {}),
        (StallFree, HYBRID),
        (Priority, {**HYBRID, "is_unified": False}),
        (FCFS, {**HYBRID, "groups": (STATE,)}),
        (StallFree, WINDOWS),
        (Priority, {**WINDOWS, "is_unified": False}),
    ],
)
def test_nothing_is_lost_or_told_twice(policy, sizes):
    """However it ends, each request has one terminal event, and reads only its own history."""
    traffic = Traffic(policy(), 5, **sizes)
    for _ in range(NUM_EVENTS):
        traffic.one()
    while traffic.core.has_work:
        traffic.now += 0.1
        if traffic.batch is not None:
            traffic.update()
        traffic.take(traffic.core.handle(Tick(), traffic.now))
        traffic.batch = traffic.core.schedule(traffic.now)
    assert traffic.terminal.keys() == set(range(1, traffic.number + 1))
    reasons = {o.reason for o in traffic.terminal.values() if isinstance(o, Finished)}
    assert {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT} <= reasons
