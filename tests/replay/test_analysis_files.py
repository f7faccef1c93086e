"""What is read: damaged, foreign and hostile files, and results of replays."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from harness.logs import done, hit, log_bytes, write_log
from kvtrio.core.explain import CachePath, MissReason, TurnClass
from kvtrio.core.types import RequestId
from kvtrio.obs.schema import Digest
from kvtrio.replay.analysis.errors import AnalysisError
from kvtrio.replay.analysis.page import report_page
from kvtrio.replay.analysis.report import Report, report_of
from kvtrio.replay.analysis.store import open_store
from kvtrio.replay.analysis.table import Table
from kvtrio.replay.analysis.text import text_report
from kvtrio.replay.analysis.times import Limits
from kvtrio.replay.results import (
    Api,
    End,
    Outcome,
    Pacing,
    Result,
    Run,
    ServerKind,
    Verdict,
    encode_line,
)
from kvtrio.replay.scenario import Use

CANARY = "Canary7Words"


def reported(path: Path, content: bytes) -> Report:
    path.write_bytes(content)
    with open_store([path]) as store:
        return report_of(store, Limits())


def table(report: Report, key: str) -> Table:
    return next(table for table in report.tables if table.key == key)


def everything(report: Report) -> str:
    """All that is ever written about it."""
    return text_report(report) + json.dumps(report.plain()) + report_page(report)


DAMAGED = (
    b"kvtrio: listening on http://127.0.0.1:8080",
    b'{"event": "request.done", "num_prompt_tokens": 5',
    b"\xff\xfe\x00\x01",
    b"[1, 2, 3]",
    b"17",
    b'"a text"',
    b"null",
    b"{}",
    b'{"event": "request.done"} {"event": "request.done"}',
)


FORGEABLE = encode_line(
    Result(
        id=1,
        session=1,
        tenant=1,
        adapters=(Use(alias="a1"),),
        planned_s=0.0,
        sent_s=0.0,
        first_token_s=0.5,
        total_s=1.0,
        outcome=Outcome.DONE,
        status=200,
        num_prompt_tokens=10,
        path=CachePath.RAM,
        miss_reason=MissReason.EVICTED,
        turn=TurnClass.CONTINUATION,
    )
)


@pytest.mark.slow
def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    """Whatever stands there: the good lines count, and a remark says how many do not."""
    good = log_bytes([(0.0, done()), (1.0, hit(TurnClass.CONTINUATION, MissReason.NEW_TOKENS, 90))])
    cut = good.splitlines()[0][:-40]
    report = reported(tmp_path / "log", good + b"\n".join((*DAMAGED, cut)))
    assert (report.source.num_lines, report.source.num_bad) == (12, 10)
    assert report.remarks == ("10 of 12 lines are damaged and left out.",)
    assert table(report, "outcomes").rows[0][:2] == ("stop", 2)


@pytest.mark.slow
def test_lines_of_other_versions_and_kinds(tmp_path: Path) -> None:
    """They are counted apart; a field that is new, or not there any more, is no matter."""
    line = json.loads(log_bytes([(0.0, done())]))
    newer = line | {"schema": "kvtrio.decision/2"}
    unknown = line | {"event": "cache.dream"}
    richer = line | {"num_dreamt_tokens": 7}
    del richer["num_recalled_tokens"], richer["gap_p50_s"]
    text = "".join(json.dumps(each) + "\n" for each in (line, newer, unknown, richer))
    report = reported(tmp_path / "log", text.encode())
    source = report.source
    assert (source.num_bad, source.num_foreign, source.num_unknown) == (0, 1, 1)
    assert table(report, "outcomes").rows[0][1] == 2


@pytest.mark.slow
def test_no_text_of_a_forged_log_gets_into_a_report(tmp_path: Path) -> None:
    """A value that is not a number, a known word or a digest becomes nothing, in every field."""
    odd = (CANARY, f"<script>{CANARY}</script>", [CANARY], {CANARY: 1}, -7, 1e300, True, None)
    texts = []
    for line in map(json.loads, (log_bytes([(0.0, done(session=Digest(1)))]), FORGEABLE)):
        fields = [name for name in line if name not in ("schema", "event", "kind")]
        forged = [line | {name: value} for name in fields for value in odd]
        texts += [json.dumps(each) for each in (line, *forged)]
    report = reported(tmp_path / "log", "\n".join(texts).encode())
    said = everything(report)
    assert CANARY.lower() not in said.lower()
    assert "<script" not in said
    assert report.source.num_lines == len(texts)


@pytest.mark.parametrize("name", ["missing", "folder"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    """With one line, before anything is read."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(AnalysisError, match="is not a file"), open_store([tmp_path / name]):
        pass


