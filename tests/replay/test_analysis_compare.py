"""Two runs side by side: differences, and how far they could be chance."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import numpy as np
import pytest

from harness.logs import done, hit, made, write_log
from kvtrio.core.explain import CachePath, MissReason, TurnClass
from kvtrio.core.types import FinishReason, RejectReason
from kvtrio.obs.events import RequestRejected
from kvtrio.obs.schema import Digest
from kvtrio.replay.analysis.bootstrap import (
    Sums,
    class_of,
    draws,
    heights_of,
    histogram_of,
    interval,
    quantiles,
    ratios,
)
from kvtrio.replay.analysis.compare import Comparison, compare, difference_table
from kvtrio.replay.analysis.compare_page import comparison_page
from kvtrio.replay.analysis.compare_text import text_comparison
from kvtrio.replay.analysis.measures import RATIOS
from kvtrio.replay.analysis.store import open_store
from kvtrio.replay.analysis.table import Kind
from kvtrio.replay.analysis.times import Limits
from kvtrio.replay.results import Api, Outcome, Pacing, Result, Run, ServerKind, encode_line

SESSIONS = 250


def traffic(seed: int, miss_rate: float, prefill_s: float) -> list[tuple[float, object]]:
    """Three turns of each session; all of a session's turns hit or miss together."""
    rng = Random(seed)
    events: list[tuple[float, object]] = []
    for session in range(SESSIONS):
        is_missed = rng.random() < miss_rate
        reason = MissReason.EVICTED if is_missed else MissReason.NEW_TOKENS
        path = CachePath.NONE if is_missed else CachePath.RESIDENT
        seconds = prefill_s * rng.uniform(0.9, 1.1)
        changes: dict[str, Any] = {"session": Digest(seed * 1000 + session), "prefill_s": seconds}
        line = hit(TurnClass.CONTINUATION, reason, 0 if is_missed else 90, path, **changes)
        events += [(10.0 * session + turn, line) for turn in range(3)]
    return events


def compared(a: Path, b: Path) -> Comparison:
    with open_store([a]) as first, open_store([b]) as second:
        return compare(first, second, Limits(1.0, 0.1))


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {each.name: each.verdict for each in comparison.differences}


@pytest.mark.slow
def test_a_difference_is_told_from_chance(tmp_path: Path) -> None:
    """A third instead of a tenth of missed turns is worse, half the time to the first token better;
    the same rates with other sessions are noise."""
    a = write_log(tmp_path / "a", traffic(1, 0.1, 0.4))
    b = write_log(tmp_path / "b", traffic(2, 0.33, 0.2))
    same = write_log(tmp_path / "c", traffic(3, 0.1, 0.4))
    changed, unchanged = verdicts(compared(a, b)), verdicts(compared(a, same))
    assert changed["miss rate of turns that should hit"] == "worse"
    assert changed["reused share of prompt tokens"] == "worse"
    assert changed["first token, median"] == "better"
    assert changed["typical gap, median"] == "within noise"
    assert set(unchanged.values()) == {"within noise"}


@pytest.mark.slow
def test_what_was_refused_was_offered(tmp_path: Path) -> None:
    """As in the table of goodput: a server that turns everybody away serves nobody in time. And a
    prompt counts once, with as much of it as was read."""
    refused = made(RequestRejected, reason=RejectReason.QUEUE_FULL)
    left: dict[str, Any] = {"reason": FinishReason.ABORT, "num_computed_tokens": 7}
    served = [(0.0, done()), (0.1, done(is_copy=True, num_cached_tokens=99)), (0.2, done(**left))]
    a = write_log(tmp_path / "a", served)
    b = write_log(tmp_path / "b", [*served, *[(1.0, refused)] * 6])
    result = {each.name: (each.a, each.b) for each in compared(a, b).differences}
    assert result["requests in time"] == (1.0, 0.25)
    assert result["reused share of prompt tokens"] == (0.0, 0.0)
    assert result["prompt tokens computed per request"] == (53.5, 53.5)


@pytest.mark.slow
def test_the_same_files_give_the_same_comparison(tmp_path: Path) -> None:
    """The seed is fixed: every number, and every form of the answer, comes out again."""
    a = write_log(tmp_path / "a", traffic(1, 0.1, 0.4))
    b = write_log(tmp_path / "b", traffic(2, 0.2, 0.3))
    first, second = compared(a, b), compared(a, b)
    assert first.plain() == second.plain()
    assert text_comparison(first) == text_comparison(second)
    assert comparison_page(first) == comparison_page(second)


