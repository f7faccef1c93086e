"""The recording server: its file, its limits, and what is never in it."""

import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, evolve, field
from obs.test_canary import CANARY, CHAT, GENERATING, HEADERS, assert_clean, full_body

from harness.core_fakes import NumberMatcher
from harness.serving import serving
from harness.virtual import SimSettings
from harness.virtual_http import Call
from kvtrio.cli.record import Recorded, check_record, recording
from kvtrio.config import ConfigError, RecordSettings
from kvtrio.core.batch import Sampled
from kvtrio.core.events import Finished, Submit, TokenOut
from kvtrio.core.explain import CacheReport
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import FinishReason, RequestId
from kvtrio.obs.events import RecordEnd, RecordStart
from kvtrio.obs.logging import Clock, Log
from kvtrio.obs.words import RecordingEnd
from kvtrio.replay import recording as recording_module
from kvtrio.replay.recording import Recording, RecordLimits, RecordPlan, open_recording, read_limits
from kvtrio.replay.scenario import Header, Origin
from kvtrio.replay.scenario_file import Scenario, read_scenario

HEADER = Header(origin=Origin.RECORDED, max_context=1000)
HOUR = RecordLimits(max_bytes=1 << 20, max_s=3600.0)


@define(eq=False)
class Tried:
    """A recording of requests made by hand."""

    path: Path
    events: list[Any] = field(factory=list)

    @contextmanager
    def recording(self, limits: RecordLimits = HOUR, file: Any = None) -> Iterator[Recording]:
        plan = RecordPlan(
            file=file or self.path.open("wb", buffering=0),
            header=HEADER,
            limits=limits,
            started_s=0.0,
            log_key=b"key",
            emit=self.events.append,
        )
        with open_recording(plan) as tap:
            yield tap

    @property
    def scenario(self) -> Scenario:
        return read_scenario(self.path)

    @property
    def end(self) -> RecordEnd:
        start, end = self.events
        assert isinstance(start, RecordStart)
        assert isinstance(end, RecordEnd)
        return end


@pytest.fixture
def tried(tmp_path: Path) -> Tried:
    return Tried(tmp_path / "recording.jsonl")


def begin(tap: Recording, number: int, now: float = 0.0) -> None:
    prompt = tuple(range(number * 100, number * 100 + 50))
    tap.admitted(
        Submit(
            request_id=RequestId(number),
            token_ids=prompt,
            max_new_tokens=None,
            sampling=SamplingParams(),
            matcher=NumberMatcher(),
        ),
        now,
    )


def finish(tap: Recording, number: int, now: float = 0.0) -> None:
    tap.said(TokenOut(RequestId(number), 0, Sampled(5), ""), now)
    ended = Finished(
        request_id=RequestId(number),
        reason=FinishReason.LENGTH,
        text="",
        stopped_by_text=False,
        place=0,
        num_prompt_tokens=50,
        num_cached_tokens=0,
        num_computed_tokens=50,
        num_generated_tokens=1,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
        cache=CacheReport(),
    )
    tap.said(ended, now)


def test_a_recording_until_the_server_stops(tried: Tried) -> None:
    """Everything that ended is in it; what still ran is counted as lost."""
    with tried.recording() as tap:
        for number in range(1, 11):
            begin(tap, number)
            finish(tap, number)
        begin(tap, 11)
    assert len(tried.scenario.requests) == 10
    end = tried.end
    assert (end.why, end.num_requests, end.num_lost) == (RecordingEnd.STOPPED, 10, 1)
    assert end.num_bytes == tried.path.stat().st_size


def test_the_file_is_never_larger_than_its_limit(tried: Tried) -> None:
    """The last line that fits is the last."""
    with tried.recording(RecordLimits(max_bytes=2000, max_s=60.0)) as tap:
        for number in range(1, 100):
            begin(tap, number)
            finish(tap, number)
    assert tried.path.stat().st_size <= 2000
    assert 0 < len(tried.scenario.requests) < 99
    assert tried.end.why is RecordingEnd.SIZE


def test_after_its_time_only_ends_are_recorded(tried: Tried) -> None:
    """A request that came in time is in the recording, however long it goes on."""
    with tried.recording(RecordLimits(max_bytes=1 << 20, max_s=10.0)) as tap:
        begin(tap, 1, 9.0)
        begin(tap, 2, 11.0)
        finish(tap, 2, 12.0)
        finish(tap, 1, 20.0)
    assert [each.log_id for each in tried.scenario.requests] == [1]
    assert tried.end.why is RecordingEnd.TIME


