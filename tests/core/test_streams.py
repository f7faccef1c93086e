"""Decoding rows as one group: what a policy sees of them, and how it may plan them."""

import pytest

from harness.core_fakes import answer, make_core, submit
from kvtrio.core import invariants
from kvtrio.core.policy import Plan, PolicyError, Share
from kvtrio.core.sampling import SamplingParams, draw
from kvtrio.core.types import RequestId
from kvtrio.schedulers.fcfs import FCFS


class Watching:
    """First come, first served, by a plan of the test's choice once all decode."""

    def __init__(self, plan):
        self.decide = plan

    def plan(self, view):
        if view.reading or view.free_places:
            return FCFS().plan(view)
        return self.decide(view)


def decoding_core(plan, **changes):
    """Three requests that decode; ``plan`` decides from there."""
    core = make_core(Watching(plan), max_batch_tokens=64)
    for number in range(3):
        core.handle(submit(number, max_new_tokens=9, **changes), 0.0)
    step(core)
    return core


def step(core):
    batch = core.schedule(0.0)
    invariants.check(core)
    core.update(batch, answer(batch), 0.0)
    invariants.check(core)
    return batch


def test_all_at_once_is_what_one_by_one_is():
    """A policy that names every row makes the same steps as one that says "all of them"."""
    one_by_one = decoding_core(lambda v: Plan([Share(r.request_id, 1) for r in v.decoding]))
    together = decoding_core(lambda view: Plan([], all_streams=True))
    for _ in range(6):
        assert step(one_by_one) == step(together)


def test_rows_that_are_not_named_rest():
    """Without "all of them", only those get a token that have a share."""
    core = decoding_core(lambda view: Plan([Share(view.decoding[1].request_id, 1)]))
    assert [chunk.request_id for chunk in step(core).chunks] == [1]


def test_a_row_is_not_named_twice():
    """A share for one that decodes, beside "all of them", breaks the contract."""
    core = decoding_core(lambda view: Plan([Share(RequestId(0), 1)], all_streams=True))
    with pytest.raises(PolicyError):
        core.schedule(0.0)
    invariants.check(core)


def test_single_rows_are_shown_to_those_who_ask():
    """The sums are those of the rows, and asking twice gives the same."""
    seen = []

    def plan(view):
        seen.append((view, view.decoding, view.decoding))
        return Plan([], all_streams=True)

    core = decoding_core(plan)
    step(core)
    ((view, rows, again),) = seen
    assert again is rows
    assert [row.request_id for row in rows] == [0, 1, 2]
    assert all(row.is_decoding for row in rows)
    assert view.streams.num_rows == 3
    assert view.streams.decode_context == sum(row.num_computed_tokens for row in rows)


def test_a_victim_among_the_rows_gets_no_token():
    """Who waited for its place has it, the others go on."""

    def plan(view):
        return Plan([Share(RequestId(7), 4, victim=RequestId(1))], all_streams=True)

    core = decoding_core(plan)
    core.handle(submit(7), 0.0)
    assert [chunk.request_id for chunk in step(core).chunks] == [0, 2, 7]
    assert core.requests[RequestId(7)].place == 1
    assert core.statistics().num_waiting == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_draws_belong_to_the_token(temperature):
    """Each row brings the draw of its seed and index, and none where none is needed."""
    params = SamplingParams(temperature=temperature, seed=5)
    core = decoding_core(lambda view: Plan([], all_streams=True), sampling=params)
    for index in (1, 2):
        samples = [chunk.sample for chunk in step(core).chunks]
        assert {sample.draw for sample in samples} == {draw(5, index) if temperature else 0.0}


def test_penalties_see_the_last_tokens():
    """The window moves with the answer, whatever else is kept from step to step."""
    params = SamplingParams(temperature=0.0, repeat_penalty=1.2, repeat_last_n=3)
    core = decoding_core(lambda view: Plan([], all_streams=True), sampling=params)
    step(core)
    recents = [chunk.sample.recent for chunk in step(core).chunks]
    assert recents == [(100 * number + 5, 7, 7) for number in range(3)]
