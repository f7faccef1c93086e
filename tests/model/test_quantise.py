"""Matrices in fewer bits: which, what their bits are, and what the model is then known by."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from model.gguf_builder import gguf_bytes, tensor

from kvtrio.model.architectures import read_spec
from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.quantise import QuantisedFile, quantised, quantised_digest

Kind = gguf.GGMLQuantizationType
HEAD = "token_embd.weight"


def quantised_model(shared: Path, name: str, wanted: str) -> QuantisedFile:
    return quantised(open_gguf(shared / "tiny" / "models" / f"{name}.gguf"), wanted)


@pytest.mark.parametrize(("source", "wanted"), [("", "q8_0"), ("", "q4_0"), ("-bf16", "q8_0")])
def test_bits_are_those_of_llama_quantize(shared: Path, source: str, wanted: str) -> None:
    """Every tensor has the bytes of the file that llama.cpp's program made; the head those of q8_0.

    Values that BF16 rounded are other values, so those are compared with the formulas alone.
    """
    with quantised_model(shared, f"llama256{source}", wanted) as made:
        for name, info in made.tensors.items():
            asked = "q8_0" if name == HEAD else wanted
            with open_gguf(shared / "tiny" / "models" / f"llama256-{asked}.gguf") as theirs:
                assert (info.ggml_type, info.shape) == (
                    theirs.tensors[name].ggml_type,
                    theirs.tensors[name].shape,
                )
                if not source:
                    np.testing.assert_array_equal(made.raw(name), theirs.raw(name), name)
                    np.testing.assert_array_equal(made.dequantise(name), theirs.dequantise(name))


def test_what_stays(shared: Path) -> None:
    """Norms, routers, rows that are no whole blocks, and what is in few bits already."""
    with quantised_model(shared, "gpt-oss-mxfp4", "q4_0") as made:
        kinds = {name: info.ggml_type for name, info in made.tensors.items()}
    assert kinds["output.weight"] is Kind.Q8_0
    assert kinds["token_embd.weight"] is Kind.Q4_0
    assert kinds["blk.0.attn_q.weight"] is Kind.Q4_0
    assert kinds["blk.0.ffn_gate_exps.weight"] is Kind.MXFP4
    assert kinds["blk.0.ffn_gate_inp.weight"] is Kind.F32
    assert kinds["blk.0.attn_norm.weight"] is Kind.F32
    with quantised_model(shared, "deepseek2", "q8_0") as made:
        odd = {name for name, info in made.tensors.items() if info.shape[-1] % 32}
        assert odd
        assert all(made.tensors[name].ggml_type is Kind.F32 for name in odd)
        assert read_spec(made) is not None


def test_slices_join_without_a_seam(tmp_path: Path) -> None:
    """A matrix of several slices, a stack of them too, is what the formula gives for the whole."""
    values = np.random.default_rng(7).normal(size=(3, 700, 512)).astype(np.float32)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes({}, [tensor("blk.0.ffn_up_exps.weight", values)]))
    with quantised(open_gguf(path), "q4_0") as made:
        whole = gguf.quants.quantize(values, Kind.Q4_0)
        np.testing.assert_array_equal(made.raw("blk.0.ffn_up_exps.weight"), whole.reshape(-1))


def test_a_model_in_few_bits_already(shared: Path) -> None:
    """There is nothing to do, and the wish is refused."""
    with pytest.raises(ModelFileError, match="no matrix of it"):
        quantised_model(shared, "llama256-q4_k", "q8_0")


def test_it_is_another_model() -> None:
    """Its digest differs from its source's, from other types' and from other sources'."""
    sources = [bytes(32), bytes([1] * 32)]
    made = {quantised_digest(source, kind) for source in sources for kind in ("q8_0", "q4_0")}
    assert len(made | set(sources)) == 6
