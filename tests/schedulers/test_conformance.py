"""What every policy must do, built-in or not: run over the entry-point group."""

from importlib.metadata import entry_points

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrio.core.policy import RequestView, Streams, View, checked
from kvtrio.core.types import RequestId

NAMES = sorted(entry.name for entry in entry_points(group="kvtrio.schedulers"))


def load(name):
    (entry,) = entry_points(group="kvtrio.schedulers", name=name)
    return entry.load()()


@st.composite
def views(draw):
    """Snapshots that a core could make."""
    num_running = draw(st.integers(0, 6))
    num_waiting = draw(st.integers(0, 6))
    num_free_places = draw(st.integers(0, 3))
    requests = [_request(draw, i, i < num_running) for i in range(num_running + num_waiting)]
    running, waiting = requests[:num_running], tuple(requests[num_running:])
    decoding = tuple(request for request in running if request.is_decoding)
    return View(
        now=draw(st.floats(10, 20)),
        streams=Streams(
            num_rows=len(decoding),
            decode_context=sum(request.num_computed_tokens for request in decoding),
            adapters=frozenset(request.adapters for request in decoding),
            lowest_priority=min((request.priority for request in decoding), default=None),
        ),
        reading=tuple(request for request in running if not request.is_decoding),
        free_places=frozenset(range(num_running, num_running + num_free_places)),
        decoding=lambda: decoding,
        waiting=lambda: waiting,
        max_batch_tokens=draw(st.integers(10, 64)),
        block_size=8,
        service={b"a": draw(st.floats(0, 100))},
    )


def _request(draw, number, is_running):
    num_prompt = draw(st.integers(1, 100))
    num_generated = draw(st.integers(0, 5)) if is_running else 0
    num_tokens = num_prompt + num_generated
    num_computed = num_tokens - 1 if num_generated else draw(st.integers(0, num_prompt - 1))
    return RequestView(
        request_id=RequestId(number),
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt,
        num_computed_tokens=num_computed if is_running else 0,
        arrival_s=float(number),
        is_running=is_running,
        priority=draw(st.integers(0, 2)),
        tenant=draw(st.sampled_from([b"a", b"b"])),
        adapters=draw(st.integers(0, 2)),
        num_preemptions=draw(st.integers(0, 4)),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(views())
def test_a_policy_keeps_its_contract(name, view):
    """Live requests only, each once, at least one token and no more than it misses, in budget."""
    plan = load(name).plan(view)
    shares, victims = plan.shares, plan.victims
    known = {request.request_id: request for request in view.running + view.waiting}
    running = {request.request_id for request in view.running}
    decoding = {request.request_id for request in view.decoding}
    assert checked(plan, known, running, decoding) == plan
    num_rows = len(decoding - set(victims)) if plan.all_streams else 0
    assert num_rows + sum(share.num_tokens for share in shares) <= view.max_batch_tokens
    for share in shares:
        assert share.num_tokens <= known[share.request_id].num_missing
    started = [share for share in shares if not known[share.request_id].is_running]
    assert len(started) <= view.num_free_places + len(victims)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(views())
def test_a_policy_never_idles_with_work(name, view):
    """Whenever something could run, something does."""
    if view.running or (view.waiting and view.free_places):
        plan = load(name).plan(view)
        assert plan.shares or (plan.all_streams and view.decoding)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(views())
def test_no_policy_stops_a_stream(name, view):
    """Every decoding request gets its token in every step."""
    plan = load(name).plan(view)
    chosen = {share.request_id for share in plan.shares} | set(plan.victims)
    assert plan.all_streams or {r.request_id for r in view.decoding} <= chosen
