"""``kvtrio serve --quantize``: what is loaded, and what its state is known by."""

from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from harness.cpu_models import cpu_settings, load_cpu
from harness.torch_models import Driver, greedy, random_prompt
from kvtrio.cli.prepare import Prepared, prepare
from kvtrio.config import HttpOptions, LogSettings, ModelSettings, SchedulingSettings, ServeConfig

pytestmark = pytest.mark.slow


def prepared(path: Path, stack: ExitStack, quantize: str | None) -> Prepared:
    config = ServeConfig(
        name=str(path),
        model=ModelSettings(ctx_size=256, quantize=quantize),  # type: ignore[arg-type]
        http=HttpOptions(port=0),
        scheduling=SchedulingSettings(),
        logs=LogSettings(),
    )
    return prepare(config, stack)


def test_the_quantised_model_is_served(shared: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """It gives the ids of llama.cpp's file of that type, is known by another digest than its
    source, and is in the cache folder; without one it is the same, and one line says so."""
    models, cache = shared / "tiny" / "models", tmp_path / "cache"
    monkeypatch.setenv("KVTRIO_CACHE", str(cache))
    prompt = random_prompt(Random(5), 60, 2048)
    theirs = greedy(Driver(load_cpu(models / "llama256-q8_0.gguf")), 0, prompt, 12)
    with ExitStack() as stack:
        plain = prepared(models / "llama256.gguf", stack, None)
        made = prepared(models / "llama256.gguf", stack, "q8_0")
        assert capsys.readouterr().err == ""
        assert len(list(cache.glob("quantised/*.safetensors"))) == 1
        cache.rename(tmp_path / "gone")
        cache.write_bytes(b"no folder")
        again = prepared(models / "llama256.gguf", stack, "q8_0")
        assert capsys.readouterr().err.startswith("kvtrio: --quantize: nothing is kept")
        assert made.weights == again.weights != plain.weights
        for each in (made, again):
            assert each.served.ftype == "Q8_0"
            backend = each.backend.backend.load(each.file, each.spec, cpu_settings())
            assert greedy(Driver(backend), 0, prompt, 12) == theirs
            backend.close()
