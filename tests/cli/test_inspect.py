"""``kvtrio inspect``: what files are, and why others are refused."""

import json
from pathlib import Path

import pytest

from kvtrio.cli.app import main

PEFT = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}


def inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    rows: dict[str, object] = json.loads(capsys.readouterr().out)
    return rows


def test_a_hybrid_model(shared: Path, capsys):
    """Kinds of layers, types, state of each kind, and what serving would take."""
    path = shared / "tiny" / "models" / "qwen35.gguf"
    rows = inspected(capsys, path, "-np", 2, "-c", 160)
    assert (rows["architecture"], rows["layers"]) == ("qwen35", 8)
    assert rows["of them"] == {"DeltaNet": 6, "Attention": 2}
    # float32: 4 x 16 x 16 and 3 x 128 per delta net; f16: 2 layers of 2 heads of 32, K and V.
    assert rows["state, bytes for"] == {"a checkpoint": 6 * 4 * (1024 + 384), "a token": 512}
    assert rows["conversations resume"] == "at checkpoints"
    assert rows["memory, MiB for 2 places of 160 tokens"]["weights"] == 3.4


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
