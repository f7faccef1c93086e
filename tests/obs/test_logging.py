"""The log file: envelope, levels, library messages, file mode."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtrio.core.cost import CostModel, Load
from kvtrio.core.events import Gap, OtherPrompt, Rejected
from kvtrio.core.explain import CachePath, CacheReport, MissReason, TurnClass
from kvtrio.core.identity import AdapterUse
from kvtrio.core.state import CoreStatistics
from kvtrio.core.types import FinishReason, GapCause, RejectReason, RequestId, Tier
from kvtrio.engine.records import BreachReason, CostRecord, RequestRecord, StepRecord
from kvtrio.obs.events import LibraryNote, LoopStall
from kvtrio.obs.instrument import StallWatch
from kvtrio.obs.logging import Clock, Log, library_bridge, open_log_file
from kvtrio.obs.observer import JsonObserver, StepSampling
from kvtrio.obs.schema import Digest, Level
from kvtrio.obs.words import Library

CANARY = "canary-in-a-message"
KEY = b"log key of the tests"
PROMPT = ("request_id", "prompt_tokens", "prompt_at")
CLOCK = Clock(monotonic_ns=lambda: 123, wall_s=lambda: 1_800_000_000.5)


def lines(out: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture
def out() -> io.BytesIO:
    return io.BytesIO()


@contextmanager
def bridged(out: io.BytesIO) -> Iterator[Log]:
    """Libraries log into ``out``. No fixture: pytest would add its own handlers to the bridge."""
    log = Log(out, CLOCK, Level.DEBUG)
    with library_bridge(log):
        yield log


def test_envelope(out: io.BytesIO) -> None:
    """Each line has schema, number, both times, level and name before its own fields."""
    log = Log(out, CLOCK)
    log.emit(LoopStall(held_s=0.25))
    log.emit(LoopStall(held_s=0.5))
    first, second = lines(out)
    assert list(first.items()) == [
        ("schema", "kvtrio.decision/1"),
        ("seq", 1),
        ("timestamp", "2027-01-15T08:00:00.500000Z"),
        ("ts_mono_ns", 123),
        ("level", "warning"),
        ("event", "loop.stall"),
        ("held_s", 0.25),
    ]
    assert second["seq"] == 2


def test_quiet_lines_are_left_out(out: io.BytesIO) -> None:
    """Below the level nothing is written, and no number is used up."""
    log = Log(out, CLOCK, Level.ERROR)
    log.emit(LoopStall(held_s=0.25))
    assert out.getvalue() == b""


def test_a_full_disk_does_not_end_the_server() -> None:
    """A line that cannot be written is counted, not raised."""

    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

    log = Log(Full(), CLOCK)
    log.emit(LoopStall(held_s=0.25))
    assert log.num_lost == 1


def test_a_closed_file_does_not_fail_a_request(out: io.BytesIO) -> None:
    """Whoever logs goes on, by an event or through a library; each line is counted as lost."""
    with bridged(out) as log:
        out.close()
        log.emit(LoopStall(held_s=0.25))
        logging.getLogger("kvtrio.serve.app").warning(CANARY)
        logging.getLogger().handle(
            logging.makeLogRecord({"name": "x", "levelno": logging.ERROR, "lineno": None})
        )
    assert log.num_lost == 3


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("hypercorn.error", Library.HYPERCORN),
        ("trio.abc.Instrument", Library.TRIO),
        ("kvtrio.serve.app", Library.KVTRIO),
        (CANARY, Library.OTHER),
    ],
)
def test_library_messages_keep_only_their_origin(
    out: io.BytesIO, name: str, library: Library
) -> None:
    """Neither message, arguments, exception text nor an unknown logger's name gets through."""
    with bridged(out):
        try:
            raise ValueError(CANARY)
        except ValueError:
            logging.getLogger(name).exception("failed on %s", CANARY, extra={"user": CANARY})
    (line,) = lines(out)
    assert CANARY not in out.getvalue().decode()
    assert (line["event"], line["library"]) == ("library.note", library.value)
    assert (line["severity"], line["error"]) == ("error", "builtins.ValueError")


