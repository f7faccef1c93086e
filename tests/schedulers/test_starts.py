"""Who is left waiting for the bound's sake, and for how long."""

import pytest

from harness.simulation import (
    H100_LIKE,
    TWO_CORES_LIKE,
    Arrival,
    Simulation,
    affine,
    make_core,
    submit_of,
)
from kvtrio.core import invariants
from kvtrio.core.starts import AGEING_S
from kvtrio.schedulers.fair import Fair
from kvtrio.schedulers.priority import Priority
from kvtrio.schedulers.stall_free import StallFree

BOUNDED = [StallFree, Fair, Priority]
COSTLY_ADAPTERS = (*H100_LIKE[:5], 0.0035, H100_LIKE[6])
"""A machine where 40 adapters take 147 ms."""
LEARNING_S = 1.0


def wearing(count, every_s=0.0, num_output=200):
    """Requests with an adapter each."""
    return [
        Arrival(at_s=every_s * i, num_prompt=100, num_output=num_output, adapter=i + 1)
        for i in range(count)
    ]


def streaming(run):
    """Steps in which somebody's answer went on, once the machine is known."""
    return [step for step in run.steps if step.load.num_decode_rows and step.start_s > LEARNING_S]


@pytest.mark.slow
@pytest.mark.parametrize("every_s", [0.0, 0.05])
@pytest.mark.parametrize("policy", BOUNDED)
def test_adapters_do_not_break_the_bound_for_those_who_stream(policy, every_s):
    """Forty adapters come together or one by one; no step exceeds the bound, most of them decode
    side by side, and all are served."""
    core = make_core(policy())
    run = Simulation(core, affine(COSTLY_ADAPTERS)).run(wearing(40, every_s))
    assert max(step.seconds for step in streaming(run)) <= 0.1
    assert max(step.load.num_adapters for step in run.steps) >= 20
    assert len(run.finished) == 40


@pytest.mark.slow
@pytest.mark.parametrize("policy", BOUNDED)
def test_those_without_adapters_pass(policy):
    """Who costs the others little does not wait behind who costs them much, for a while."""
    core = make_core(policy())
    known = [Arrival(at_s=0.5 * i, num_prompt=50, num_output=20) for i in range(12)]
    plain = [Arrival(at_s=20.0 + 0.1 * i, num_prompt=50, num_output=20) for i in range(20)]
    arrivals = [*known, *wearing(20, every_s=0.1, num_output=600), *plain]
    dear = (*H100_LIKE[:5], 0.010, H100_LIKE[6])
    run = Simulation(core, affine(dear)).run(arrivals, 30.0)
    assert max(step.seconds for step in streaming(run)) <= 0.1
    waits = [run.first_token_s(n) for n, a in enumerate(run.arrivals) if a in plain]
    assert max(waits) < 5.0
    assert core.waiting


@pytest.mark.slow
@pytest.mark.parametrize("policy", BOUNDED)
def test_nobody_waits_for_ever_for_the_bound(policy):
    """Plain requests keep coming and fit, one with an adapter does not: it starts all the same, in
    bounded time, and the others go on behind it."""
    slow = (0.01, 0.001, 0.0, 0.01, 0.0, 0.05, 0.002)
    streams = [Arrival(at_s=0.0, num_prompt=10, num_output=6000) for _ in range(2)]
    plain = [Arrival(at_s=0.4 * i, num_prompt=10, num_output=4) for i in range(400)]
    learned = Arrival(at_s=0.1, num_prompt=10, num_output=30, adapter=1)
    late = Arrival(at_s=10.0, num_prompt=20, num_output=3, adapter=2)
    core = make_core(policy(), num_places=8, max_context=8192)
    run = Simulation(core, affine(slow)).run([*streams, *plain, learned, late], 170.0)
    number = next(n for n, arrival in enumerate(run.arrivals) if arrival == late)
    assert AGEING_S < run.first_token_s(number) < 3 * AGEING_S
    assert len(run.finished) == 402


@pytest.mark.parametrize("policy", BOUNDED)
def test_nobody_is_held_where_the_bound_is_out_of_reach(policy):
    """On a machine that is too slow for a single row, places are used all the same."""
    slow = (0.15, 0.002, 0.0, 0.01, 0.0, 0.0, 0.0)
    core = make_core(policy(), num_places=4, max_context=1024)
    arrivals = [Arrival(at_s=0.5 * i, num_prompt=10, num_output=40) for i in range(4)]
    run = Simulation(core, affine(slow), invariants.check).run(arrivals)
    assert max(map(run.first_token_s, range(4))) < 5.0


@pytest.mark.parametrize("policy", BOUNDED)
def test_a_lone_request_starts_whatever_it_costs(policy):
    """With nothing else there to be kept waiting, nothing is held back."""
    dear = (0.01, 0.001, 0.0, 0.01, 0.0, 0.5, 0.0)
    core = make_core(policy(), num_places=4, max_context=1024)
    arrivals = wearing(3, every_s=20.0, num_output=5)
    run = Simulation(core, affine(dear), invariants.check).run(arrivals)
    assert run.num_idle == 0
    assert max(map(run.first_token_s, range(3))) < 10.0


@pytest.mark.slow
@pytest.mark.parametrize("policy", BOUNDED)
def test_a_burst_on_a_machine_that_nobody_knows_yet(policy):
    """Sixty requests at once, before the first measurement: all start within seconds."""
    burst = [Arrival(at_s=0.0, num_prompt=100, num_output=400) for _ in range(60)]
    run = Simulation(make_core(policy()), affine(H100_LIKE)).run(burst)
    assert max(map(run.first_token_s, range(60))) < 2.0
    assert max(step.load.num_decode_rows for step in run.steps) == 60


def test_a_victims_place_is_not_held_back():
    """A high class takes a place from a low one though the rows fill the bound: one row goes for
    one that comes."""
    core = make_core(Priority(), num_places=16, max_context=1024)
    lows = [Arrival(at_s=0.0, num_prompt=20, num_output=900) for _ in range(30)]
    machine = affine((*TWO_CORES_LIKE[:3], 0.006, *TWO_CORES_LIKE[4:]))
    simulation = Simulation(core, machine, invariants.check)
    simulation.run(lows, 20.0)
    assert core.places.free
    assert core.waiting
    place = next(iter(core.running.values())).place
    high = Arrival(at_s=0.0, num_prompt=20, num_output=3, priority=1, place=place)
    core.handle(submit_of(99, high), simulation.now)
    run = simulation.run([], simulation.now + 2.0)
    assert run.finished[99].place == place
    assert sum(request.num_preemptions for request in core.requests.values()) == 1
