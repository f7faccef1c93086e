"""Policies under load, in made-up time on made-up machines."""

import random

import pytest
from attrs import evolve

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
from kvtrio.core.types import FinishReason, RejectReason, RequestId
from kvtrio.schedulers.fair import Fair
from kvtrio.schedulers.fcfs import FCFS
from kvtrio.schedulers.priority import AGEING_S, Priority
from kvtrio.schedulers.stall_free import StallFree

BOUNDED = [StallFree, Fair, Priority]
STREAMS = [Arrival(at_s=0.01 * i, num_prompt=60, num_output=3000) for i in range(64)]
WARM_UP = 30
"""Steps until the cost model knows the machine."""


def pastes(count, num_prompt, every_s, start_s=5.0):
    """A stream of long prompts with short answers."""
    return [
        Arrival(at_s=start_s + every_s * i, num_prompt=num_prompt, num_output=20)
        for i in range(count)
    ]


def breaches(run):
    """Steps over their limit that did more than the least progress, or more than one block."""
    late = run.steps[WARM_UP:]
    return [step for step in late if step.seconds > step.limit_s and step.num_blocks_read > 1]


@pytest.mark.slow
@pytest.mark.parametrize("policy", BOUNDED)
def test_streams_keep_their_gap_while_documents_are_read(policy):
    """64 streams beside 30,000-token prompts on a fast machine: no gap over the bound."""
    core = make_core(policy(), num_places=80)
    run = Simulation(core, affine(H100_LIKE)).run(STREAMS + pastes(12, 30_000, 1.0), 40.0)
    assert not breaches(run)
    assert max(step.seconds for step in run.steps[WARM_UP:]) <= 0.1
    assert sum(1 for f in run.finished.values() if f.num_prompt_tokens == 30_000) == 12


@pytest.mark.slow
@pytest.mark.parametrize("policy", BOUNDED)
def test_a_slow_and_noisy_machine_keeps_the_bound_most_of_the_time(policy):
    """On two cores with a tenth of noise nine steps in ten stay within, none far outside."""
    streams = [Arrival(at_s=0.0, num_prompt=40, num_output=4000) for _ in range(3)]
    core = make_core(policy(), num_places=4, max_context=8192)
    run = Simulation(core, affine(TWO_CORES_LIKE, noise=0.1)).run(
        streams + pastes(3, 6000, 10.0), 60.0
    )
    late = [step for step in run.steps[WARM_UP:] if step.load.num_prefill_tokens]
    over = [step for step in late if step.seconds > step.limit_s]
    assert len(over) <= 0.12 * len(late)
    assert max(step.seconds for step in late) <= 0.13
    assert sum(f.num_prompt_tokens == 6000 for f in run.finished.values()) == 3


def test_without_streams_steps_are_still_short():
    """A lone long prompt is read in steps of a quarter of a second at most."""
    run = Simulation(make_core(StallFree()), affine(TWO_CORES_LIKE)).run(pastes(1, 20_000, 1.0))
    assert not breaches(run)
    assert max(step.seconds for step in run.steps[WARM_UP:]) <= 0.25


def test_a_machine_too_slow_for_the_bound_still_reads():
    """Where one block alone takes longer than the bound, prompts progress block by block."""
    slow = (0.09, 0.005, 0.0, 0.01, 0.0, 0.0, 0.0)
    streams = [Arrival(at_s=0.0, num_prompt=10, num_output=500) for _ in range(2)]
    core = make_core(StallFree(), num_places=4, max_context=4096)
    run = Simulation(core, affine(slow)).run(streams + pastes(1, 320, 1.0))
    assert run.finished[2].reason is FinishReason.LENGTH
    assert not breaches(run)