@pytest.mark.slow
def test_tables_side_by_side(tmp_path: Path) -> None:
    """Rows of both, also those that one side alone has."""
    only: dict[str, Any] = {"num_adapters": 1}
    a = [(0.0, hit(TurnClass.CONTINUATION, MissReason.NEW_TOKENS, 90))] * 3
    b = [(0.0, hit(TurnClass.CONTINUATION, MissReason.EVICTED, 90, **only))] * 2
    result = compared(write_log(tmp_path / "a", a), write_log(tmp_path / "b", b))
    (hits,) = [table for table in result.tables if table.key == "hits_should"]
    keys = [column.key for column in hits.columns[3:]]
    assert keys == ["turns_a", "turns_b", "missed_a", "missed_b", "miss_rate_a", "miss_rate_b"]
    cells = {row[:3]: row[3:] for row in hits.rows}
    assert cells["all", "all", "all"] == (3, 2, 0, 2, 0.0, 1.0)
    assert cells["with", "all", "all"] == (None, 2, None, 2, None, 1.0)
    assert cells["without", "all", "all"] == (3, None, 0, None, 0.0, None)
    assert {each.noise for each in result.differences} == {None}, "too few sessions to say"
    assert set(verdicts(result).values()) == {"not known"}
    row = difference_table(result.differences).rows[0]
    assert row[:5] == ("miss rate of turns that should hit", "share", 0.0, 1.0, 1.0)


def played(server: ServerKind, cached: Sequence[int], is_told: bool) -> bytes:
    """Two turns of 40 sessions: of the second, ``cached`` in turn were reused of 1,000 tokens."""
    run = Run(
        scenario="5" * 64,
        num_requests=80,
        pacing=Pacing.CLOSED,
        speed=1.0,
        sample=1.0,
        seed=0,
        server=server,
        api=Api.TOKENS,
        started_s=1_800_000_000.0,
    )
    lines = [encode_line(run)]
    for number in range(80):
        session, turn = number // 2, number % 2
        reused = cached[session % len(cached)] if turn else 0
        told = {"turn": TurnClass.CONTINUATION, "miss_reason": MissReason.NEW_TOKENS}
        result = Result(
            id=number,
            session=session,
            scenario_turn=turn,
            planned_s=float(number),
            sent_s=float(number),
            first_token_s=0.1 + (1100 - reused) / 1000,
            total_s=2.0,
            outcome=Outcome.DONE,
            status=200,
            num_prompt_tokens=1000 + 100 * turn,
            num_cached_tokens=reused,
            num_generated_tokens=10,
            **(told if is_told and turn else {}),  # type: ignore[arg-type]
        )
        lines.append(encode_line(result))
    return b"".join(lines)


@pytest.mark.slow
def test_two_servers_are_judged_alike(tmp_path: Path) -> None:
    """What one of them does not tell is taken from neither; the same sessions are drawn for both,
    so that a small difference in each of them is no noise."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(played(ServerKind.KVTRIO, [1000], is_told=True))
    b.write_bytes(played(ServerKind.LLAMA, [990, 0, 985, 980], is_told=False))
    result = compared(a, b)
    assert (result.is_paired, result.is_untold) == (True, True)
    rates = {each.name: each for each in result.differences}
    missed = rates["miss rate of turns that should hit"]
    assert (missed.a, missed.b, missed.verdict) == (0.0, 0.25, "worse")
    assert "does not tell" in text_comparison(result)


# --- the arithmetic ---


@pytest.mark.slow
def test_nothing_is_concluded_from_a_replay_that_was_stopped_early(tmp_path: Path) -> None:
    """Three requests of one side say nothing, however many the other one has."""
    a, b = tmp_path / "a", tmp_path / "b"
    whole = played(ServerKind.KVTRIO, [1000], is_told=True)
    a.write_bytes(b"".join(whole.splitlines(keepends=True)[:4]))
    b.write_bytes(whole)
    assert set(verdicts(compared(a, b)).values()) == {"not known"}


def test_noise_of_a_share_is_that_of_its_formula() -> None:
    """Of independent groups the interval is about 1.96 standard errors wide to either side."""
    rng = np.random.default_rng(0)
    over = (rng.random(250) < 0.3).astype(float).reshape(-1, 1)
    found = ratios(Sums(over, np.ones_like(over)), draws(250, rng))[:, 0]
    ends = interval(found)
    assert ends is not None
    error = (over.mean() * (1 - over.mean()) / 250) ** 0.5
    assert ends[1] - ends[0] == pytest.approx(2 * 1.96 * error, rel=0.08)


def test_quantiles_of_a_histogram() -> None:
    """As exact as the classes: 2.3 % wide; nothing for a side without values."""
    once = np.ones((1, 1))
    rows = [(0, _class(0.05 * number), 1) for number in range(1, 21)]
    heights = heights_of(histogram_of(rows, 1), once)
    assert quantiles(heights, 0.5)[0] == pytest.approx(0.5, rel=0.024)
    assert quantiles(heights, 0.95)[0] == pytest.approx(0.95, rel=0.024)
    assert np.isnan(quantiles(heights_of(histogram_of([], 1), once), 0.5)[0])


def _class(value: float) -> int:
    with duckdb.connect() as connection:
        ((found,),) = connection.execute(f"SELECT {class_of(str(value))}").fetchall()
    return int(found)


def test_kinds_of_differences() -> None:
    """Shares, counts and seconds: every measure has a unit that people know."""
    assert {ratio.kind for ratio in RATIOS} == {Kind.SHARE, Kind.COUNT}
