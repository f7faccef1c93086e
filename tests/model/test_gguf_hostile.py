"""Damaged and hostile GGUF files: one clear line, no crash, little memory."""

import os
import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model.gguf_builder import (
    Encoded,
    Tensor,
    entry,
    gguf_bytes,
    head_bytes,
    index_line,
    tensor,
    text,
    tiny_model,
)

from kvtrio.model.architectures import read_spec
from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import open_gguf

HUGE = 2**63
ONE = tensor("a", np.zeros(8))
LINE = re.compile(r"[ -~]{1,300}")


def put(name: str = "a", offset: int | None = None) -> Tensor:
    return Tensor(name, ONE.dims, ONE.kind, ONE.data, offset)


def with_dims(*dims: int) -> bytes:
    return gguf_bytes({}, [Tensor("a", dims, ONE.kind, ONE.data)])


def with_value(kind: int, data: bytes) -> bytes:
    return gguf_bytes({"some.key": Encoded(kind, data), "b": 1})


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


GOOD = tiny_model("llama")
CASES = {
    "empty": (b"", "empty"),
    "short": (b"GG", "not a GGUF file"),
    "text": (b"hello world" * 9, "not a GGUF file"),
    "zip": (b"PK\3\4" + bytes(99), "not a GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
    "ggml": (b"tjgg" + bytes(99), "from before GGUF"),
    "magic only": (b"GGUF", "truncated"),
    "version 0": (b"GGUF" + bytes(40), "GGUF version 0"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 1, 1), "GGUF version 1, which is too old"),
    "version 4": (head_bytes(0, 0, 4), "GGUF version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many entries": (head_bytes(0, HUGE) + bytes(99), "past the end"),
    "many tensors": (head_bytes(HUGE, 0) + bytes(99), "past the end"),
    "claimed entries": (head_bytes(0, 1 << 17) + bytes(14 << 17), "claims 131072 metadata"),
    "claimed tensors": (head_bytes(1 << 17, 0) + bytes(33 << 17), "claims 131072 tensors"),
    "long key": (head_bytes(0, 1) + struct.pack("<Q", HUGE) + bytes(99), "past the end"),
    "key of 64 KiB": (gguf_bytes({"k" * 65536: 1}), "a metadata key has 65536 bytes"),
    "empty key": (gguf_bytes({"": 1}), "a metadata key has 0 bytes"),
    "same key twice": (head_bytes(0, 2) + entry("k", 1) * 2, "key k appears twice"),
    "long text": (with_value(8, struct.pack("<Q", HUGE)), "some.key would go past"),
    "unknown type": (with_value(99, b"abcd"), "some.key has unknown type 99"),
    "array of arrays": (with_value(9, array(9, 1, array(4, 0))), "some.key has nested arrays"),
    "array of unknown": (with_value(9, array(77, 1)), "elements of unknown type 77"),
    "long array": (with_value(9, array(4, HUGE)), "some.key would go past"),
    "array a bit long": (with_value(9, array(12, 40)), "some.key would go past"),
    "many texts": (with_value(9, array(8, HUGE)), "some.key would go past"),
    "last text is long": (with_value(9, array(8, 1, struct.pack("<Q", HUGE))), "would go past"),
    "texts run out": (with_value(9, array(8, 2, text("x" * 60))), "truncated"),
    "alignment 0": (gguf_bytes({"general.alignment": 0}), "alignment is not a power"),
    "alignment 48": (gguf_bytes({"general.alignment": 48}), "alignment is not a power"),
    "alignment 2^31": (gguf_bytes({"general.alignment": 2**31}), "alignment is not a power"),
    "alignment text": (gguf_bytes({"general.alignment": "32"}), "alignment is not a power"),
    "alignment true": (gguf_bytes({"general.alignment": True}), "alignment is not a power"),
    "no dimensions": (with_dims(), "tensor a has 0 dimensions"),
    "five dimensions": (with_dims(8, 1, 1, 1, 1), "tensor a has 5 dimensions"),
    "dimension 0": (with_dims(0, 8), "tensor a has an impossible shape"),
    "overflowing product": (with_dims(2**32, 2**32), "tensor a goes past the end"),
    "product wraps to 32": (with_dims(2**62 + 2, 4), "tensor a goes past the end"),
    "unknown tensor type": (gguf_bytes({}, [Tensor("a", (8,), 44, bytes(32))]), "unknown type 44"),
    "removed tensor type": (gguf_bytes({}, [Tensor("a", (8,), 4, bytes(32))]), "unknown type 4"),
    "part of a block": (gguf_bytes({}, [Tensor("a", (8,), 2, bytes(32))]), "impossible shape"),
    "empty tensor name": (gguf_bytes({}, [put("")]), "a tensor name has 0 bytes"),
    "long tensor name": (gguf_bytes({}, [put("n" * 65)]), "a tensor name has 65 bytes"),
    "same tensor twice": (gguf_bytes({}, [put(), put()]), "tensor a appears twice"),
    "offset outside": (gguf_bytes({}, [put(offset=1 << 20)]), "tensor a goes past the end"),
    "offset wraps": (gguf_bytes({}, [put(offset=2**64 - 32)]), "tensor a goes past the end"),
    "offset unaligned": (gguf_bytes({}, [put(offset=4), put("b")]), "tensor a is not aligned"),
    "overlap": (gguf_bytes({}, [put(offset=0), put("b", offset=0)]), "tensor b overlaps"),
    "no weights": (head_bytes(1, 0) + index_line(ONE, 0), "tensor a goes past the end"),
}


@pytest.mark.parametrize("case", CASES)
def test_broken_files_are_refused(tmp_path, case):
    """Every lie about a number gives one line that names the file and the lie."""
    data, problem = CASES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=re.escape(problem)) as caught:
        open_gguf(path)
    assert str(caught.value).startswith("model.gguf: ")
    assert LINE.fullmatch(str(caught.value))


