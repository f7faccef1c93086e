"""Thousands of changed model files: each is read, or refused in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model.adapter_builder import config, peft_folder, peft_tensors, random_pairs

from harness.model_folders import make_folder
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf

NUM_CASES, SEED = 5000, 8
FOLDERS = ("llama", "gpt_oss", "deepseek_v3", "granitemoehybrid", "phi3", "gemma3_text")


def gather(shared: Path, work: Path) -> None:
    """All small models and adapters, and folders made here; one of them in several files."""
    for name in ("models", "adapters", "folders"):
        (work / name).mkdir()
    for path in (shared / "tiny" / "models").iterdir():
        is_adapter = path.stem.startswith("lora-")
        name = f"lora@{path.stem.removeprefix('lora-')}" if is_adapter else path.stem
        (work / ("adapters" if is_adapter else "models") / f"{name}.gguf").symlink_to(path)
    for kind in FOLDERS:
        (work / "folders" / kind).mkdir()
        several = {"max_shard_size": "200KB"} if kind == "phi3" else {}
        make_folder(work / "folders" / kind, kind, **several)
    with open_gguf(work / "models" / "llama3.gguf") as file:
        spec = read_spec(file)
    tensors = peft_tensors(random_pairs(spec), spec)
    peft_folder(work / "adapters" / "peft@llama3", tensors, config())


@pytest.mark.slow
def test_changed_files_are_read_or_refused_in_one_line(shared: Path, tmp_path: Path) -> None:
    """Without a crash or a warning, in a second of processor time and in memory of 1.2 times the
    file, whatever of a head is changed; in a process whose limits the system keeps."""
    gather(shared, tmp_path)
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "harness.hostile", tmp_path, str(SEED), str(NUM_CASES)],
        env=os.environ | {"PYTHONPATH": str(tests)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert report["faults"] == []
    assert sum(report["outcomes"].values()) == NUM_CASES
    assert report["outcomes"]["refused"] > NUM_CASES / 2
