"""``kvtrio simulate`` and ``kvtrio calibrate`` from the command line."""

import json
from pathlib import Path

import pytest

from harness.scenarios import Traffic, random_scenario
from kvtrio.cli.app import main
from kvtrio.replay.scenario_file import write_scenario


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """A small one, in a file."""
    path, made = tmp_path / "scenario.jsonl", random_scenario(1, Traffic(num_requests=40))
    write_scenario(path, [made.header, *made.adapters, *made.requests])
    return path


def test_two_schedulers_side_by_side(scenario, tmp_path, capsys):
    """A column for each, and a log for each."""
    log = tmp_path / "sim.log"
    flags = ["--scheduler", "fair", "--scheduler", "fcfs", "--log", str(log), "-np", "2"]
    assert main(["simulate", str(scenario), *flags]) == 0
    head, requests, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["fair", "fcfs"]
    assert requests.split() == ["requests", "40", "40"]
    for name in ("fair", "fcfs"):
        path = tmp_path / f"sim-{name}.log"
        assert path.read_bytes().count(b'"request.done"') == 40
        assert path.stat().st_mode & 0o777 == 0o600


def test_sizes_of_a_server_that_ran(scenario, tmp_path, capsys):
    """Its log says how many places and how much cache it had; flags still win."""
    log = tmp_path / "server.log"
    start = {"event": "server.start", "num_places": 1, "num_host_blocks": 0, "max_context": 500}
    log.write_text(json.dumps(start, separators=(",", ":")) + "\n", encoding="ascii")
    rows = []
    for flags in ([], ["-np", "3", "--ram-tokens", "4000"]):
        given = ["simulate", str(scenario), "--like", str(log), "--json", *flags]
        assert main(given) == 0
        rows.append(json.loads(capsys.readouterr().out)["stall_free"])
    assert rows[0]["from RAM"] == 0 < rows[1]["from RAM"]
    assert rows[0]["first token, p99 s"] > rows[1]["first token, p99 s"]


def test_a_simulated_server_is_like_itself(scenario, tmp_path, capsys):
    """Its log begins with its sizes, which are enough to simulate it again."""
    log = tmp_path / "sim.log"
    assert (
        main(["simulate", str(scenario), "-np", "2", "--ram-tokens", "64", "--log", str(log)]) == 0
    )
    first = capsys.readouterr().out
    assert main(["simulate", str(scenario), "--like", str(log)]) == 0
    assert capsys.readouterr().out == first


def test_kinds_that_share_ram_are_simulated_so(scenario, tmp_path, capsys):
    """A server's log says what states and blocks share; more of it keeps more."""
    rows, sizes = [], {"num_places": 1, "max_context": 500, "bytes_per_state": 4000}
    sizes["shared_block_bytes"] = 640
    for name, num_bytes in (("little", 4000), ("much", 400_000)):
        server, again = tmp_path / f"{name}.log", tmp_path / f"{name}-again.log"
        start = {"event": "server.start", **sizes, "shared_ram_bytes": num_bytes}
        server.write_text(json.dumps(start, separators=(",", ":")) + "\n", encoding="ascii")
        for like, log in ((server, ["--log", str(again)]), (again, [])):
            assert main(["simulate", str(scenario), "--like", str(like), "--json", *log]) == 0
            rows.append(json.loads(capsys.readouterr().out)["stall_free"])
    little, little_again, much, much_again = rows
    assert (little, much) == (little_again, much_again)
    assert little["from RAM"] < much["from RAM"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "/no/such/file"], "/no/such/file: No such file"),
        (["simulate", "{file}", "--machine", "abacus"], "abacus is neither a file nor one of"),
        (["simulate", "{file}", "--scheduler", "chaos"], "no scheduler 'chaos'"),
        (["simulate", "{file}", "--like", "{file}"], "no server.start line"),
        (["simulate", "{file}", "--like", "{bad}"], "no server.start line"),
        (["simulate", "{file}", "-np", "100000000"], "-np"),
        (["simulate", "{file}", "--block-size", "100000000"], "--block-size"),
        (["simulate", "{file}", "--ram-tokens", "99999999999"], "more than 16,777,216 blocks"),
        (["simulate", "{file}", "-c", "99999999999"], "more than 16,777,216 blocks"),
        (["simulate", "{file}", "--log", "{file}"], "would be written over"),
        (["simulate", "{file}", "--log", "{link}"], "would be written over"),
        (["simulate", "{file}", "--log", "/dev/full"], "/dev/full: No space left on device"),
        (["simulate", "{file}", "--log-level", "loud"], "--log-level"),
        (["scenario", "show", "/no/such/file"], "/no/such/file: No such file"),
        (["scenario", "import", "log", "{file}", "{link}"], "would be written over"),
        (["scenario", "import", "log", "{bad}", "{out}"], "no request in it"),
        (["scenario", "import", "mooncake", "/dev/null", "{out}"], "no request in it"),
        (["replay", "{file}", "http://127.0.0.1:9", "-o", "{file}"], "would be written over"),
        (["calibrate", "{file}"], "no sched.cost line"),
        (["calibrate", "{file}", "-o", "{link}"], "would be written over"),
    ],
)
def test_what_does_not_fit_is_one_line(scenario, tmp_path, capsys, arguments, says):
    """The exit code is 2, and what was given is as it was."""
    link, bad = tmp_path / "link", tmp_path / "bad.log"
    link.symlink_to(scenario)
    bad.write_text('{"event":"server.start","block_size":0}\n', encoding="ascii")
    names, before = (
        {"file": scenario, "link": link, "bad": bad, "out": tmp_path / "out"},
        scenario.read_bytes(),
    )
    assert main([argument.format(**names) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert scenario.read_bytes() == before
    assert not Path("/dev/full").is_file()


def test_a_simulated_server_calibrates_another(scenario, tmp_path, capsys):
    """Its log has what its steps cost, which is what it was told."""
    log, machine = tmp_path / "sim.log", tmp_path / "machine.json"
    assert main(["simulate", str(scenario), "--log", str(log)]) == 0
    first = capsys.readouterr().out
    assert main(["calibrate", str(log), "-o", str(machine)]) == 0
    capsys.readouterr()
    assert main(["simulate", str(scenario), "--machine", str(machine)]) == 0
    assert capsys.readouterr().out == first