def test_no_such_file(tmp_path):
    """A path that leads nowhere is an error of the user, not of ours."""
    with pytest.raises(ModelFileError, match="no such file"):
        open_gguf(tmp_path / "model.gguf")


def test_directory(tmp_path):
    """A folder is not a model."""
    with pytest.raises(ModelFileError, match="a directory"):
        open_gguf(tmp_path)


def test_named_pipe(tmp_path):
    """Opening a pipe would wait for a writer for ever, so it is not opened."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="pipe: not a regular file"):
        open_gguf(tmp_path / "pipe")


def test_path_below_a_file(tmp_path):
    """A file is not a folder."""
    (tmp_path / "file").write_bytes(GOOD)
    with pytest.raises(ModelFileError, match="it cannot be read"):
        open_gguf(tmp_path / "file" / "model.gguf")


def test_path_with_a_null_byte(tmp_path):
    """What the system refuses as a name is reported like any unreadable file."""
    with pytest.raises(ModelFileError, match="it cannot be read"):
        open_gguf(tmp_path / "mo\0del.gguf")


def test_unreadable_file(tmp_path, monkeypatch):
    """No permission is said as such. (Patched, since the tests may run as root.)"""

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError

    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelFileError, match="no permission"):
        open_gguf(path)


@pytest.mark.parametrize("text", ["\x1b[31mred\x07", "a\nb", "<script>", "\udcff", "x" * 64])
def test_names_from_the_file_are_made_safe(tmp_path, text):
    """Text from a file cannot reach the terminal through an error."""
    path = tmp_path / "mo\ndel.gguf"
    for data in (
        gguf_bytes({}, [put(text), put(text)]),
        gguf_bytes({"general.architecture": text * 9}),
        gguf_bytes({"general.type": text}),
    ):
        path.write_bytes(data)
        with pytest.raises(ModelFileError) as caught, open_gguf(path) as file:
            read_spec(file)
        assert LINE.fullmatch(str(caught.value))
        assert "<" not in str(caught.value)
        assert len(str(caught.value)) < 250


def test_huge_claims_cost_no_memory(tmp_path):
    """Counts of 2^63 are refused before anything of that size is made."""
    path = tmp_path / "model.gguf"
    claims = [data for data, _ in CASES.values() if len(data) < 10_000]
    assert len(claims) > 40
    for data in claims:
        path.write_bytes(data)
        assert peak_of(path) < 100_000


def test_many_small_things_cost_a_few_times_their_size(tmp_path):
    """Texts of one letter and tensors of one number are the dearest to hold."""
    path = tmp_path / "model.gguf"
    texts = gguf_bytes({"a": ["é"] * 50_000})
    tensors = [Tensor(f"{i:x}", (1,), 0, bytes(4)) for i in range(2000)]
    for data in (texts, gguf_bytes({}, tensors), gguf_bytes({f"{i:x}": i for i in range(5000)})):
        path.write_bytes(data)
        assert peak_of(path) < 12 * len(data)


@pytest.mark.slow
def test_cut_anywhere(tmp_path):
    """A file that lacks any number of its last bytes is refused."""
    path = tmp_path / "model.gguf"
    for architecture in ("llama", "gemma3"):
        data = tiny_model(architecture)
        for size in range(len(data)):
            path.write_bytes(data[:size])
            with pytest.raises(ModelFileError):
                open_gguf(path)


def refusal(path: Path) -> str | None:
    """Open a file and read its spec; why it is refused. Nothing else may come out."""
    try:
        with open_gguf(path) as file:
            read_spec(file)
    except ModelFileError as error:
        return str(error)
    return None


def peak_of(path: Path) -> int:
    """The most memory held while a file is opened and then checked or refused."""
    tracemalloc.start()
    try:
        problem = refusal(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert problem is None or LINE.fullmatch(problem)
    return peak


def test_the_whole_file_is_good(tmp_path):
    """The files that the tests damage are fine before."""
    path = tmp_path / "model.gguf"
    for architecture in ("llama", "qwen2", "qwen3", "gemma3"):
        path.write_bytes(tiny_model(architecture))
        assert refusal(path) is None


@pytest.mark.slow
@given(
    architecture=st.sampled_from(["llama", "gemma3", "qwen2"]),
    flips=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=6),
)
@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_changed_bytes(tmp_path, architecture, flips):
    """Whatever bytes change, the file is read or refused, in memory of its own order."""
    data = bytearray(tiny_model(architecture))
    for at, value in flips:
        data[at % len(data)] = value
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert peak_of(path) < 16 * len(data)


@pytest.mark.slow
@given(
    at=st.integers(0, 1500),
    number=st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1]),
)
@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_wild_number(tmp_path, at, number):
    """Eight bytes of the header replaced by an extreme number do no harm."""
    data = bytearray(GOOD)
    data[at : at + 8] = struct.pack("<Q", number)
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert peak_of(path) < 16 * len(data)
