"""A server that records, and a replay of what it recorded, as processes do it."""

import json
import stat
from pathlib import Path

import pytest

from harness.process import running_server
from kvtrio.cli import main
from kvtrio.replay.results import End, Result, read_results
from kvtrio.replay.scenario_file import Scenario, read_scenario

pytestmark = pytest.mark.slow
MAKE = ("--num-sessions", "4", "--num-turns", "3", "--system-tokens", "40", "--user-tokens", "9")
SMALL = ("--output-tokens", "6", "--max-context", "400", "--num-adapters", "1")


def test_a_server_records_what_a_replay_sends(
    shared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The start-up line says so, the file is its owner's, it is the traffic that was sent, and the
    results say what the server decided."""
    models = shared / "tiny" / "models"
    made, recorded, results = (tmp_path / name for name in ("made", "recorded", "results"))
    assert main(["scenario", "make", str(made), *MAKE, *SMALL]) == 0
    lora = f"one={models / 'lora-llama3.gguf'}"
    flags = ("-c", "512", "-t", "1", "--lora", lora, "--record", str(recorded))
    with running_server(str(models / "llama3.gguf"), *flags) as server:
        replay = ["replay", str(made), server.url, "--pacing", "serial", "--out", str(results)]
        assert main(replay) == 0
        server.terminate()
        assert server.wait() == 0
        assert any(line.startswith(b"kvtrio: recording to") for line in server.lines)
        (end,) = server.events("record.end")
    sent, found = read_scenario(made), read_scenario(recorded)
    assert (end["why"], end["num_requests"]) == ("stopped", len(sent.requests))
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600
    assert [_shape(sent, each) for each in range(len(sent.requests))] == [
        _shape(found, each) for each in range(len(sent.requests))
    ]
    with results.open("rb") as file:
        lines = list(read_results(file))
    assert isinstance(lines[-1], End)
    assert lines[-1].is_complete
    told = [line for line in lines if isinstance(line, Result)]
    assert len(told) == len(sent.requests)
    assert sum(line.num_cached_tokens or 0 for line in told) > 100
    assert f"{len(told)} of {len(told)} requests" in capfd.readouterr().out
    assert json.loads(results.read_bytes().splitlines()[0])["server"] == "kvtrio"


def _shape(scenario: Scenario, number: int) -> tuple[int, int, int, int]:
    """Lengths, and how long a conversation has been going on."""
    request = scenario.requests[number]
    return request.prompt_tokens, request.output_tokens, request.turn, len(request.adapters)
