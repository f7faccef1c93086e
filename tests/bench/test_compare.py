"""Whole comparisons, of servers in processes of their own."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from harness import fake_server
from harness.process import command
from kvtrio.bench import compare as module
from kvtrio.bench import processes
from kvtrio.bench.compare import Comparison, Plan, compare
from kvtrio.bench.errors import BenchError
from kvtrio.bench.load import Load
from kvtrio.bench.measures import Sizes, measures
from kvtrio.bench.processes import ServerProcess
from kvtrio.bench.servers import Target, open_server
from kvtrio.bench.table import plain_data, ratio, table
from kvtrio.cli import main

pytestmark = pytest.mark.slow

SIZES = Sizes(
    prefills=(64, 128), answer=16, context=64, context_answer=16, streams=(3,), conversation=32
)


def fake(how: str = "") -> str:
    return shlex.join([sys.executable, fake_server.__file__, "{port}", *([how] if how else [])])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServerProcess]]:
    """The servers that were started; without the pauses between measurements."""
    servers: list[ServerProcess] = []
    start = ServerProcess.start

    def remember(command: str) -> ServerProcess:
        servers.append(start(command))
        return servers[-1]

    monkeypatch.setattr(ServerProcess, "start", remember)
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    yield servers
    assert [pid for server in servers for pid in server.members()] == []


def plan(a: str, b: str, **changes: Any) -> Plan:
    simple = Plan(
        targets=(Target("A", a), Target("B", b)),
        measures=measures(SIZES),
        rounds=1,
        patience_s=60,
        progress=lambda _: None,
    )
    return evolve(simple, **changes)


def values(comparison: Comparison) -> dict[str, tuple[int, int]]:
    """How many values each row has, by server."""
    return {row.name: (len(row.values[0]), len(row.values[1])) for row in comparison.rows}


async def test_everything_is_measured_in_turn(started: list[ServerProcess]) -> None:
    """Each round has one value of each server for each row, A before B."""
    said: list[str] = []
    wanted = plan(fake(), fake(), rounds=2, progress=said.append)
    comparison = await compare(wanted)
    counts = values(comparison)
    assert counts.pop(module.END_MEMORY) == (1, 1)
    assert len(counts) == 2 + len(wanted.measures)
    assert set(counts.values()) == {(2, 2)}
    assert [line[-1] for line in said] == list("AB" * (len(said) // 2))
    assert comparison.versions == ("fake 1", "fake 1")
    assert len(started) == 4


async def test_a_cell_that_is_refused_stays_empty(started: list[ServerProcess]) -> None:
    """A server that cannot take a prompt is measured for the rest, and a line says what is
    missing."""
    wanted = plan(fake(), fake("refuse"))
    comparison = await compare(wanted)
    assert values(comparison)["prefill 128"] == (1, 0)
    assert values(comparison)["prefill 64"] == (1, 1)
    assert comparison.notes[0] == "B has no prefill 128: status 400"
    (line,) = (x for x in table(comparison, ("A", "B")).splitlines() if "prefill 128" in x)
    assert [cell.strip() for cell in line.split("|")][3:5] == ["-", "-"]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("crash", "ended with code 1; its output ends: no such model"),
        ("die", "ended with code 3"),
    ],
)
async def test_a_server_that_ends_is_an_error(
    started: list[ServerProcess], how: str, says: str
) -> None:
    """Its last words are told, and the other server is stopped too."""
    with pytest.raises(BenchError, match=says):
        await compare(plan(fake(), fake(how)))
    assert len(started) == 2


async def test_a_server_that_never_answers_is_given_up(started: list[ServerProcess]) -> None:
    """After the time that a start may take."""
    with pytest.raises(BenchError, match=r"A gave no answer within 0\.5 s"):
        await compare(plan(fake("silent"), fake(), patience_s=0.5))


@pytest.mark.parametrize("how", ["stubborn", "child"])
async def test_nothing_of_a_server_stays(
    started: list[ServerProcess], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Not one that ignores SIGTERM, and not what a server has started in another process group."""
    monkeypatch.setattr(processes, "PATIENCE_S", 0.2)
    await compare(plan(fake(how), fake(), measures=()))
    assert len(started) == 2