@pytest.mark.parametrize("content", [b"\x1f\x8b not gzip after all", b"\x28\xb5\x2f\xfd no zstd"])
def test_a_damaged_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    """With one line of ours, that quotes nothing of it."""
    path = tmp_path / "log.gz"
    path.write_bytes(content)
    with pytest.raises(AnalysisError) as caught, open_store([path]):
        pass
    assert "gzip after" not in str(caught.value)


@pytest.mark.slow
def test_a_line_of_many_megabytes_is_refused(tmp_path: Path) -> None:
    """A file with a line longer than any of ours is refused, in one line."""
    path = tmp_path / "log"
    path.write_bytes(log_bytes([(0.0, done())]) + b'{"event": "' + b"x" * (40 << 20) + b'"}\n')
    with pytest.raises(AnalysisError, match="16 MiB"), open_store([path]):
        pass


def test_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database goes when the report is done, also after an error."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path = write_log(tmp_path / "log", [(0.0, done())])
    with open_store([path]) as store:
        assert list((tmp_path / "temporary").iterdir())
        store.row("SELECT 1")
    with pytest.raises(KeyError), open_store([path]):
        raise KeyError
    assert list((tmp_path / "temporary").iterdir()) == []


# --- results of replays ---


def run(server: ServerKind) -> Run:
    return Run(
        scenario="0" * 64,
        num_requests=4,
        pacing=Pacing.CLOSED,
        speed=1.0,
        sample=1.0,
        seed=1,
        server=server,
        api=Api.TOKENS,
        started_s=1_800_000_000.0,
    )


def result(number: int, scenario_turn: int, num_cached: int, **changes: Any) -> Result:
    values: dict[str, Any] = {
        "id": number,
        "session": 5,
        "scenario_turn": scenario_turn,
        "planned_s": 10.0 * number,
        "sent_s": 10.0 * number,
        "first_token_s": 0.5,
        "total_s": 2.0,
        "gap_max_s": 0.05,
        "outcome": Outcome.DONE,
        "status": 200,
        "num_prompt_tokens": 1000 * (scenario_turn + 1),
        "num_cached_tokens": num_cached,
        "num_generated_tokens": 10,
    }
    return Result(**values | changes)


def results_bytes(server: ServerKind, *results: Result) -> bytes:
    verdicts = [
        Verdict(request=1, what="min_cached", is_met=True),
        Verdict(request=2, what="min_cached", is_met=None),
    ]
    end = End(is_complete=True, num_results=len(results), wall_s=40.0)
    return b"".join(map(encode_line, (run(server), *results, *verdicts, end)))


@pytest.mark.slow
def test_results_of_a_server_that_tells(tmp_path: Path) -> None:
    """Path, reason and turn are the server's; adapters are the scenario's aliases."""
    told: dict[str, Any] = {"path": CachePath.RAM, "turn": TurnClass.CONTINUATION}
    report = reported(
        tmp_path / "results",
        results_bytes(
            ServerKind.KVTRIO,
            result(0, 0, 0, path=CachePath.NONE, miss_reason=MissReason.FIRST_TURN,
                   turn=TurnClass.FIRST),
            result(1, 1, 1000, **told, miss_reason=MissReason.NEW_TOKENS,
                   adapters=(Use(alias="a1"), Use(alias="a2", scale=0.5))),
            result(2, 2, 500, **told, miss_reason=MissReason.EVICTED),
            result(3, 3, 0, outcome=Outcome.REFUSED, status=429),
        ),
    )  # fmt: skip
    should = [row[:5] for row in table(report, "hits_should").rows]
    assert should == [
        ("all", "all", "all", 2, 1),
        ("with", "all", "all", 1, 0),
        ("with", "continuation", "all", 1, 0),
        ("with", "continuation", "ram", 1, 0),
        ("without", "all", "all", 1, 1),
        ("without", "continuation", "all", 1, 1),
        ("without", "continuation", "ram", 1, 1),
    ]
    assert [row[:2] for row in table(report, "by_adapters").rows] == [
        ("(none)", 2),
        ("a1 + a2 x 0.5", 1),
    ]
    assert table(report, "rejections").rows == (("refused", 1, 4000),)
    assert table(report, "expectations").rows == (("met", 1), ("not known", 1))
    assert (report.first, report.last) == ("2027-01-15 08:00:00", "2027-01-15 08:00:22")
    assert report.source.num_bad == 0


