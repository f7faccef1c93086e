"""Adapter files that lie: one clear line, no crash, little memory."""

import os
import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model.adapter_builder import (
    PREFIX,
    config,
    gguf_adapter,
    peft_folder,
    peft_tensors,
    random_pairs,
    safetensors_bytes,
    tiny_spec,
    with_header,
)

from kvtrio.model.adapters import load_adapter
from kvtrio.model.errors import ModelFileError
from kvtrio.model.paths import open_path
from kvtrio.model.safetensors_file import SafetensorsFile, read_safetensors
from kvtrio.model.spec import ModelSpec

LINE = re.compile(r"[ -~]{1,400}")
FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return tiny_spec(tmp_path)


def read(folder: Path, raw: bytes) -> SafetensorsFile:
    path = folder / "x.safetensors"
    path.write_bytes(raw)
    with open_path(path) as file:
        return read_safetensors(file.read(1 << 30))


def entry(
    dtype: object = "F32", shape: object = (2,), places: object = (0, 8), **more: object
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": places, **more}


BODY = bytes(8)
CASES = {
    "short": (b"\x08\0\0", "truncated"),
    "header length 2^63": (struct.pack("<Q", 1 << 63) + b"{}", "truncated"),
    "header length 2^64-1": (struct.pack("<Q", (1 << 64) - 1) + b"{}", "truncated"),
    "header past the end": (struct.pack("<Q", 3) + b"{}", "truncated"),
    "header of 17 MB": (struct.pack("<Q", 17 << 20) + bytes(17 << 20), "header has"),
    "no JSON": (with_header(b"{]"), "not a safetensors file"),
    "not an object": (with_header([1]), "not a safetensors file"),
    "pickle": (b"\x80\x02}q\0.", "truncated"),
    "zip": (b"PK\3\4" + bytes(60), "truncated"),
    "deep": (with_header(b"[" * 100_000), "not a safetensors file"),
    "twice": (with_header(b'{"a": {}, "a": {}}'), "not a safetensors file"),
    "not UTF-8": (with_header(b'{"\xff": {}}'), "not a safetensors file"),
    "NaN": (with_header(b'{"a": NaN}'), "not a safetensors file"),
    "10^5 digits": (with_header(b'{"a": ' + b"9" * 100_000 + b"}"), "not a safetensors file"),
    "many": (with_header({f"t{i}": 0 for i in range(65537)}), "claims 65537 tensors"),
    "no entry": (with_header({"a": 5}), "unknown type"),
    "unknown type": (with_header({"a": entry("F33")}, BODY), "unknown type"),
    "type no text": (with_header({"a": entry([])}, BODY), "unknown type"),
    "negative": (with_header({"a": entry(shape=(-2,))}, BODY), "impossible shape"),
    "fraction": (with_header({"a": entry(shape=(2.0,))}, BODY), "impossible shape"),
    "bool": (with_header({"a": entry(shape=(True, 2))}, BODY), "impossible shape"),
    "many axes": (with_header({"a": entry(shape=(1,) * 9)}, BODY), "impossible shape"),
    "wraps to 8 bytes": (
        with_header({"a": entry(shape=((1 << 61) + 1, 2), places=(0, 8))}, BODY),
        "do not fit",
    ),
    "product overflows": (with_header({"a": entry(shape=(1 << 61,) * 8)}, BODY), "do not fit"),
    "descending": (with_header({"a": entry(places=(8, 0))}, BODY), "do not fit"),
    "one offset": (with_header({"a": entry(places=(8,))}, BODY), "do not fit"),
    "past the end": (with_header({"a": entry(places=(8, 16))}, BODY), "hole or overlaps"),
    "overlap": (with_header({"a": entry(), "b": entry(places=(4, 12))}, bytes(12)), "overlaps"),
    "same bytes": (with_header({"a": entry(), "b": entry()}, BODY), "overlaps"),
    "hole": (with_header({"a": entry(), "b": entry(places=(12, 20))}, bytes(20)), "hole"),
    "rest": (with_header({"a": entry()}, bytes(9)), "do not fill"),
    "one byte less": (with_header({"a": entry()}, bytes(7)), "do not fill"),
    "long name": (with_header({"x" * 513: entry()}, BODY), "name has 513"),
    "empty name": (with_header({"": entry()}, BODY), "name has 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_lying_headers_are_refused(tmp_path, case):
    """Sizes are compared with the file before use; every refusal is one printable line."""
    raw, message = CASES[case]
    with pytest.raises(ModelFileError, match=message) as caught:
        read(tmp_path, raw)
    assert LINE.fullmatch(str(caught.value))


def test_a_good_header_is_read(tmp_path):
    """Order in the header is not order in the file, and empty tensors take no room."""
    header = {"b": entry(places=(8, 16)), "__metadata__": {"x": "y"}, "e": entry(shape=(0, 3))}
    header |= {"a": entry(shape=(2, 1)), "e": entry(shape=(0, 3), places=(0, 0))}
    file = read(tmp_path, with_header(header, struct.pack("<4f", 1, 2, 3, 4)))
    assert file.values("a").tolist() == [[1], [2]]
    assert file.values("b").tolist() == [3, 4]
    assert file.values("e").shape == (0, 3)


def test_rank_zero_is_refused(tmp_path, spec):
    """Empty halves would load as an adapter that does nothing."""
    module = f"{PREFIX}model.layers.0.mlp.up_proj"
    halves = {"A": np.zeros((0, 8), np.float32), "B": np.zeros((12, 0), np.float32)}
    tensors = {f"{module}.lora_{side}.weight": half for side, half in halves.items()}
    with pytest.raises(ModelFileError, match="rank 0"):
        load_adapter(peft_folder(tmp_path / "peft", tensors, config()), spec)


def test_lies_cost_no_memory(tmp_path):
    """What a header claims is never allocated."""
    raw = with_header({"a": entry(shape=(1 << 40,), places=(0, 1 << 42))}, BODY)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError):
            read(tmp_path, raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_patterns_cannot_take_for_ever(tmp_path, spec):
    """The expression that backtracks most among the accepted ones still ends at once."""
    tensors = peft_tensors(random_pairs(spec), spec)
    folder = peft_folder(
        tmp_path / "peft", tensors, config(alpha_pattern={f".*.*{'a' * i}!": 1 for i in range(9)})
    )
    with pytest.raises(ModelFileError, match="alpha_pattern"):
        load_adapter(folder, spec)
    patterns = {f".*.*{'a' * i}x": 1 for i in range(200)}
    folder = peft_folder(tmp_path / "peft", tensors, config(alpha_pattern=patterns))
    assert len(load_adapter(folder, spec).targets) == 15


def test_special_files_do_not_hang(tmp_path, spec):
    """A named pipe in place of a file is refused without waiting for a writer."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="not a regular file"):
        load_adapter(tmp_path / "pipe", spec)
    folder = peft_folder(tmp_path / "peft", {}, config())
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    with pytest.raises(ModelFileError, match="not a regular file"):
        load_adapter(folder, spec)


def broken(raw: bytes, data: st.DataObject) -> bytes:
    """A few bytes changed, or an end cut off."""
    if data.draw(st.booleans()):
        return raw[: data.draw(st.integers(0, len(raw) - 1))]
    changed = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(raw), 4000) - 1))
        changed[place] = data.draw(st.integers(0, 255))
    return bytes(changed)


def is_clear(path: Path, spec: ModelSpec) -> bool:
    """Whether loading gives an adapter or one clear line."""
    try:
        return len(load_adapter(path, spec).targets) > 0
    except ModelFileError as error:
        return LINE.fullmatch(str(error)) is not None


@pytest.mark.slow
@FUZZ
@given(data=st.data())
def test_damaged_safetensors_never_crash(tmp_path, spec, data):
    """Any damage gives a good adapter or one clear line."""
    folder = peft_folder(tmp_path / "peft", {}, config())
    raw = broken(safetensors_bytes(peft_tensors(random_pairs(spec), spec)), data)
    (folder / "adapter_model.safetensors").write_bytes(raw)
    assert is_clear(folder, spec)


@pytest.mark.slow
@FUZZ
@given(data=st.data())
def test_damaged_gguf_adapters_never_crash(tmp_path, spec, data):
    """Any damage gives a good adapter or one clear line."""
    path = tmp_path / "adapter.gguf"
    path.write_bytes(broken(gguf_adapter(random_pairs(spec)), data))
    assert is_clear(path, spec)