@pytest.fixture
def busy_pid() -> Iterator[int]:
    """A process that computes all the time."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process.pid
        process.kill()


async def test_work_of_others_is_told(started: list[ServerProcess], busy_pid: int) -> None:
    """What a process uses that is not measured is others' work; what is measured is not."""
    before = Load.of(())
    comparison = await compare(plan(fake(), fake()))
    without, with_it = Load.of(()), Load.of((busy_pid,))
    assert re.search(r"Others took \d+% of the processors", comparison.notes[-1])
    assert before is not None
    assert without is not None
    assert with_it is not None
    assert with_it.others_since(before) < without.others_since(before)


async def test_memory_counts_all_processes(started: list[ServerProcess]) -> None:
    """A server with a child has more than the same one without."""
    comparison = await compare(plan(fake("child"), fake(), measures=()))
    row = next(row for row in comparison.rows if row.name == module.END_MEMORY)
    with_child, alone = (values[0] for values in row.values)
    assert with_child > alone + 4


async def test_a_running_server_is_measured_by_its_url(started: list[ServerProcess]) -> None:
    """It is neither started nor stopped, and its memory is not known."""
    server = await open_server(Target("B", fake()), 60)
    assert server.process is not None
    try:
        comparison = await compare(plan(fake(), f"http://127.0.0.1:{server.process.port}"))
        server.process.check()
    finally:
        await server.stop()
    assert values(comparison)["decode"] == (1, 1)
    assert values(comparison)[module.END_MEMORY] == (1, 0)
    assert values(comparison)[module.READY] == (1, 0)


async def test_better_is_more_tokens_or_less_time(started: list[ServerProcess]) -> None:
    """A ratio above one always speaks for A; programs get every value."""
    wanted = plan(fake(), fake())
    comparison = await compare(wanted)
    rows = {row.name: row for row in comparison.rows}
    rate, time = rows["decode"], rows[module.READY]
    assert ratio(rate) == pytest.approx(rate.values[0][0] / rate.values[1][0])
    assert ratio(time) == pytest.approx(time.values[1][0] / time.values[0][0])
    data = json.loads(json.dumps(plain_data(comparison, wanted)))
    assert [row["A"] for row in data["rows"]] == [row.values[0] for row in comparison.rows]
    assert data["servers"]["B"] == {"given": fake(), "version": "fake 1"}


@pytest.mark.parametrize(
    ("a", "says"),
    [
        ("llama-server -m x", "A is neither a URL nor a command with {port}"),
        ("/no/such/server {port}", "cannot run"),
        ("'unclosed {port}", "cannot run"),
        ("https://127.0.0.1:1", "does not look like"),
        ("http://127.0.0.1:1", "A: no server at http://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    a: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2, and the line says what is wrong."""
    assert main(["bench", a, fake()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_servers_too(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, a kill or a closed terminal: exit code 130, and no server is left."""
    mark = tmp_path / "here"
    waiting = f"sh -c 'touch {mark}; exec {fake('silent')}'"
    bench = subprocess.Popen(command("bench", waiting, fake()), start_new_session=True)
    with bench:
        try:
            while not mark.exists():
                assert bench.poll() is None
            children = server_sessions(bench.pid)
            os.kill(bench.pid, number)
            assert bench.wait(60) == 130
        finally:
            bench.kill()
    assert len(children) == 1
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def server_sessions(parent: int) -> list[int]:
    """Children of ``parent``."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii")
    return [int(word) for word in text.split()]


@pytest.mark.models
def test_two_servers_from_the_command_line(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kvtrio bench`` of kvtrio itself, without a model's arithmetic: a full table."""
    serve = shlex.join(command("serve", str(smollm2), "--backend", "sim", "-np", "16"))
    path = tmp_path / "all.json"
    given = f"{serve} --port {{port}}"
    assert main(["bench", given, given, "--quick", "--rounds", "1", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    data = json.loads(path.read_bytes())
    assert len(data["rows"]) == 10
    for row in data["rows"]:
        assert row["name"] in printed
        # So fast a server may have sent all tokens in one piece: no rate, and a note that says so.
        excused = any(f"has no {row['name']}" in note for note in data["notes"])
        assert excused if row["ratio"] is None else row["ratio"] > 0