@pytest.mark.slow
def test_results_of_a_server_that_does_not_tell(tmp_path: Path) -> None:
    """A later turn missed if less was reused than the prompt of the turn before it had."""
    report = reported(
        tmp_path / "results",
        results_bytes(
            ServerKind.LLAMA,
            result(0, 0, 0),
            result(1, 1, 990),
            result(2, 2, 700),
            result(3, 0, 0, session=6),
        ),
    )
    rows = [row[:5] for row in table(report, "hits_should").rows]
    assert rows[-1] == ("without", "continuation", "unknown", 2, 1)
    assert [row[1:4] for row in table(report, "hits_cannot").rows][-1] == ("first", "unknown", 2)
    assert table(report, "outcomes").rows[0][:2] == ("done", 4)


@pytest.mark.slow
def test_results_that_do_not_tell_what_was_reused(tmp_path: Path) -> None:
    """Neither hits nor misses: a client that left, and a server that never tells."""
    silent = {"num_cached_tokens": None, "miss_reason": None, "turn": None, "path": None}
    report = reported(
        tmp_path / "results",
        results_bytes(
            ServerKind.KVTRIO,
            result(0, 0, 0),
            result(1, 1, 0, **silent, outcome=Outcome.LEFT, num_prompt_tokens=None),
            result(2, 2, 0, **silent),
        ),
    )
    assert table(report, "hits_should").rows == ()
    assert table(report, "hits_apart").rows == (("not_told", 2, 3000),)
    tokens = {row[0]: row[1] for row in table(report, "tokens").rows}
    assert tokens["reused or computed, the server does not say which"] == 3000


@pytest.mark.slow
def test_replays_that_are_read_as_one(tmp_path: Path) -> None:
    """Each with its own clock and its own sessions, though both number them from 0."""
    content = results_bytes(ServerKind.KVTRIO, result(0, 0, 0), result(1, 1, 990))
    paths = [tmp_path / "a", tmp_path / "b"]
    later = content.replace(b'"started_s":1800000000', b'"started_s":1800003600')
    for path, data in zip(paths, (content, later), strict=True):
        path.write_bytes(data)
    with open_store(paths) as store:
        report = report_of(store, Limits())
        sessions = store.row("SELECT count(DISTINCT session) FROM requests")
    assert sessions == (2,)
    assert report.first == "2027-01-15 08:00:00"
    assert report.last.startswith("2027-01-15 09:00:")
    assert "2 replays are read as one." in report.remarks


@pytest.mark.slow
def test_a_log_of_a_run_that_was_killed(tmp_path: Path) -> None:
    """No end line is no fault."""
    content = results_bytes(ServerKind.LLAMA, result(0, 0, 0))
    report = reported(tmp_path / "results", b"\n".join(content.splitlines()[:2]) + b"\n")
    assert report.remarks == ()
    assert table(report, "outcomes").rows[0][:2] == ("done", 1)


def test_request_ids_that_come_again(tmp_path: Path) -> None:
    """Ids start anew with a server; requests are counted as lines, not as ids."""
    events = [(float(second), done(request_id=RequestId(1))) for second in range(3)]
    path = write_log(tmp_path / "log", events)
    with open_store([path]) as store:
        assert store.row("SELECT count(*) FROM requests") == (3,)