def test_more_than_can_be_compared(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that grows and grows ends the recording, not the server."""
    monkeypatch.setattr(recording_module, "MAX_BACKLOG", -1)
    with tried.recording() as tap:
        begin(tap, 1)
        finish(tap, 1)
    assert tried.end.why is RecordingEnd.BEHIND
    assert tried.scenario.requests == ()


class FullDisk(io.RawIOBase):
    """Takes some bytes, then no more; what was written of a line is there."""

    def __init__(self, path: Path, room: int) -> None:
        self._file, self._room = path.open("wb", buffering=0), room

    def write(self, data: Any) -> int:
        if self._room <= 0:
            raise OSError(28, "No space left on device")
        written = self._file.write(bytes(data)[: self._room])
        self._room -= written
        return written

    def truncate(self, size: int | None = None) -> int:
        return self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


def test_a_full_disk_leaves_a_valid_file(tried: Tried) -> None:
    """The half line is taken away, and nobody but the log hears of it."""
    with tried.recording(file=FullDisk(tried.path, 700)) as tap:
        for number in range(1, 20):
            begin(tap, number)
            finish(tap, number)
    assert tried.scenario.requests
    end = tried.end
    assert (end.why, end.error) == (RecordingEnd.FILE, OSError)


@pytest.mark.parametrize(
    ("text", "max_bytes", "max_s"),
    [
        ("16MiB", 16 << 20, 3600.0),
        ("90s", 256 << 20, 90.0),
        ("30m, 1.5MiB", 3 << 19, 1800.0),
        ("2h", 256 << 20, 7200.0),
    ],
)
def test_limits_as_words(text: str, max_bytes: int, max_s: float) -> None:
    """A size, a time, or both; what is not given is as it was."""
    assert read_limits(text) == RecordLimits(max_bytes=max_bytes, max_s=max_s)


@pytest.mark.parametrize("text", ["", "5", "5 GB", "0s", "-1h", "1h,", "nan s"])
def test_words_that_are_no_limit(text: str) -> None:
    """One line says how it should look."""
    with pytest.raises(ConfigError, match=r"--record-limit .*: not like 256MiB"):
        check_record(RecordSettings(record_limit=text))


def test_places_where_nothing_can_be_recorded(tmp_path: Path) -> None:
    """A file that is there is not overwritten, and there has to be a folder."""
    taken = tmp_path / "taken"
    taken.write_text("something")
    for path in (taken, tmp_path / "no" / "folder"):
        with pytest.raises(ConfigError, match="--record"):
            check_record(RecordSettings(record=path))


async def test_a_named_pipe_that_nobody_reads(tmp_path: Path) -> None:
    """It is refused; the start does not wait for a reader."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    log = Log(io.BytesIO(), Clock(monotonic_ns=lambda: 0, wall_s=lambda: 0.0))
    recorded = Recorded(max_context=64, num_places=1, purposes=(), log_key=b"key")
    with (
        pytest.raises(ConfigError, match="--record"),
        recording(RecordSettings(record=path), recorded, log),
    ):
        pass


async def test_nothing_of_a_user_is_recorded(
    autojump_clock: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Chats, texts and prompts of tokens, with names, stops and sessions, whole and left early:
    the file, readable by its owner alone, and the line at the start hold none of it."""
    path, out = tmp_path / "recording.jsonl", io.BytesIO()
    log = Log(out, Clock(monotonic_ns=lambda: 0, wall_s=lambda: 0.0))
    recorded = Recorded(max_context=4096, num_places=4, purposes=("chat",), log_key=b"key")
    old = os.umask(0)
    try:
        with recording(RecordSettings(record=path), recorded, log) as tap:
            sim = SimSettings(max_context=4096, tap=tap, is_paranoid=False)
            async with serving(sim=sim) as server:
                for target in GENERATING:
                    for stream in (False, True):
                        body = full_body(stream=stream, kvtrio={"session": CANARY})
                        reply = await server.post(target, body, headers=HEADERS)
                        assert reply.status == 200
                raw = json.dumps(full_body(stream=True, max_tokens=500)).encode()
                call = Call(target=CHAT, method="POST", body=raw, headers=HEADERS)
                await server.call(evolve(call, hang_up_after_s=0.5))
                await trio.sleep(60)
    finally:
        os.umask(old)
    captured = capfd.readouterr()
    assert "recording to" in captured.err
    assert_clean(path.read_text() + captured.err + captured.out + out.getvalue().decode())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    requests = read_scenario(path).requests
    assert len(requests) == 7
    assert [each.left_s is not None for each in requests] == [False] * 6 + [True]
    assert requests[0].is_named
