"""Fixtures for the tests of the HTTP layer."""

from pathlib import Path

import pytest
from model.adapter_builder import config, gguf_adapter, peft_folder, peft_tensors, random_pairs
from trio.testing import MockClock

from harness.serving import served_model


@pytest.fixture
def ticking_clock() -> MockClock:
    """A mock clock at the pace of the real one: the sim stack beside real sockets."""
    return MockClock(rate=1.0)


@pytest.fixture
def lora_dir(tmp_path: Path) -> Path:
    """A folder of adapters: a.gguf, b.gguf, the PEFT folder p, and odd ones."""
    spec, folder = served_model().spec, tmp_path / "adapters"
    folder.mkdir()
    for seed, name in enumerate(("a", "b")):
        pairs = random_pairs(spec, seed=seed)
        (folder / f"{name}.gguf").write_bytes(gguf_adapter(pairs))
    peft_folder(folder / "p", peft_tensors(random_pairs(spec, seed=2), spec), config())
    stray = {**random_pairs(spec), "blk.7.attn_q.weight": random_pairs(spec)["output.weight"]}
    (folder / "stray.gguf").write_bytes(gguf_adapter(stray))
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "sub").mkdir()
    (folder / "sub" / "c.gguf").write_bytes(gguf_adapter(random_pairs(spec, seed=3)))
    (tmp_path / "outside.gguf").write_bytes(gguf_adapter(random_pairs(spec, seed=4)))
    (folder / "link.gguf").symlink_to(tmp_path / "outside.gguf")
    return folder
