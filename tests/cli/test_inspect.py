"""``kvtrio inspect``: what files are, and why others are refused."""

import json
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from attrs import evolve

from harness.cpu_models import require_kernels
from kvtrio.backends.cpu_backend import CpuBackend
from kvtrio.cli.app import main
from kvtrio.cli.backend import backend_settings
from kvtrio.cli.identity import server_identity
from kvtrio.cli.prepare import prepare
from kvtrio.config import (
    HttpOptions,
    LogSettings,
    ModelSettings,
    SchedulingSettings,
    ServeConfig,
    StateSettings,
)
from kvtrio.core.session import SavedContext, SessionHead
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf
from kvtrio.store.sessions import SessionStore

PEFT = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}


def config(model: str = "", **scheduling: int) -> ServeConfig:
    return ServeConfig(
        name=model,
        model=ModelSettings(ctx_size=160),
        http=HttpOptions(port=0),
        scheduling=SchedulingSettings(**scheduling),
        state=StateSettings(cache_ram=1),
        logs=LogSettings(),
    )


def inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    rows: dict[str, object] = json.loads(capsys.readouterr().out)
    return rows


def test_a_hybrid_model(shared: Path, capsys):
    """Kinds of layers, types, state of each kind, and what serving would take by its own sums."""
    require_kernels()
    path = shared / "tiny" / "models" / "qwen35.gguf"
    rows = inspected(capsys, path, "-np", 2, "-c", 160)
    assert (rows["architecture"], rows["layers"]) == ("qwen35", 8)
    assert rows["of them"] == {"DeltaNet": 6, "Attention": 2}
    # float32: 4 x 16 x 16 and 3 x 128 per delta net; f16: 2 layers of 2 heads of 32, K and V.
    assert rows["state, bytes for"] == {"a checkpoint": 6 * 4 * (1024 + 384), "a token": 512}
    assert rows["conversations resume"] == "at checkpoints"
    with open_gguf(path) as file:
        spec = read_spec(file)
        settings = backend_settings(config(parallel=2), 160)
        sizing = CpuBackend.sizing(file, spec, evolve(settings, host_bytes=0))
    assert rows["weights, MiB by type"] == {"F32": 3.4}
    memory, needs = rows["memory, MiB for 2 places of 160 tokens"], sizing.rooms[0].needs
    assert memory["weights"] == round(sizing.info.weight_bytes / 2**20, 1)
    assert memory["sum"] == round((needs.weights + needs.pools) / 2**20, 1)


def test_a_model_for_people(shared: Path, capsys):
    """One line each, aligned."""
    assert main(["inspect", str(shared / "tiny" / "models" / "llama-moe.gguf")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24
    assert "2 of 4 in 4 layers" in next(line for line in lines if line.startswith("experts"))


def test_an_adapter_alone_and_with_its_model(shared: Path, capsys):
    """Alone its head; with the model every matrix that it changes."""
    models = shared / "tiny" / "models"
    alone = inspected(capsys, models / "lora-llama3.gguf")
    assert (alone["adapter"], alone["architecture"]) == ("gguf", "llama")
    rows = inspected(capsys, models / "lora-llama3.gguf", "-m", models / "llama3.gguf")
    assert (rows["fits"], rows["ranks"]) == (True, [8])
    assert sum(rows["matrices"].values()) == alone["matrices"] == 28


def test_a_peft_folder(tmp_path: Path, capsys):
    """Its settings, without its weights."""
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT), encoding="utf-8")
    assert inspected(capsys, tmp_path)["alpha"] == 16


@pytest.mark.slow
def test_a_session_and_its_model(shared: Path, tmp_path: Path, capsys) -> None:
    """Whether a server would take it: the same weights, and the same types and kernels."""
    models, path = shared / "tiny" / "models", tmp_path / "session"
    with ExitStack() as stack:
        start = prepare(config(str(models / "llama3.gguf")), stack)
        backend = start.backend.backend.load(start.file, start.spec, start.backend_settings)
        stack.callback(backend.close)
        settings = start.backend_settings
        identity = server_identity(start.weights, start.spec, backend.info, settings)
    with closing(SessionStore.open(tmp_path)) as store:
        head = SessionHead(token_ids=tuple(range(20)), contexts=(SavedContext(0),))
        with store.saving("one", head, identity, b"") as writer:
            writer.add_block((b"first",))
            writer.add_block((b"second",))
            writer.commit()
    main(["session", "export", "one", str(path), "--slot-save-path", str(tmp_path)])
    capsys.readouterr()
    alone = inspected(capsys, path)
    assert (alone["tokens"], alone["fits"]) == (20, "--model tells")
    own = inspected(capsys, path, "-m", models / "llama3.gguf", "-c", 160)
    assert (own["same model"], own["same types and kernels"]) == (True, True)
    other = inspected(capsys, path, "-m", models / "qwen35.gguf")
    assert (other["same model"], other["same types and kernels"]) == (False, False)


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("nothing", [], "no such file"),
        ("text", [], "not a GGUF file"),
        ("empty-folder", [], "a folder without config.json is no model"),
        ("session", [], "no usable session"),
        ("tiny/models/lora-llama3.gguf", ["-m", "tiny/models/qwen3.gguf"], "."),
        ("tiny/models/qwen3.gguf", ["-c", "1000000000"], "made for at most"),
    ],
)
def test_what_cannot_be_used_is_one_line(shared: Path, tmp_path: Path, capsys, name, flags, says):
    """The exit code is 2."""
    (tmp_path / "text").write_bytes(b"hello, this is no model at all")
    (tmp_path / "session").write_bytes(b"kvtrio session 001 " + bytes(80))
    (tmp_path / "empty-folder").mkdir()
    root = shared if "/" in name else tmp_path
    given = [str(shared / flag) if "/" in flag else flag for flag in flags]
    assert main(["inspect", str(root / name), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
