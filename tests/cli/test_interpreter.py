"""The interpreter's settings while the server serves."""

import gc
import sys
from contextlib import suppress

import pytest
import trio
from trio.testing import MockClock

from kvtrio.cli.collector import NEVER
from kvtrio.cli.interpreter import (
    LOOK_EVERY_S,
    MAX_PUT_OFF_S,
    SWITCH_S,
    Pacer,
    collect_garbage,
    tuned,
)


def test_settings_are_made_and_taken_back() -> None:
    """Everything that is there is frozen, no full collection comes by itself, and threads change
    quickly; afterwards all is as it was, also after a failure."""
    before = (sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count())
    with suppress(ZeroDivisionError), tuned():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        assert gc.get_threshold() == (*before[1][:2], NEVER)
        assert gc.get_freeze_count() > 1000
        raise ZeroDivisionError
    assert (sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()) == before


@pytest.mark.slow
def test_no_full_collection_comes_by_itself() -> None:
    """However many objects live on."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        seen.append(info["generation"])

    with tuned():
        gc.callbacks.append(note)
        kept = [[number] for number in range(300_000)]
        gc.callbacks.remove(note)
    assert len(kept) == 300_000
    assert 1 in seen
    assert 2 not in seen


def test_long_work_is_for_a_quarter_of_the_time() -> None:
    """Rest follows work threefold; the time before the first call is not known and not counted."""
    now, rests = [1000.0], list[float]()

    def sleep(seconds: float) -> None:
        rests.append(seconds)
        now[0] += seconds

    pause = Pacer(lambda: now[0], sleep)
    for worked_s in (5.0, 0.002, 0.004, 1.0, 0.003):
        now[0] += worked_s
        pause()
    assert rests == pytest.approx([0.006, 0.012, 0.009])


class Collector:
    """Notes when it was asked to collect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times_s: list[float] = []
        self.is_idle = True
        self.has_grown = True
        monkeypatch.setattr("kvtrio.cli.interpreter.has_grown", lambda: self.has_grown)

    async def collect(self) -> None:
        self.times_s.append(trio.current_time())
        await trio.lowlevel.checkpoint()

    async def run_for(self, seconds: float) -> list[float]:
        start_s = trio.current_time()
        with trio.move_on_after(seconds):
            await collect_garbage(lambda: self.is_idle, self.collect)
        times, self.times_s = [each - start_s for each in self.times_s], []
        return times


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    return Collector(monkeypatch)


async def test_garbage_is_collected_while_nobody_is_served(
    autojump_clock: MockClock, collector: Collector
) -> None:
    """At the next look, if there is something to look at."""
    assert await collector.run_for(2.5 * LOOK_EVERY_S) == [LOOK_EVERY_S, 2 * LOOK_EVERY_S]
    collector.has_grown = False
    assert await collector.run_for(100 * LOOK_EVERY_S) == []


async def test_a_busy_server_puts_it_off_but_not_for_ever(
    autojump_clock: MockClock, collector: Collector
) -> None:
    """Twice in a little more than twice the longest time."""
    collector.is_idle = False
    times = await collector.run_for(2.1 * MAX_PUT_OFF_S)
    assert times == [MAX_PUT_OFF_S, 2 * MAX_PUT_OFF_S]
