"""How long a request is thought to keep its place."""

import pytest

from harness.core_fakes import answer, make_core, submit
from kvtrio.core.events import Abort
from kvtrio.core.stays import Stays
from kvtrio.core.types import RequestId
from kvtrio.schedulers.priority import Priority


def test_the_first_stay_counts_in_full():
    """One stay of ten seconds is a mean of ten, not of one; later ones fade it."""
    stays = Stays()
    assert stays.mean_s([]) == 0.0
    stays.end(10.0)
    assert stays.mean_s([]) == pytest.approx(10.0)
    for _ in range(60):
        stays.end(2.0)
    assert stays.mean_s([]) == pytest.approx(2.0, rel=0.02)


def test_present_stays_tell_before_any_has_ended():
    """Requests that have been there for a minute say that places are kept for long."""
    stays = Stays()
    assert stays.mean_s([50.0, 70.0]) == pytest.approx(60.0)
    stays.end(5.0)
    assert stays.mean_s([1.0]) == pytest.approx(5.0)
    assert stays.mean_s([50.0, 70.0]) == pytest.approx(60.0)


def step(core, now):
    batch = core.schedule(now)
    core.update(batch, answer(batch), now)


def test_stays_that_were_cut_short_do_not_count():
    """Neither who left nor who was sent back tells how long requests stay."""
    core = make_core(Priority(), num_places=1)
    core.handle(submit(1, max_new_tokens=20), 0.0)
    step(core, 0.0)
    core.handle(submit(2, priority=1), 0.1)
    step(core, 0.1)
    assert core.requests[RequestId(1)].num_preemptions == 1
    core.handle(Abort(RequestId(2)), 0.2)
    assert core.mean_stay_s(0.2) == 0.0
    step(core, 1.0)
    while core.has_work:
        step(core, 9.0)
    assert core.mean_stay_s(9.0) == pytest.approx(8.0)