def test_warnings_keep_only_their_origin(out: io.BytesIO) -> None:
    """The warnings module prints nothing of its own."""
    with bridged(out), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn(CANARY, stacklevel=1)
    assert CANARY not in out.getvalue().decode()
    assert [line["library"] for line in lines(out)] == ["py"]


def test_the_bridge_leaves_no_trace(out: io.BytesIO) -> None:
    """Handlers, level and warnings are as before, also after an exception."""
    root = logging.getLogger()
    before = (list(root.handlers), root.level, warnings.showwarning)
    with pytest.raises(KeyError), library_bridge(Log(out, CLOCK), logging.DEBUG):
        raise KeyError
    assert (list(root.handlers), root.level, warnings.showwarning) == before


def test_log_file_is_private_and_appended_to(tmp_path: Path) -> None:
    """A new file belongs to its owner; an old one is continued."""
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        with open_log_file(path) as file:
            Log(file, CLOCK).emit(LoopStall(held_s=0.25))
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes().splitlines()) == 2


def a_step(step: int, duration_s: float, breach: BreachReason | None = None) -> StepRecord:
    return StepRecord(
        step=step,
        num_chunks=2,
        num_prefill_tokens=9,
        num_decode_rows=1,
        num_waiting=0,
        num_running=2,
        duration_s=duration_s,
        predicted_s=0.2,
        limit_s=0.25,
        breach=breach,
    )


@pytest.mark.parametrize(
    ("level", "written"), [(Level.INFO, [0, 3, 10]), (Level.DEBUG, list(range(12)))]
)
def test_steps_are_sampled(out: io.BytesIO, level: Level, written: list[int]) -> None:
    """Every tenth step and every slow one; all at level debug."""
    observer = JsonObserver(Log(out, CLOCK, level), StepSampling(every=10, slow_s=2.0), key=KEY)
    for step in range(12):
        observer.step(a_step(step, 2.0 if step == 3 else 0.1))
    assert [line["step"] for line in lines(out)] == written
    assert [line["step"] for line in lines(out) if line["is_slow"]] == [3]
    assert observer.num_steps == 12


def test_every_breach_is_written_with_its_reason(out: io.BytesIO) -> None:
    """Sampling does not hide a step that took longer than it may."""
    observer = JsonObserver(Log(out, CLOCK), StepSampling(every=1000), key=KEY)
    for step, breach in enumerate((None, None, BreachReason.ONE_BLOCK, None), start=1):
        observer.step(a_step(step, 0.3, breach))
    (line,) = lines(out)
    assert (line["step"], line["is_breach"], line["breach"]) == (3, True, "one_block")
    assert (line["duration_s"], line["predicted_s"], line["limit_s"]) == (0.3, 0.2, 0.25)


def test_what_steps_cost_is_written(out: io.BytesIO) -> None:
    """A model of the machine that learned, in seconds per unit."""
    model = CostModel()
    for _ in range(300):
        model.observe(Load(num_decode_rows=2, decode_context=100), 0.03)
    JsonObserver(Log(out, CLOCK), key=KEY).cost(CostRecord.of(model))
    (line,) = lines(out)
    assert (line["event"], line["num_observed"]) == ("sched.cost", 300)
    assert line["base_s"] + 2 * line["decode_row_s"] == pytest.approx(0.03, rel=0.1)
    assert line["margin"] >= 1.0


def test_a_refusal_is_written(out: io.BytesIO) -> None:
    """Which limit was met, and when to come back."""
    rejected = Rejected(RequestId(7), RejectReason.QUEUE_TOKENS, 900, 1000, 2.5)
    JsonObserver(Log(out, CLOCK), key=KEY).rejected(rejected)
    (line,) = lines(out)
    assert (line["event"], line["request_id"]) == ("request.rejected", 7)
    assert (line["reason"], line["limit"], line["retry_after_s"]) == ("queue_tokens", 1000, 2.5)


