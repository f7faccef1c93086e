"""What newcomers are told about their start and their first token, against what comes."""

import pytest

from harness.simulation import TWO_CORES_LIKE, Arrival, Simulation, affine, make_core, submit_of
from kvtrio.core.admission import predicted_first_token_s
from kvtrio.core.events import Rejected
from kvtrio.core.types import RejectReason
from kvtrio.schedulers.fair import Fair
from kvtrio.schedulers.fcfs import FCFS
from kvtrio.schedulers.priority import Priority
from kvtrio.schedulers.stall_free import StallFree

BOUNDED = [StallFree, Fair, Priority]
NUMBER = 9000
STREAMS = [Arrival(at_s=0.0, num_prompt=40, num_output=4000) for _ in range(8)]
PRACTICE = [
    Arrival(at_s=0.1, num_prompt=6000, num_output=5),
    *(Arrival(at_s=0.1 + 2 * i, num_prompt=300, num_output=10) for i in range(5)),
]
"""What teaches the model of the machine."""
CHATS = [
    Arrival(at_s=0.3 * i, num_prompt=100, num_output=60, tenant=b"%d" % (i % 3)) for i in range(100)
]


def simulation(policy, arrivals, until_s, **sizes):
    core = make_core(policy(), max_context=8192, **sizes)
    simulation = Simulation(core, affine(TWO_CORES_LIKE))
    simulation.run(arrivals, until_s)
    return simulation


def told_and_true(simulation, arrival):
    """Predicted seconds to the first token of one that comes now, and the real ones."""
    core, now = simulation.core, simulation.now
    submit = submit_of(NUMBER, arrival)
    told_s = predicted_first_token_s(core, submit, now)
    before = core.statistics()
    assert core.statistics() == before
    assert core.handle(submit, now) == []
    run = simulation.run([], now + 100.0)
    return told_s, run.tokens_s[NUMBER][0] - now


def refused(simulation, arrival):
    """Why it is refused, or None."""
    outputs = simulation.core.handle(submit_of(NUMBER, arrival), simulation.now)
    return outputs[0].reason if outputs and isinstance(outputs[0], Rejected) else None


@pytest.mark.slow
@pytest.mark.parametrize("policy", BOUNDED)
def test_streams_leave_a_prompt_a_part_of_each_step(policy):
    """Beside eight streams a long prompt takes longer than on its own, and both are foretold."""
    paste = Arrival(at_s=0.0, num_prompt=6000, num_output=5)
    alone = told_and_true(simulation(policy, PRACTICE, 30.0, num_places=16), paste)
    beside = told_and_true(simulation(policy, STREAMS + PRACTICE, 30.0, num_places=16), paste)
    for told_s, true_s in (alone, beside):
        assert 0.8 * true_s < told_s < 1.5 * true_s
    assert beside[1] > 1.5 * alone[1]


@pytest.mark.slow
@pytest.mark.parametrize("policy", BOUNDED)
def test_a_prompt_that_is_being_read_comes_first(policy):
    """Who comes behind another's long prompt is told so."""
    first = Arrival(at_s=29.5, num_prompt=3000, num_output=5)
    now = simulation(policy, [*STREAMS, *PRACTICE, first], 30.0, num_places=16)
    told_s, true_s = told_and_true(now, Arrival(at_s=0.0, num_prompt=4000, num_output=5))
    assert 0.8 * true_s < told_s < 1.5 * true_s


@pytest.mark.slow
@pytest.mark.parametrize("policy", [FCFS, *BOUNDED])
def test_what_the_cache_has_is_not_read(policy):
    """A long prompt that is cached as a whole takes a step."""
    before = Arrival(at_s=8.0, num_prompt=6000, num_output=5, seed=NUMBER)
    now = simulation(policy, [*PRACTICE, before], 60.0, num_places=16)
    told_s, true_s = told_and_true(now, Arrival(at_s=0.0, num_prompt=6000, num_output=5))
    assert true_s < 0.05
    assert told_s < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        (FCFS, {}),
        (StallFree, {}),
        (Fair, {"tenant": b"0"}),
        (Fair, {"tenant": b"new"}),
        (Priority, {}),
        (Priority, {"priority": 1}),
    ],
)
def test_only_those_whom_the_policy_prefers_are_ahead(policy, changes):
    """Behind a queue a newcomer is told when its own turn comes: late under most policies, at once
    where it is of a higher class or of a tenant that got nothing yet."""
    now = simulation(policy, CHATS, 25.0, num_places=4)
    assert len(now.core.waiting) > 8
    told_s, true_s = told_and_true(
        now, Arrival(at_s=0.0, num_prompt=100, num_output=5, **{"tenant": b"0", **changes})
    )
    assert told_s == pytest.approx(true_s, rel=0.3, abs=0.7)


@pytest.mark.parametrize(
    ("policy", "changes", "is_refused"),
    [
        (FCFS, {}, True),
        (StallFree, {"tenant": b"new"}, True),
        (Fair, {"tenant": b"flood"}, True),
        (Fair, {"tenant": b"new"}, False),
        (Priority, {}, True),
        (Priority, {"priority": 1}, False),
    ],
)
def test_a_deadline_counts_only_those_ahead(policy, changes, is_refused):
    """A flood does not make another tenant or a higher class miss a deadline."""
    flood = [
        Arrival(at_s=0.05 * i, num_prompt=100, num_output=60, tenant=b"flood") for i in range(60)
    ]
    now = simulation(policy, flood, 6.0, num_places=4)
    arrival = Arrival(at_s=0.0, num_prompt=10, num_output=5, deadline_s=now.now + 2.0, **changes)
    assert (refused(now, arrival) is RejectReason.DEADLINE) == is_refused
    if not is_refused:
        run = now.run([], now.now + 3.0)
        assert NUMBER in run.tokens_s


@pytest.mark.parametrize("policy", [FCFS, *BOUNDED])
def test_a_free_place_does_not_help_who_waits_for_another(policy):
    """With its own place taken for long, a deadline is refused early though another is free."""
    long = Arrival(at_s=0.0, num_prompt=40, num_output=4000, place=0)
    now = simulation(policy, [long], 20.0, num_places=2)
    soon = {"num_prompt": 10, "num_output": 5, "deadline_s": now.now + 0.5}
    assert refused(now, Arrival(at_s=0.0, place=0, **soon)) is RejectReason.DEADLINE
    assert refused(now, Arrival(at_s=0.0, place=1, **soon)) is None


def test_a_higher_class_may_wait_for_a_taken_place():
    """It takes the place from a lower class at once, so its deadline is met."""
    long = Arrival(at_s=0.0, num_prompt=40, num_output=4000, place=0)
    now = simulation(Priority, [long], 20.0, num_places=2)
    soon = Arrival(
        at_s=0.0, num_prompt=10, num_output=5, deadline_s=now.now + 0.5, place=0, priority=1
    )
    assert refused(now, soon) is None
    run = now.run([], now.now + 0.5)
    assert run.finished[NUMBER].place == 0
