"""The tables: every cell of logs whose counts are known."""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from harness.logs import done, hit, log_bytes, made, write_log
from kvtrio.core.explain import CachePath, MissReason, TurnClass
from kvtrio.core.types import FinishReason, GapCause, RejectReason, RequestId
from kvtrio.obs.events import (
    CacheDiscard,
    CacheDivergence,
    CacheEvict,
    CacheRestore,
    RequestDone,
    RequestRejected,
)
from kvtrio.obs.schema import Digest
from kvtrio.obs.words import DiscardReason, Section
from kvtrio.replay.analysis.report import Report, report_of
from kvtrio.replay.analysis.store import open_store
from kvtrio.replay.analysis.times import Limits

pytestmark = pytest.mark.slow
GO_ON, AGAIN, FIRST = TurnClass.CONTINUATION, TurnClass.REGENERATE, TurnClass.FIRST
NEW, NOTHING = MissReason.NEW_TOKENS, MissReason.NOTHING_MISSED
RESIDENT, RAM = CachePath.RESIDENT, CachePath.RAM
Row = tuple[Any, ...]


def reported(path: Path, events: Iterable[object], limits: Limits | None = None) -> Report:
    """The report of a log with an event a second."""
    write_log(path, enumerate(events))
    with open_store([path]) as store:
        return report_of(store, limits or Limits())


def rows(report: Report, key: str) -> list[Row]:
    (table,) = [table for table in report.tables if table.key == key]
    return list(table.rows)


def with_adapters() -> list[RequestDone]:
    """52 continuations, 35 of them missed, and 4 first turns."""
    adapted: dict[str, Any] = {"num_adapters": 1, "adapters": Digest(7)}
    return [
        *[hit(GO_ON, NEW, 90, **adapted)] * 12,
        *[hit(GO_ON, NEW, 90, RAM, **adapted)] * 5,
        *[hit(GO_ON, MissReason.ADAPTER_MISMATCH, 0, CachePath.NONE, **adapted)] * 20,
        *[hit(GO_ON, MissReason.EVICTED, 40, **adapted)] * 11,
        *[hit(GO_ON, MissReason.EVICTED, 30, RAM, **adapted)] * 4,
        *[done(**adapted)] * 4,
    ]