def test_one_line_per_request(out: io.BytesIO) -> None:
    """The record's numbers under the record's names."""
    observer = JsonObserver(Log(out, CLOCK), key=KEY)
    observer.request(
        RequestRecord(
            request_id=RequestId(4),
            reason=FinishReason.STOP,
            stopped_by_text=True,
            place=1,
            num_prompt_tokens=20,
            num_cached_tokens=12,
            num_computed_tokens=8,
            num_generated_tokens=5,
            queue_s=0.5,
            prefill_s=0.25,
            decode_s=1.0,
            gap_p50_s=0.25,
            gap_p99_s=0.25,
            gap_max_s=None,
            cache=CacheReport(
                path=CachePath.RAM,
                reason=MissReason.DIVERGED,
                turn=TurnClass.REWRITE,
                num_device_tokens=4,
                num_host_tokens=8,
                num_matched_tokens=12,
                is_divergence=True,
            ),
            adapters=(AdapterUse(3, b"content", 0.5),),
            session=bytes(range(8)),
            purpose=2,
            num_preemptions=1,
            num_recomputed_tokens=3,
            is_copy=True,
            tenant=b"somebody",
            longest_gap=Gap(0.75, GapCause.PREFILL, 64, 23, OtherPrompt(RequestId(3), 900, 512)),
        )
    )
    (line,) = lines(out)
    assert (line["event"], line["request_id"], line["reason"]) == ("request.done", 4, "stop")
    assert (line["num_prompt_tokens"], line["gap_max_s"]) == (20, None)
    assert (line["path"], line["miss_reason"], line["turn"]) == ("ram", "diverged", "rewrite")
    assert (line["num_device_tokens"], line["num_host_tokens"]) == (4, 8)
    assert (line["divergence_at"], line["evicted_age_s"]) == (12, None)
    assert (line["session"], line["purpose"]) == ("0001020304050607", 2)
    assert (line["num_preemptions"], line["num_recomputed_tokens"]) == (1, 3)
    assert (line["longest_gap_s"], line["longest_gap_cause"]) == (0.75, "prefill")
    assert (line["longest_gap_prefill_tokens"], line["longest_gap_at"]) == (64, 23)
    assert [line[f"longest_gap_{name}"] for name in PROMPT] == [3, 900, 512]
    assert line["tenant"] == str(Digest.of_bytes(b"somebody", KEY))
    assert line["is_copy"] is True
    assert (line["num_adapters"], len(line["adapters"])) == (1, 16)
    assert observer.num_requests == 1


def test_how_full_the_tiers_are(out: io.BytesIO) -> None:
    """A tier or a kind of state that the server does not have counts as empty."""
    statistics = CoreStatistics(
        num_running=3,
        num_waiting=2,
        num_waiting_tokens=700,
        is_draining=False,
        num_used_blocks={Tier.DEVICE: 40, Tier.HOST: 90},
        max_blocks={Tier.DEVICE: 64, Tier.HOST: 128},
        places=(),
    )
    JsonObserver(Log(out, CLOCK), key=KEY).usage(statistics)
    (line,) = lines(out)
    assert line["event"] == "tier.usage"
    assert (line["num_device_blocks"], line["num_host_blocks"]) == (40, 90)
    assert (line["num_device_states"], line["num_host_states"]) == (0, 0)
    assert (line["num_running"], line["num_waiting"], line["num_waiting_tokens"]) == (3, 2, 700)


def test_a_stall_is_reported_with_its_length(out: io.BytesIO) -> None:
    """Only a task that held the loop longer than the limit makes a line."""
    times = iter([0.0, 0.01, 1.0, 1.5])
    watch = StallWatch(Log(out, CLOCK), now_s=lambda: next(times))
    for _ in range(2):
        watch.before_task_step(object())
        watch.after_task_step(object())
    assert [line["held_s"] for line in lines(out)] == [0.5]


def test_notes_have_a_level_of_their_own(out: io.BytesIO) -> None:
    """The library's severity is a field; it does not decide whether the line is written."""
    Log(out, CLOCK).emit(
        LibraryNote(library=Library.TORCH, severity=Level.DEBUG, line=1, error=None)
    )
    assert lines(out)[0]["level"] == "warning"