@pytest.mark.slow
def test_short_prompts_go_first_and_the_long_one_is_not_starved():
    """Under endless short prompts a long one still gets done, in bounded time."""
    rng = random.Random(1)
    short = [Arrival(at_s=rng.uniform(0, 60), num_prompt=200, num_output=10) for _ in range(150)]
    core = make_core(StallFree(), num_places=4, max_context=8192)
    arrivals = [*short, Arrival(at_s=5.0, num_prompt=5000, num_output=10)]
    run = Simulation(core, affine(TWO_CORES_LIKE)).run(arrivals)
    number = next(i for i, arrival in enumerate(run.arrivals) if arrival.num_prompt == 5000)
    assert run.first_token_s(number) < 60
    quick = [run.first_token_s(i) for i, a in enumerate(run.arrivals) if a.num_prompt == 200]
    assert sorted(quick)[len(quick) // 2] < 3


@pytest.mark.slow
def test_fair_shares_between_a_flood_and_the_rest():
    """Eight tenants, one of which floods: backlogged tenants stay within the bound of virtual
    token counters, twice the larger of a longest prompt and a full batch of answers."""
    rng = random.Random(2)
    flood = [
        Arrival(at_s=rng.uniform(0, 5), num_prompt=400, num_output=50, tenant=b"0")
        for _ in range(400)
    ]
    others = [
        Arrival(at_s=rng.uniform(0, 20), num_prompt=400, num_output=50, tenant=b"%d" % (1 + i % 7))
        for i in range(210)
    ]
    core = make_core(Fair(), num_places=8, max_context=1024)
    run = Simulation(core, affine(TWO_CORES_LIKE)).run(flood + others)
    bound = 2 * max(400, 2 * 8 * 1024)
    spreads = [max(c.values()) - min(c.values()) for _, c in run.service if len(c) > 1]
    assert max(spreads) <= 2 * bound
    waits = {tenant: [] for tenant in (b"0", b"1")}
    for number, arrival in enumerate(run.arrivals):
        if arrival.tenant in waits:
            waits[arrival.tenant].append(run.first_token_s(number))
    assert sum(waits[b"1"]) / len(waits[b"1"]) < 0.5 * sum(waits[b"0"]) / len(waits[b"0"])
    assert len(run.finished) == 610


def test_a_higher_class_takes_a_place():
    """Two places decode for a low class; a high one starts at once, and its victim comes back with
    what it had, to the same end."""
    low = [Arrival(at_s=0.0, num_prompt=100, num_output=400) for _ in range(2)]
    high = Arrival(at_s=2.0, num_prompt=20, num_output=5, priority=1)
    core = make_core(Priority(), num_places=2, max_context=1024)
    run = Simulation(core, affine(TWO_CORES_LIKE), invariants.check).run([*low, high])
    assert run.first_token_s(2) < 0.5
    victims = [f for f in run.finished.values() if f.num_preemptions]
    assert len(victims) == 1
    assert victims[0].num_generated_tokens == 400
    assert victims[0].num_recomputed_tokens <= 1
    assert victims[0].longest_gap.cause.value == "preempted"


@pytest.mark.slow
def test_a_low_class_is_not_starved():
    """Under endless work of a higher class a low request starts after it has aged."""
    high = [Arrival(at_s=0.2 * i, num_prompt=100, num_output=20, priority=1) for i in range(1500)]
    low = Arrival(at_s=1.0, num_prompt=100, num_output=5)
    core = make_core(Priority(), num_places=2, max_context=1024)
    run = Simulation(core, affine(TWO_CORES_LIKE)).run([*high, low], 200.0)
    number = next(i for i, arrival in enumerate(run.arrivals) if not arrival.priority)
    assert run.first_token_s(number) < 3 * AGEING_S


@pytest.mark.parametrize("policy", [FCFS, *BOUNDED])
def test_no_step_is_idle_while_something_could_run(policy):
    """Bursts of mixed requests: every schedule with requests plans something."""
    rng = random.Random(3)
    arrivals = [
        Arrival(
            at_s=rng.choice([0.0, 1.0, 1.0, 4.0]),
            num_prompt=rng.randrange(1, 600),
            num_output=rng.randrange(1, 30),
            tenant=b"%d" % rng.randrange(3),
            priority=rng.randrange(3),
        )
        for _ in range(60)
    ]
    core = make_core(policy(), num_places=6, max_context=1024)
    run = Simulation(core, affine(H100_LIKE), invariants.check).run(arrivals)
    assert run.num_idle == 0
    assert len(run.finished) == 60


def test_a_deadline_that_cannot_be_met_is_said_early():
    """With the places taken for long, a request with a short deadline is refused at once, before
    any stay has ended, too; one that has a fair chance waits, and ends when that has passed."""
    warm = [Arrival(at_s=0.0, num_prompt=10, num_output=300) for _ in range(4)]
    fair = Arrival(at_s=0.05, num_prompt=10, num_output=5, deadline_s=0.4)
    hopeless = Arrival(at_s=1.0, num_prompt=10, num_output=5, deadline_s=1.05)
    late = Arrival(at_s=3.5, num_prompt=10, num_output=5, deadline_s=3.55)
    core = make_core(StallFree(), num_places=1, max_context=1024)
    run = Simulation(core, affine(TWO_CORES_LIKE)).run([*warm, fair, hopeless, late])
    assert run.finished[4].reason is FinishReason.DEADLINE
    for number in (5, 6):
        assert run.rejected[number].reason is RejectReason.DEADLINE
        assert run.rejected[number].retry_after_s > 0


def test_waiting_tokens_are_bounded():
    """Long prompts fill the queue before its count does."""
    core = make_core(StallFree(), num_places=1, max_context=4096, max_waiting_tokens=5000)
    arrivals = [Arrival(at_s=0.0, num_prompt=2000, num_output=2) for _ in range(5)]
    run = Simulation(core, affine(TWO_CORES_LIKE)).run(arrivals)
    assert [r.reason for r in run.rejected.values()] == [RejectReason.QUEUE_TOKENS] * 3


@pytest.mark.slow
@pytest.mark.parametrize("policy", [FCFS, *BOUNDED])
def test_every_request_ends_exactly_once_over_much_random_traffic(policy):
    """Leavers, deadlines, classes and shared prompts: each request has one terminal event."""
    rng = random.Random(4)
    arrivals = []
    for _ in range(500):
        at_s = rng.uniform(0, 100)
        arrivals.append(
            Arrival(
                at_s=at_s,
                num_prompt=rng.randrange(1, 300),
                num_output=rng.randrange(1, 40),
                tenant=b"%d" % rng.randrange(4),
                priority=rng.randrange(3),
                deadline_s=at_s + rng.uniform(0, 5) if rng.random() < 0.2 else None,
                leaves_s=at_s + rng.uniform(0, 3) if rng.random() < 0.3 else None,
                seed=rng.randrange(50),
            )
        )
    core = make_core(
        policy(), num_places=4, max_context=400, max_waiting=20, block_size=8, num_host_blocks=30
    )
    run = Simulation(core, affine(TWO_CORES_LIKE, noise=0.2), invariants.check).run(arrivals)
    assert run.finished.keys() | run.rejected.keys() == set(range(500))
    assert not core.requests
    reasons = {finished.reason for finished in run.finished.values()}
    assert {FinishReason.LENGTH, FinishReason.ABORT} <= reasons


def test_an_aged_victim_without_a_place_does_not_stop_the_one_that_runs():
    """Where nothing fits the bound, progress goes to whoever has a place, not to the first in
    order."""
    slow = (0.30, 0.002, 0.0, 0.01, 0.0, 0.0, 0.0)
    low = Arrival(at_s=0.0, num_prompt=20, num_output=400)
    high = Arrival(at_s=20.0, num_prompt=800, num_output=3, priority=1)
    late = Arrival(at_s=25.0, num_prompt=20, num_output=3, deadline_s=60.0)
    core = make_core(Priority(), num_places=1, max_context=2048)
    run = Simulation(core, affine(slow)).run([low, high, late])
    assert run.num_idle == 0
    assert run.finished[1].reason is FinishReason.LENGTH
    assert run.finished.keys() | run.rejected.keys() == {0, 1, 2}


def test_a_place_taken_for_a_request_is_given_to_it():
    """Low requests that waited long do not get what a high one had taken for itself."""
    lows = [Arrival(at_s=0.0, num_prompt=50, num_output=7000) for _ in range(6)]
    high = Arrival(at_s=35.0, num_prompt=50, num_output=5, priority=1)
    core = make_core(Priority(), num_places=2, max_context=8192)
    run = Simulation(core, affine(TWO_CORES_LIKE)).run([*lows, high], 60.0)
    assert run.first_token_s(6) < 1.0
    assert sum(request.num_preemptions for request in core.requests.values()) == 1


def test_a_victim_is_the_holder_of_the_place_that_is_wanted():
    """A request that waits for one place preempts whoever is there, if of a lower class."""
    lows = [Arrival(at_s=0.1 * i, num_prompt=50, num_output=800) for i in range(2)]
    core = make_core(Priority(), num_places=2, max_context=2048)
    simulation = Simulation(core, affine(TWO_CORES_LIKE))
    simulation.run(lows, 2.0)
    submit = submit_of(7, Arrival(at_s=2.0, num_prompt=20, num_output=3, priority=1))
    core.handle(evolve(submit, place=0), simulation.now)
    run = simulation.run([], simulation.now + 2.0)
    assert run.finished[7].place == 0
    assert core.requests[RequestId(0)].num_preemptions == 1
    assert core.requests[RequestId(1)].num_preemptions == 0


@pytest.mark.parametrize("factor", [3, 10])
def test_a_machine_that_slows_down_is_noticed_at_once(factor):
    """From one step to the next everything takes much longer: few steps exceed the bound."""
    fast = affine(H100_LIKE)
    streams = [Arrival(at_s=0.0, num_prompt=40, num_output=4000) for _ in range(3)]
    core = make_core(StallFree(), num_places=8, max_context=8192)
    simulation = Simulation(core, lambda load: fast(load) * (factor if simulation.now > 10 else 1))
    run = simulation.run(streams + pastes(40, 6000, 0.5, 2.0), 20.0)
    after = [step for step in run.steps if step.start_s > 10]
    over = [step for step in after if step.seconds > 1.2 * step.limit_s]
    assert len(over) <= 4


def test_a_lone_stream_does_not_hold_newcomers_service_down():
    """Who arrives beside a backlogged tenant starts level with it, whatever a stream that wants no
    more than it has was given."""
    stream = Arrival(at_s=0.0, num_prompt=20, num_output=4000, tenant=b"slow")
    first = [Arrival(at_s=0.1, num_prompt=400, num_output=50, tenant=b"b") for _ in range(150)]
    second = [Arrival(at_s=10.0, num_prompt=400, num_output=50, tenant=b"c") for _ in range(150)]
    core = make_core(Fair(), num_places=4, max_context=8192)
    run = Simulation(core, affine(TWO_CORES_LIKE)).run([stream, *first, *second], 60.0)
    spreads = [abs(c[b"b"] - c[b"c"]) for _, c in run.service if b"b" in c and b"c" in c]
    assert spreads
    assert max(spreads) < 2 * 2 * (400 + 2 * 50) * 4


@pytest.mark.parametrize("policy", [FCFS, *BOUNDED])
def test_requests_that_wait_for_a_place_hide_nobody(policy):
    """Forty requests pinned to a taken place do not keep others from the free ones."""
    core = make_core(policy(), num_places=4, max_context=2048)
    simulation = Simulation(core, affine(TWO_CORES_LIKE))
    for number in range(42):
        arrival = Arrival(at_s=0.0, num_prompt=20, num_output=400 if number == 0 else 2)
        submit = submit_of(100 + number, arrival)
        place = 0 if number < 41 else None
        core.handle(evolve(submit, place=place), 0.0)
    run = simulation.run([], 1.0)
    assert 141 in run.finished
