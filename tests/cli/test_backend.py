"""Which backend computes when nobody, or somebody, says so."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import evolve

from harness.native import library
from kvtrio.backends.cpu_backend import CpuBackend
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.cli import backend as choice
from kvtrio.cli import exits, main
from kvtrio.cli.backend import backend_settings, choose_backend, proportions
from kvtrio.config import (
    ConfigError,
    HttpOptions,
    LogSettings,
    ModelSettings,
    SchedulingSettings,
    ServeConfig,
)
from kvtrio.kernels.cpu_library import LibraryMissing, LibraryStale


@pytest.fixture
def has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are built here or not."""
    monkeypatch.setattr(choice, "load_library", lambda: None)


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(choice, "load_library", fail)


@pytest.mark.parametrize("backend", ["cpu", "torch", "sim"])
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"gpu_memory_fraction": 0.5}, "--gpu-memory-fraction is for backend cuda"),
        ({"tensor_split": "1,1"}, "--tensor-split is for backend cuda"),
        ({"cuda_graphs": False}, "--cuda-graphs is for backend cuda"),
    ],
)
def test_backends_without_gpus_of_their_own_refuse_what_shares_them_out(
    has_kernels: None, backend: str, flags: dict[str, str], reason: str
) -> None:
    """One line says whose flag it is."""
    with pytest.raises(ConfigError, match=reason):
        choose_backend(ModelSettings(backend=backend, **flags))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "1,", "0,1", "-1,2", "nan", "inf,1", "a"])
def test_proportions_of_gpus_are_positive_numbers(text: str) -> None:
    """All else is refused, without an echo."""
    with pytest.raises(ConfigError, match="expected positive numbers"):
        proportions(text)


def test_proportions_of_gpus_reach_the_backend() -> None:
    """As numbers; and nine tenths of a GPU's memory where nobody says."""
    model = ModelSettings(backend="cuda", tensor_split="3, 1")
    config = ServeConfig(
        name=None,
        model=model,
        http=HttpOptions(),
        scheduling=SchedulingSettings(),
        logs=LogSettings(),
    )
    settings = backend_settings(config, 100, adapter_bytes=7)
    assert (settings.tensor_split, settings.gpu_memory_fraction) == ((3.0, 1.0), 0.9)
    assert (settings.adapter_bytes, settings.adapters_may_come) == (7, False)
    assert settings.graphs
    bare = evolve(config, model=evolve(model, cuda_graphs=False))
    assert not backend_settings(bare, 100).graphs


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, CpuBackend),
        ({"cache_type_k": "q8_0"}, CpuBackend),
        ({"backend": "cpu"}, CpuBackend),
        ({"backend": "torch"}, TorchBackend),
        ({"dtype": "f32"}, TorchBackend),
        ({"dtype": "bf16"}, TorchBackend),
        ({"device": "cuda"}, TorchBackend),
        ({"backend": "torch", "dtype": "f32"}, TorchBackend),
    ],
)
def test_the_kernels_compute_unless_something_else_is_asked_for(
    has_kernels: None, flags: dict[str, str], expected: type
) -> None:
    """A type of arithmetic, or another device, means the reference."""
    chosen = choose_backend(ModelSettings(**flags))  # type: ignore[arg-type]
    assert (chosen.backend, chosen.warning) == (expected, None)


def test_without_kernels_the_reference_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user is told once, with the reason, and only if nothing else was asked for."""
    failing(monkeypatch, LibraryMissing("no kernels"))
    chosen = choose_backend(ModelSettings())
    assert chosen.backend is TorchBackend
    assert "no kernels" in (chosen.warning or "")
    assert choose_backend(ModelSettings(dtype="f32")).warning is None


def test_kernels_that_cannot_be_used_are_no_reason_for_a_slow_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stale library, or one that was asked for, is told and ends the start."""
    failing(monkeypatch, LibraryStale("older than its sources"))
    with pytest.raises(ConfigError, match="older than its sources"):
        choose_backend(ModelSettings())
    assert choose_backend(ModelSettings(backend="torch")).backend is TorchBackend


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--backend", "cpu", "--dtype", "f32"], "--dtype"),
        (["--backend", "torch", "-ctk", "q8_0"], "--cache-type-k"),
        (["--dtype", "f32", "-ctv", "f16"], "--cache-type-k"),
        (["-ctk", "q5_1"], "q5_1"),
        (["--cache-type-v", "int8"], "int8"),
    ],
)
def test_flags_that_do_not_go_together(
    arguments: Sequence[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and one line that names the flag."""
    assert main(["serve", "--port", "0", *arguments]) == exits.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvtrio: ")
    assert reason in line


def test_flags_reach_the_backend() -> None:
    """Types, threads and the limits of a step; where nothing is said, the defaults."""
    model = ModelSettings(cache_type_k="q8_0", threads=3)
    config = ServeConfig(
        name=None,
        model=model,
        http=HttpOptions(),
        scheduling=SchedulingSettings(parallel=5, batch_size=64),
        logs=LogSettings(),
    )
    settings = backend_settings(config, 100)
    assert (settings.key_type, settings.value_type, settings.dtype) == ("q8_0", "f16", "bf16")
    assert (settings.num_threads, settings.max_rows, settings.max_sampled) == (3, 64, 5)


SERVE_ONCE = """
import json, os, signal, sys, threading, urllib.request
from kvtrio.cli import main

model, log = sys.argv[1:]
os.mkfifo(log)

def use():
    with open(log) as lines:
        port = next(e["port"] for e in map(json.loads, lines) if e["event"] == "server.start")
        body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        assert json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"] == 3
        os.kill(os.getpid(), signal.SIGTERM)
        lines.read()

thread = threading.Thread(target=use)
thread.start()
code = main(["serve", model, "--port", "0", "-c", "128", "--log-file", log])
thread.join()
print(code, sorted({"torch", "kvtrio.backends.cpu_backend"} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_serving_with_the_kernels_imports_no_torch(shared: Path, tmp_path: Path) -> None:
    """After a request was answered, torch is not among the modules of the process."""
    library("portable")
    model = shared / "tiny" / "models" / "qwen3.gguf"
    answer = subprocess.run(
        [sys.executable, "-P", "-c", SERVE_ONCE, str(model), str(tmp_path / "log")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert answer.stdout.splitlines()[-1] == "0 ['kvtrio.backends.cpu_backend']", answer.stderr
