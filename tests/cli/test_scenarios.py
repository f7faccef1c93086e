"""``kvtrio scenario`` and ``kvtrio replay``, from the command line."""

from pathlib import Path

import pytest

from harness.source_tree import ROOT
from kvtrio.cli import main
from kvtrio.replay.incidents import INCIDENTS
from kvtrio.replay.scenario_file import read_scenario

Capture = pytest.CaptureFixture[str]


def test_make_and_show(tmp_path: Path, capsys: Capture) -> None:
    """The same flags, the same file; what is in it is told in a few lines."""
    one, other = tmp_path / "one", tmp_path / "other"
    flags = ("--num-sessions", "5", "--num-adapters", "2", "--probe-every-s", "60", "--seed", "7")
    for path in (one, other):
        assert main(["scenario", "make", str(path), *flags]) == 0
    assert one.read_bytes() == other.read_bytes()
    assert main(["scenario", "show", str(one)]) == 0
    said = capsys.readouterr().out
    assert f"made: {len(read_scenario(one).requests)} requests, 5 sessions, 2 adapters" in said


@pytest.mark.parametrize(
    ("kind", "file", "origin"),
    [("mooncake", "mooncake-sample.jsonl", "mooncake"), ("azure", "azure-sample.csv", "azure")],
)
def test_import(tmp_path: Path, capsys: Capture, kind: str, file: str, origin: str) -> None:
    """The samples become scenarios, at a size for small models if asked."""
    out = tmp_path / "scenario"
    trace = str(ROOT / "scenarios" / file)
    assert main(["scenario", "import", kind, trace, str(out), "--shrink", "64"]) == 0
    assert main(["scenario", "show", str(out)]) == 0
    assert f"{origin}: 300 requests" in capsys.readouterr().out
    assert read_scenario(out).header.max_context < 1000


def test_incidents(tmp_path: Path, capsys: Capture) -> None:
    """All at once, or one; a name that there is not is answered with those that there are."""
    assert main(["scenario", "incident", "all", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.iterdir()} == set(INCIDENTS)
    assert main(["scenario", "incident", "none", str(tmp_path / "x")]) == 2
    assert "adapter-returns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scenario", "show", "{here}/none"], "No such file"),
        (["scenario", "show", "{wrong}"], "line 1: not the header"),
        (["scenario", "make", "{here}/x", "--again-share", "2"], "--again-share: at least 0"),
        (["scenario", "make", "{here}/x", "--max-context", "9"], "that makes no request"),
        (["scenario", "import", "azure", "{wrong}", "{here}/x"], "line 1: the columns are not"),
        (["scenario", "import", "mooncake", "{wrong}", "{here}/x", "--shrink", "3"], "shrunk"),
        (["replay", "{wrong}", "http://127.0.0.1:1"], "line 1: not the header"),
        (["replay", "{right}", "http://127.0.0.1:1"], "127.0.0.1:1 failed"),
        (["replay", "{right}", "ftp://127.0.0.1:1"], "does not look like"),
        (["replay", "{right}", "http://127.0.0.1:1", "--api-key", "a\nb"], "cannot be sent"),
        (["replay", "{right}", "http://127.0.0.1:1", "--body", "[1]"], "not a JSON object"),
        (["replay", "{right}", "http://127.0.0.1:1", "--adapter", "a0"], "not like a0=NAME"),
    ],
)
def test_what_cannot_be_done(
    tmp_path: Path, capsys: Capture, arguments: list[str], said: str
) -> None:
    """One line says why, and the exit code is 2."""
    wrong = tmp_path / "wrong"
    wrong.write_text("something else\n")
    right = ROOT / "scenarios" / "probes.jsonl"
    given = [each.format(here=tmp_path, wrong=wrong, right=right) for each in arguments]
    assert main(given) == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1
    assert not (tmp_path / "x").exists()
