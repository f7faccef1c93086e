"""``kvtrio serve --dry-run``: whether it would fit, without a port, a file or the memory."""

import json
import socket
from pathlib import Path

import pytest

from harness.cpu_models import require_kernels
from kvtrio.cli import exits
from kvtrio.cli.app import main

pytestmark = pytest.mark.slow


def dry(*arguments: object) -> int:
    return main(["serve", "--dry-run", *map(str, arguments)])


def test_what_fits(shared: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """The same sums as ``inspect``; the port may be in use, and nothing is made in any folder."""
    require_kernels()
    models, cache = shared / "tiny" / "models", tmp_path / "cache"
    monkeypatch.setenv("KVTRIO_CACHE", str(cache))
    sizes = ["-np", "3", "-c", "512"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [*sizes, "--port", taken.getsockname()[1], "--cache-ram", 0, "--json"]
        files = ["--cache-disk", tmp_path / "disk", "--log-file", tmp_path / "log"]
        adapter = ["--lora", models / "lora-qwen35.gguf"]
        assert dry(models / "qwen35.gguf", *flags, *files, *adapter) == exits.OK
    rows = json.loads(capsys.readouterr().out)
    assert (rows["backend"], rows["places"], rows["tokens per place"]) == ("cpu", 3, 512)
    assert (rows["adapters"], rows["fits"]) == (1, True)
    assert main(["inspect", str(models / "qwen35.gguf"), *sizes, "--json"]) == exits.OK
    shown = json.loads(capsys.readouterr().out)["memory, MiB for 3 places of 512 tokens"]
    assert shown["sum"] == rows["memory, MiB"]["sum"]
    assert shown["state"] == rows["memory, MiB"]["state of those that run"]
    assert dry(models / "llama256.gguf", "--quantize", "q8_0", "--json") == exits.OK
    quantised = json.loads(capsys.readouterr().out)["memory, MiB"]["weights"]
    assert dry(models / "llama256.gguf", "--json") == exits.OK
    assert quantised < json.loads(capsys.readouterr().out)["memory, MiB"]["weights"] / 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-np", "2000000", "-b", "2000000"], "not enough memory: weights"),
        (["-c", "1000000"], "made for at most"),
        (["--lora", "lora-qwen35.gguf"], "."),
        (["--batch-size", "1"], "less than --parallel"),
        (["--cache-ram", "100000000"], "--cache-ram 100,000,000 MiB"),
        (["--quantize", "q4_0", "-m", "llama256-q8_0.gguf"], "no matrix of it"),
        (["--record-limit", "1e3s"], "--record-limit"),
    ],
)
def test_what_does_not(shared: Path, monkeypatch, capsys, flags, says) -> None:
    """One line says what, and the exit code is 2."""
    monkeypatch.chdir(shared / "tiny" / "models")
    assert dry(*([] if "-m" in flags else ["gemma3.gguf"]), *flags) == exits.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvtrio: ")
    assert says in line


def test_a_backend_that_does_not_say(shared: Path, capsys) -> None:
    """It is not called fitting."""
    model = shared / "tiny" / "models" / "llama3.gguf"
    assert dry(model, "--backend", "sim", "--json") == exits.OK
    assert json.loads(capsys.readouterr().out)["fits"] == "not known before it loads"


def test_json_is_for_dry_runs(capsys) -> None:
    """Nobody waits for JSON from a server that starts instead."""
    assert main(["serve", "--json"]) == exits.USAGE
    assert "--dry-run" in capsys.readouterr().err
