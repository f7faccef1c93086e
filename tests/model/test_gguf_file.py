"""Opening GGUF files: what comes out of good ones, split or not."""

import itertools
from pathlib import Path

import gguf
import numpy as np
import pytest
from model.gguf_builder import (
    CODES,
    Encoded,
    Tensor,
    encode,
    gguf_bytes,
    scalar,
    tensor,
    text,
    tiny_metadata,
    tiny_model,
    tiny_tensors,
)

from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import DEQUANTISABLE, open_gguf


def write(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def write_parts(folder: Path, counts: list[dict[str, object]]) -> Path:
    """A tiny llama split over files, whose split keys are given; returns the first."""
    tensors = tiny_tensors("llama")
    size = -(-len(tensors) // len(counts))
    for i, keys in enumerate(counts):
        own = tiny_metadata("llama") if i == 0 else {}
        data = gguf_bytes(own | keys, tensors[i * size : (i + 1) * size])
        write(folder, data, f"m-{i + 1:05}-of-{len(counts):05}.gguf")
    return folder / f"m-00001-of-{len(counts):05}.gguf"


def split_keys(number: int, count: int, **more: object) -> dict[str, object]:
    base = {"split.no": scalar("H", number), "split.count": scalar("H", count)}
    return base | {"split.tensors.count": scalar("i", 11)} | more


@pytest.mark.parametrize("code", [code for code in CODES.values() if code != "?"])
def test_scalars_become_python_numbers(tmp_path, code):
    """Every numeric type is read as an int or a float of the same value."""
    path = write(tmp_path, gguf_bytes({"a.number": scalar(code, 7)}))
    with open_gguf(path) as file:
        value = file.metadata["a.number"]
    assert value == 7
    assert type(value) is (float if code in "fd" else int)


def test_texts_and_lists(tmp_path):
    """Text keeps broken bytes as surrogates, so that nothing is lost."""
    path = write(tmp_path, gguf_bytes({"a": "é\udcff", "b": ["x", "", "é\udcff"], "c": ""}))
    with open_gguf(path) as file:
        assert dict(file.metadata) == {"a": "é\udcff", "b": ["x", "", "é\udcff"], "c": ""}


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "f4", "u8", "i8", "f8", "?"])
def test_arrays_outlive_the_file(tmp_path, dtype):
    """Numeric arrays keep their type and own their memory."""
    values = np.array([0, 1, 1, 0, 1]).astype(dtype)
    path = write(tmp_path, gguf_bytes({"a": values}))
    with open_gguf(path) as file:
        array = file.metadata["a"]
    assert array.dtype == np.dtype(dtype)
    assert np.array_equal(array, values)
    assert array.flags.owndata


def test_raw_is_a_view_of_the_file(tmp_path):
    """Stored bytes come without a copy, and stay readable after close."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    file = open_gguf(
        write(tmp_path, gguf_bytes({}, [tensor("a", values), tensor("b", values + 1)]))
    )
    raw = file.raw("b")
    file.close()
    assert not raw.flags.owndata
    assert not raw.flags.writeable
    assert raw.tobytes() == (values + 1).tobytes()


def test_dequantised_values_have_memory_of_their_own(tmp_path):
    """A float32 tensor is copied too, so that the caller may write."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    with open_gguf(write(tmp_path, gguf_bytes({}, [tensor("a", values)]))) as file:
        result = file.dequantise("a")
        assert file.tensors["a"].shape == (3, 4)
    result += 1
    assert np.array_equal(result, values + 1)


def test_sizes_are_counted(tmp_path):
    """File size, weight size and number of values."""
    data = gguf_bytes({}, [tensor("a", np.zeros((3, 4))), tensor("b", np.zeros(5))])
    with open_gguf(write(tmp_path, data)) as file:
        assert file.total_bytes == len(data)
        assert file.tensor_bytes == 4 * 17
        assert file.num_parameters == 17


def test_alignment_of_the_file_is_used(tmp_path):
    """Weights start at the next multiple of general.alignment."""
    values = np.arange(3, dtype=np.float32)
    metadata = {"general.alignment": 256}
    data = gguf_bytes(metadata, [tensor("a", values), tensor("b", -values)], alignment=256)
    with open_gguf(write(tmp_path, data)) as file:
        assert np.array_equal(file.dequantise("b"), -values)