def without_adapters() -> list[RequestDone]:
    """37 continuations, 10 of them missed, 10 first turns, and some of each other class."""
    return [
        *[hit(GO_ON, NEW, 80)] * 21,
        *[hit(GO_ON, NEW, 80, RAM)] * 6,
        *[hit(GO_ON, MissReason.EVICTED, 0, CachePath.NONE)] * 7,
        *[hit(GO_ON, MissReason.EVICTED, 16)] * 2,
        hit(GO_ON, MissReason.NO_CHECKPOINT, 20, RAM),
        *[hit(AGAIN, NOTHING, 99)] * 3,
        *[done()] * 10,
        *[hit(TurnClass.REWRITE, MissReason.DIVERGED, 10)] * 2,
        hit(TurnClass.AFTER_GAP, MissReason.EVICTED, 0, CachePath.NONE, evicted_age_s=900.0),
        hit(TurnClass.AFTER_GAP, NEW, 95, RAM),
        *[hit(GO_ON, NEW, 80, is_copy=True)] * 9,
        *[done(miss_reason=MissReason.CACHING_OFF)] * 2,
        done(miss_reason=MissReason.NOT_STARTED, place=None, reason=FinishReason.ABORT),
    ]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The two lists above, one after the other."""
    path = tmp_path_factory.mktemp("known") / "log"
    return reported(path, [*with_adapters(), *without_adapters()])


def test_turns_that_should_hit(known: Report) -> None:
    """By adapters, turn and path: turns, missed, rate, prompt tokens, reused, share."""
    assert rows(known, "hits_should") == [
        ("all", "all", "all", 92, 45, 45 / 92, 9200, 4599, 4599 / 9200),
        ("with", "all", "all", 52, 35, 35 / 52, 5200, 2090, 2090 / 5200),
        ("with", "continuation", "all", 52, 35, 35 / 52, 5200, 2090, 2090 / 5200),
        ("with", "continuation", "none", 20, 20, 1.0, 2000, 0, 0.0),
        ("with", "continuation", "resident", 23, 11, 11 / 23, 2300, 1520, 1520 / 2300),
        ("with", "continuation", "ram", 9, 4, 4 / 9, 900, 570, 570 / 900),
        ("without", "all", "all", 40, 10, 10 / 40, 4000, 2509, 2509 / 4000),
        ("without", "continuation", "all", 37, 10, 10 / 37, 3700, 2212, 2212 / 3700),
        ("without", "continuation", "none", 7, 7, 1.0, 700, 0, 0.0),
        ("without", "continuation", "resident", 23, 2, 2 / 23, 2300, 1712, 1712 / 2300),
        ("without", "continuation", "ram", 7, 1, 1 / 7, 700, 500, 500 / 700),
        ("without", "regenerate", "all", 3, 0, 0.0, 300, 297, 0.99),
        ("without", "regenerate", "resident", 3, 0, 0.0, 300, 297, 0.99),
    ]


def test_turns_that_cannot_hit(known: Report) -> None:
    """First turns, rewrites and what came back late are in no miss rate."""
    assert rows(known, "hits_cannot") == [
        ("all", "all", "all", 18, 3, 3 / 18, 1800, 115, 115 / 1800),
        ("with", "all", "all", 4, 0, 0.0, 400, 0, 0.0),
        ("with", "first", "all", 4, 0, 0.0, 400, 0, 0.0),
        ("with", "first", "none", 4, 0, 0.0, 400, 0, 0.0),
        ("without", "all", "all", 14, 3, 3 / 14, 1400, 115, 115 / 1400),
        ("without", "first", "all", 10, 0, 0.0, 1000, 0, 0.0),
        ("without", "first", "none", 10, 0, 0.0, 1000, 0, 0.0),
        ("without", "rewrite", "all", 2, 2, 1.0, 200, 20, 0.1),
        ("without", "rewrite", "resident", 2, 2, 1.0, 200, 20, 0.1),
        ("without", "after_gap", "all", 2, 1, 0.5, 200, 95, 95 / 200),
        ("without", "after_gap", "none", 1, 0, 0.0, 100, 0, 0.0),
        ("without", "after_gap", "ram", 1, 1, 1.0, 100, 95, 0.95),
    ]


def test_requests_that_are_no_turns(known: Report) -> None:
    """All requests are in one of the three tables."""
    assert rows(known, "hits_apart") == [
        ("caching_off", 2, 200),
        ("further_answer", 9, 900),
        ("not_started", 1, 100),
    ]
    (stop, abort) = rows(known, "outcomes")
    assert (stop[:2], abort[:2]) == (("stop", 121), ("abort", 1))
    assert stop[1] + abort[1] == 92 + 18 + 12


def test_reasons_have_the_class_as_denominator(known: Report) -> None:
    """Why, how many, which share, and what was computed in those turns."""
    total = 9200 + 1800
    assert [row[:5] for row in rows(known, "reasons")] == [
        ("should hit", "nothing_missed", 3, 3 / 92, 3),
        ("should hit", "new_tokens", 44, 44 / 92, 710),
        ("should hit", "adapter_mismatch", 20, 20 / 92, 2000),
        ("should hit", "no_checkpoint", 1, 1 / 92, 80),
        ("should hit", "evicted", 24, 24 / 92, 1808),
        ("cannot hit", "first_turn", 14, 14 / 18, 1400),
        ("cannot hit", "new_tokens", 1, 1 / 18, 5),
        ("cannot hit", "diverged", 2, 2 / 18, 180),
        ("cannot hit", "evicted", 1, 1 / 18, 100),
    ]
    shares = [row[5] for row in rows(known, "reasons")]
    assert shares == [row[4] / total for row in rows(known, "reasons")]


def test_where_the_prompt_tokens_came_from(known: Report) -> None:
    """The parts of the waterfall sum to all prompt tokens; further answers count with the first."""
    tokens = {row[0]: row[1] for row in rows(known, "tokens")}
    assert tokens["prompt tokens"] == 11_300
    assert tokens["reused from the device"] + tokens["reused from RAM"] == 4599 + 115
    assert sum(number for _, number in known.figures.waterfall) == 11_300
    assert dict(known.figures.waterfall)["late:evicted"] == 100


def test_what_was_never_read_is_not_computed(tmp_path: Path) -> None:
    """Of a client that left: what it was reused, what was read, and the rest, in every table; what
    further answers wrote was written."""
    left = done(reason=FinishReason.ABORT, num_cached_tokens=16, num_computed_tokens=20)
    more = done(is_copy=True, num_cached_tokens=99, num_computed_tokens=1)
    report = reported(tmp_path / "log", [left, done(), more])
    tokens = {row[0]: row[1] for row in rows(report, "tokens")}
    assert tokens["prompt tokens"] == 200
    assert tokens["computed"] == 120
    assert tokens["never read: the request ended before"] == 64
    assert tokens["generated"] == 60
    assert rows(report, "reasons") == [("cannot hit", "first_turn", 2, 1.0, 120, 120 / 200)]
    assert rows(report, "by_adapters")[0][3:5] == (300, 121)


def test_times_are_times_that_happened(tmp_path: Path) -> None:
    """Percentiles by nearest rank, for all and for each group that has any."""
    events = [done(prefill_s=float(second)) for second in range(1, 101)]
    events += [done(num_generated_tokens=0, prefill_s=1000.0)]
    events += [hit(GO_ON, NEW, 90, prefill_s=0.25, queue_s=0.25, num_adapters=1)]
    report = reported(tmp_path / "log", events)
    times = {row[:2]: row[2:] for row in rows(report, "times")}
    assert times["first token", "turns that cannot hit"] == (100, 50.0, 90.0, 95.0, 99.0, 100.0)
    assert times["first token", "with adapters"] == (1, 0.5, 0.5, 0.5, 0.5, 0.5)
    assert times["queue", "all"] == (102, 0.0, 0.0, 0.0, 0.0, 0.25)
    assert ("first token", "turns that missed") not in times


def test_times_that_cannot_be_are_none(tmp_path: Path) -> None:
    """A request without its whole time is in no plot of places, and counts all the same."""
    report = reported(tmp_path / "log", [done(queue_s=1e300)])
    assert report.figures.window is None
    assert rows(report, "outcomes")[0][:2] == ("stop", 1)


def test_goodput_counts_all_that_was_offered(tmp_path: Path) -> None:
    """Refused, failed and late requests are offered and not good; who left is neither."""
    refused = RequestRejected(
        request_id=RequestId(9),
        reason=RejectReason.QUEUE_FULL,
        num_prompt_tokens=70,
        limit=64,
        retry_after_s=1.0,
    )
    events = [
        done(prefill_s=0.5, longest_gap_s=0.05),
        done(prefill_s=0.5, longest_gap_s=0.5),
        done(prefill_s=2.0, longest_gap_s=None, num_generated_tokens=1),
        done(reason=FinishReason.ERROR, num_generated_tokens=0),
        done(reason=FinishReason.ABORT),
        refused,
    ]
    report = reported(tmp_path / "log", events, Limits(1.0, 0.1))
    assert [row[:4] for row in rows(report, "goodput")] == [
        ("first token within 1 s", 5, 2, 0.4),
        ("no gap above 0.1 s", 5, 2, 0.4),
        ("both", 5, 1, 0.2),
    ]
    assert rows(report, "rejections") == [("queue_full", 1, 70)]


def test_who_waited_for_whom(tmp_path: Path) -> None:
    """Answers that paused beyond the limit, by size and position of both sides."""
    pause: dict[str, Any] = {
        "longest_gap_cause": GapCause.PREFILL,
        "longest_gap_prefill_tokens": 512,
        "longest_gap_request_id": RequestId(77),
        "longest_gap_prompt_tokens": 30_000,
        "longest_gap_prompt_at": 2048,
    }
    events = [
        done(longest_gap_s=0.5, longest_gap_at=110, **pause),
        done(longest_gap_s=1.5, longest_gap_at=150, **pause),
        done(longest_gap_s=0.25, longest_gap_at=5000, **pause | {"longest_gap_prompt_tokens": 300}),
        done(longest_gap_s=0.75, longest_gap_cause=GapCause.STEP, longest_gap_at=90),
        done(longest_gap_s=0.05, longest_gap_cause=GapCause.STEP),
    ]
    report = reported(tmp_path / "log", events, Limits(1.0, 0.1))
    assert rows(report, "stall_pairs") == [
        ("0 to 256", "16k to 64k", 2, 110, 2048, 512, 0.5, 1.5, 2.0),
        ("4k to 16k", "256 to 1k", 1, 5000, 2048, 512, 0.25, 0.25, 0.25),
    ]
    assert rows(report, "stall_causes") == [
        ("prefill", 3, 0.75, 0.5, 1.5, 2.25),
        ("step", 1, 0.25, 0.75, 0.75, 0.75),
    ]
    worst = rows(report, "stall_worst")[0]
    assert worst == (*("2027-01-15 08:00:01", "1", 1.5, "prefill", 150, "77", 30_000, 2048, 512),)


def test_eviction_intervals_against_turn_gaps(tmp_path: Path) -> None:
    """How long sessions rest, when their state was lost, and how long ago what was needed had been
    used."""
    path = tmp_path / "log"
    turn: dict[str, Any] = {"session": Digest(5), "prefill_s": 0.0, "decode_s": 0.0}
    evict = CacheEvict(
        num_demoted_blocks=8, num_dropped_blocks=4, num_dropped_tokens=64, longest_idle_s=200.0
    )
    age: dict[str, Any] = {"evicted_age_s": 290.0}
    write_log(
        path,
        [
            (0.0, done(**turn)),
            (20.0, hit(GO_ON, NEW, 90, **turn)),
            (310.0, evict),
            (310.0, hit(GO_ON, MissReason.EVICTED, 0, CachePath.NONE, **turn, **age)),
            (320.0, done(session=Digest(6))),
            (321.0, made(CacheRestore, num_blocks=3)),
        ],
    )
    with open_store([path]) as store:
        report = report_of(store, Limits())
    table = {row[0]: row[1:] for row in rows(report, "evictions")}
    assert table.pop("15 s to 30 s") == (1, 0, 0.0, 0, 0)
    assert table.pop("2 min to 5 min") == (1, 1, 1.0, 1, 1)
    assert set(table.values()) == {(0, 0, None, 0, 0)}
    assert rows(report, "intervals")[0] == (
        *("from a session's request to its next", 2, 20.0, 20.0, 290.0, 290.0),
    )
    assert rows(report, "moves") == [
        ("from the device to RAM", 8, None),
        ("from RAM to the device", 3, None),
        ("lost", 4, 64),
    ]


def test_shares_and_discards(tmp_path: Path) -> None:
    """Each adapter set, tenant and purpose with its requests, tokens, time and misses."""
    discard = CacheDiscard(request_id=RequestId(1), why=DiscardReason.AUXILIARY, num_tokens=21)
    events = [
        *[done(tenant=Digest(0xA), purpose=0)] * 3,
        hit(GO_ON, MissReason.EVICTED, 50, tenant=Digest(0xB), purpose=1, queue_s=0.25),
        discard,
        discard,
    ]
    report = reported(tmp_path / "log", events)
    assert rows(report, "by_tenant") == [
        ("000000000000000a", 3, 0.75, 300, 300, 60, 4.5, 0.75, 0, 0, None, 0.5),
        ("000000000000000b", 1, 0.25, 100, 50, 20, 1.5, 0.25, 1, 1, 1.0, 0.75),
    ]
    assert [row[0] for row in rows(report, "by_purpose")] == ["0", "1"]
    assert [row[:2] for row in rows(report, "by_adapters")] == [("(none)", 4)]
    assert rows(report, "discards") == [("auxiliary", 2, 42)]


def test_many_tenants_are_summed_up(tmp_path: Path) -> None:
    """The twenty with most requests, and one row for all others, so that nothing is left out."""
    events = [done(tenant=Digest(number % 30)) for number in range(60)] + [done(tenant=Digest(99))]
    shares = rows(reported(tmp_path / "log", events), "by_tenant")
    assert len(shares) == 21
    assert shares[-1][:2] == ("(others)", 21)
    assert sum(row[1] for row in shares) == 61


def test_where_reuse_ended(tmp_path: Path) -> None:
    """By the part of the prompt and why, with positions."""

    def at(position: int, section: Section) -> CacheDivergence:
        return CacheDivergence(
            request_id=RequestId(1),
            miss_reason=MissReason.DIVERGED,
            position=position,
            message_index=0,
            section=section,
        )

    events = [at(3, Section.SYSTEM), at(9, Section.SYSTEM), at(7, Section.USER), done()]
    assert rows(reported(tmp_path / "log", events), "divergence") == [
        ("system", "diverged", 2, 3, 9),
        ("user", "diverged", 1, 7, 7),
    ]


def test_an_empty_log_is_an_empty_report(tmp_path: Path) -> None:
    """No line at all: no row, and a remark that says so."""
    report = reported(tmp_path / "log", [])
    assert [table.key for table in report.tables if table.rows] == ["tokens"]
    assert report.remarks == ("There are no lines.",)


def test_logs_are_read_as_one(tmp_path: Path) -> None:
    """Rotated files, packed or not, add up."""
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b*[x]?.jsonl.gz"
    write_log(plain, [(0.0, done()), (1.0, hit(GO_ON, NEW, 90))])
    packed.write_bytes(gzip.compress(log_bytes([(2.0, hit(GO_ON, NEW, 90))])))
    with open_store([plain, packed]) as store:
        report = report_of(store, Limits())
    assert rows(report, "hits_should")[0][3] == 2
    assert (report.source.num_lines, report.source.num_bad) == (3, 0)
