"""Who gets into the queue when somebody fills it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core_fakes import answer, make_core, submit
from kvtrio.core import invariants
from kvtrio.core.events import Rejected
from kvtrio.core.types import RejectReason
from kvtrio.schedulers.priority import Priority


def offer(core, number, **changes):
    """Submit one; why it was refused, or None."""
    outputs = core.handle(submit(number, **changes), 0.0)
    invariants.check(core)
    return outputs[0].reason if outputs and isinstance(outputs[0], Rejected) else None


def flood(core, tenant, first=0, **changes):
    """Submit until refused; how many were taken, and why no more were."""
    number = first
    while (reason := offer(core, number, tenant=tenant, **changes)) is None:
        number += 1
    return number - first, reason


def busy_core(**sizes):
    """All places taken, nobody waiting."""
    core = make_core(num_places=2, **sizes)
    for number in (9000, 9001):
        core.handle(submit(number, max_new_tokens=30), 0.0)
    batch = core.schedule(0.0)
    core.update(batch, answer(batch), 0.0)
    assert core.statistics().num_running == 2
    return core


def test_a_flood_leaves_room_for_others():
    """One tenant gets four fifths of the queue, and then 429; others still get in."""
    core = busy_core(max_waiting=20)
    assert flood(core, b"flood") == (16, RejectReason.QUEUE_FULL)
    for number in range(3):
        assert offer(core, 100 + number, tenant=b"%d" % number) is None
    assert offer(core, 200, tenant=b"late") is RejectReason.QUEUE_FULL


def test_a_flood_of_tokens_leaves_room_for_others():
    """The same for the tokens that wait; the refused one says which limit it was."""
    core = busy_core(max_waiting=100, max_waiting_tokens=300)
    taken, reason = flood(core, b"flood", num_tokens=20)
    assert (taken, reason) == (12, RejectReason.QUEUE_TOKENS)
    assert offer(core, 100, tenant=b"other", num_tokens=30) is None
    assert offer(core, 101, tenant=b"flood", num_tokens=1) is RejectReason.QUEUE_TOKENS


def test_a_class_leaves_room_for_others():
    """Many tenants fill the queue in one class; another still gets in. One tenant gains nothing by
    using many."""
    core = busy_core(max_waiting=40)
    number, reason = 0, None
    while reason is None:
        number += 1
        reason = offer(core, number, tenant=b"%d" % number)
    assert number < 40
    assert offer(core, 500, tenant=b"new", priority=1) is None
    alone = busy_core(max_waiting=40)
    taken = [flood(alone, b"flood", 100 * (5 - p), priority=p)[0] for p in range(-4, 5)]
    assert sum(taken) == 32


def test_small_queues_are_used_to_the_last_place():
    """Where a share of the queue would be less than a request, nothing is set aside."""
    core = busy_core(max_waiting=3)
    assert flood(core, b"only") == (3, RejectReason.QUEUE_FULL)


@settings(deadline=None, max_examples=40)
@given(
    floods=st.lists(
        st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(1, 30)), max_size=150
    ),
    num_steps=st.integers(0, 5),
)
def test_no_four_tenants_shut_out_a_fifth(floods, num_steps):
    """Whatever others send, in whatever classes, a tenant with nothing in the queue gets in."""
    core = busy_core(max_waiting=60, max_waiting_tokens=2000)
    for number, (tenant, priority, num_tokens) in enumerate(floods):
        offer(core, number, tenant=b"%d" % tenant, priority=priority, num_tokens=num_tokens)
    for _ in range(num_steps):
        batch = core.schedule(0.0)
        core.update(batch, answer(batch), 0.0)
    assert offer(core, 5000, tenant=b"new", priority=2, num_tokens=30) is None


@pytest.mark.parametrize("num_generated", [1, 3])
def test_tokens_of_preempted_requests_wait_too(num_generated):
    """What a victim has to read again counts, in the statistics and against the limit."""
    core = make_core(Priority(), num_places=1, max_waiting_tokens=40)
    core.handle(submit(1, num_tokens=20, max_new_tokens=10), 0.0)
    while core.requests[1].num_generated_tokens < num_generated:
        batch = core.schedule(0.0)
        core.update(batch, answer(batch), 0.0)
    core.handle(submit(2, priority=1), 0.0)
    core.schedule(0.0)
    invariants.check(core)
    assert core.requests[1].num_preemptions == 1
    assert core.statistics().num_waiting_tokens == 20 + num_generated
    assert offer(core, 3, tenant=b"other", num_tokens=21) is RejectReason.QUEUE_TOKENS