def test_version_two_is_read(tmp_path):
    """Version 2 differs from 3 in nothing that we read."""
    data = bytearray(tiny_model("llama"))
    data[4] = 2
    with open_gguf(write(tmp_path, bytes(data))) as file:
        assert len(file.tensors) == 11


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType), ids=lambda kind: kind.name)
def test_every_type_is_expanded_or_refused(tmp_path, kind):
    """The list of types with a formula is that of the gguf package."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = bytes(i % 60 for i in range(2 * size))
    path = write(tmp_path, gguf_bytes({}, [Tensor("a", (block, 2), kind.value, data)]))
    with open_gguf(path) as file:
        if kind not in DEQUANTISABLE:
            with pytest.raises(ModelFileError, match=f"type {kind.name}, which is unsupported"):
                file.dequantise("a")
            with pytest.raises(NotImplementedError):
                gguf.quants.dequantize(np.zeros((2, size), np.uint8), kind)
        else:
            values = file.dequantise("a")
            assert values.shape == (2, block)
            assert values.dtype == np.float32


def test_infinite_scales_are_no_warning(tmp_path):
    """A damaged block gives values that are not finite, and nothing else."""
    data = b"\x00\x7c" + bytes(16)
    kind = gguf.GGMLQuantizationType.Q4_0.value
    with open_gguf(write(tmp_path, gguf_bytes({}, [Tensor("a", (32,), kind, data)]))) as file:
        assert not np.isfinite(file.dequantise("a")).any()


def test_split_models_are_one_model(tmp_path):
    """Given the first part, tensors of all parts are there, with the metadata of the first."""
    path = write_parts(tmp_path, [split_keys(i, 3) for i in range(3)])
    with open_gguf(path) as file:
        assert file.metadata["general.architecture"] == "llama"
        for item in tiny_tensors("llama"):
            assert file.raw(item.name).tobytes() == item.data
        assert file.total_bytes == sum(part.stat().st_size for part in tmp_path.iterdir())


def test_split_model_with_a_missing_part(tmp_path):
    """The missing part is named."""
    path = write_parts(tmp_path, [split_keys(i, 3) for i in range(3)])
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"^m-00003-of-00003.gguf: missing \(1 of 3 parts"):
        open_gguf(path)


def test_split_model_given_another_part(tmp_path):
    """Only the first part has the metadata, so it must be the one given."""
    write_parts(tmp_path, [split_keys(i, 2) for i in range(2)])
    with pytest.raises(ModelFileError, match="not the first part"):
        open_gguf(tmp_path / "m-00002-of-00002.gguf")


def test_split_model_under_another_name(tmp_path):
    """The other parts are found by name, so the name must fit."""
    path = write_parts(tmp_path, [split_keys(i, 2) for i in range(2)])
    renamed = path.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match="name does not end in -00001-of-00002"):
        open_gguf(renamed)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ([split_keys(0, 2), split_keys(1, 3)], "another number of parts"),
        ([split_keys(0, 3), split_keys(1, 3)], "name does not end"),
        ([split_keys(0, 2), split_keys(0, 2)], "another part than its name"),
        ([split_keys(0, 2), {}], "another number of parts"),
        ([split_keys(0, 2, **{"split.tensors.count": 99}), split_keys(1, 2)], "stated number"),
        ([split_keys(0, 2, **{"split.count": "two"}), split_keys(1, 2)], "split.count is not"),
        ([split_keys(0, 2, **{"split.count": scalar("i", -1)}), {}], "split.count is not"),
    ],
)
def test_split_parts_that_do_not_fit(tmp_path, keys, problem):
    """Parts that contradict each other are refused with the reason."""
    with pytest.raises(ModelFileError, match=problem):
        open_gguf(write_parts(tmp_path, keys))


def test_split_parts_with_the_same_tensor(tmp_path):
    """A tensor in two parts is refused."""
    one = [tensor("a", np.zeros(4))]
    for i in range(2):
        keys = split_keys(i, 2, **{"split.tensors.count": 2})
        write(tmp_path, gguf_bytes(keys, one), f"m-{i + 1:05}-of-00002.gguf")
    with pytest.raises(ModelFileError, match="tensor a is in two parts"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_a_failed_open_leaves_no_map(tmp_path, monkeypatch):
    """Whatever goes wrong, every map is closed again."""
    path = write_parts(tmp_path, [split_keys(0, 2), split_keys(1, 3)])
    made = []
    real = open_gguf.__globals__["map_file"]
    monkeypatch.setitem(
        open_gguf.__globals__, "map_file", lambda p: made.append(real(p)) or made[-1]
    )
    with pytest.raises(ModelFileError):
        open_gguf(path)
    assert [part.closed for part in made] == [True, True]


@pytest.mark.parametrize("name", ["llama256", "llama256-q4_k", "llama256-bf16", "llama256-iq2_xs"])
def test_the_same_as_the_reference_reader(shared, name):
    """Metadata and weights equal those that gguf-py's own reader gives."""
    path = shared / "tiny" / "models" / f"{name}.gguf"
    reference = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        fields = {key: field for key, field in reference.fields.items() if "GGUF." not in key}
        assert set(file.metadata) == set(fields)
        for key, field in fields.items():
            assert np.array_equal(file.metadata[key], field.contents())
        assert set(file.tensors) == {item.name for item in reference.tensors}
        for item in reference.tensors:
            assert file.raw(item.name).tobytes() == item.data.tobytes()
            values = gguf.quants.dequantize(item.data, item.tensor_type)
            assert np.array_equal(file.dequantise(item.name), values, equal_nan=True)


def test_encodings_of_the_builder():
    """The builder writes what the format says, byte by byte."""
    assert encode(True) == Encoded(7, b"\1")
    assert encode(3) == Encoded(4, b"\3\0\0\0")
    assert encode(["ab"]) == Encoded(
        9, bytes(itertools.chain(b"\x08\0\0\0\1", [0] * 7, text("ab")))
    )
