"""Hugging Face folders against the library that defines them, and against what may be wrong."""

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from harness.cpu_models import cpu_settings
from harness.cpu_models import require_kernels as require_library
from harness.model_folders import MODELS, VOCAB, library, make_folder
from harness.torch_models import Driver, random_prompt, settings
from kvtrio.backends.cpu_backend import CpuBackend
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.model.architectures import read_spec
from kvtrio.model.errors import ModelFileError
from kvtrio.model.folder import FolderFile, open_folder
from kvtrio.model.opening import open_model
from kvtrio.model.template import load_template
from kvtrio.model.tokenizer import load_tokenizer

PROMPT = random_prompt(Random(6), 320, VOCAB)
NUM_DECODED = 20


def logprobs_of(file: FolderFile, size: int, backend: Any = None) -> torch.Tensor:
    """Behind the prompt, read ``size`` tokens at a time, and behind each of the last tokens."""
    driver = Driver(backend or TorchBackend.load(file, read_spec(file), settings()))
    end = len(PROMPT) - NUM_DECODED
    rows = [driver.chunk(0, i, PROMPT[i : min(i + size, end)]) for i in range(0, end, size)]
    rows += [driver.chunk(0, i, PROMPT[i : i + 1]) for i in range(end, len(PROMPT))]
    return torch.cat([driver.logprobs(row) for row in rows][-NUM_DECODED - 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_gives_what_its_library_gives(kind, tmp_path):
    """Log-probabilities in float32 behind 300 tokens and 20 more, the prompt cut in three ways, by
    the reference and by the compiled kernels."""
    model = make_folder(tmp_path, kind)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -NUM_DECODED - 1 :].float()
    expected = torch.log_softmax(logits, -1)
    with open_folder(tmp_path) as file:
        for size in (300, 64, 7):
            torch.testing.assert_close(logprobs_of(file, size), expected, rtol=0.0, atol=1e-4)
        require_library()
        compiled = CpuBackend.load(file, read_spec(file), cpu_settings())
        for size in (300, 64, 7):
            out = logprobs_of(file, size, compiled)
            torch.testing.assert_close(out, expected, rtol=0.0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_in_several_files(dtype, tmp_path):
    """Matrices keep their type, and an index says which file has them."""
    model = make_folder(tmp_path, "qwen3_5_text")
    model.to(dtype).save_pretrained(tmp_path, max_shard_size="100KB")
    assert not (tmp_path / "unused").exists()
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    with open_folder(tmp_path) as file:
        assert len(file.part_paths) > 3
        kinds = {tensor.ggml_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
        assert kinds <= {"F32", "BF16" if dtype is torch.bfloat16 else "F16"}
        for name in ("blk.0.attn_qkv.weight", "blk.3.attn_q.weight", "blk.0.ssm_conv1d.weight"):
            tensor = file.tensors[name]
            assert file.raw(name).nbytes == tensor.num_bytes
            assert file.dequantise(name).shape == tensor.shape
        stored = model.model.layers[3].self_attn.k_proj.weight.float().detach().numpy()
        np.testing.assert_array_equal(file.dequantise("blk.3.attn_k.weight"), stored)
        assert torch.isfinite(logprobs_of(file, 300)).all()


# --- tokenizer ---


def test_a_byte_level_tokenizer_cuts_as_its_library_does(tmp_path):
    """Ids, special tokens, ends and template come from the folder's own files."""
    make_folder(tmp_path, "qwen3")
    theirs = library().PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    with open_folder(tmp_path) as file:
        tokenizer = load_tokenizer(file.metadata, cutting=file.pre_tokenizer)
        template = load_template(file.metadata, None, "", "")
    for text in ("the-than.", "<s>then</s>", "anthem99", "a<pad>b"):
        assert tokenizer.encode(text, add_special=False, parse_special=True) == theirs.encode(
            text, add_special_tokens=False
        )
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
    assert tokenizer.vocab_size == VOCAB
    assert template.source == "{{ 1 }}"


def test_merges_over_characters_cut_as_their_library_does(tmp_path):
    """With a space before the text, bytes for what is unknown, and ranks as scores."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    words = "the theory of these other things: then there, that thing; another anthem, an ant"
    made.train_from_iterator([words] * 3, trainer)
    data = json.loads(made.to_str())
    data["added_tokens"] = [each for each in data["added_tokens"] if each["id"] < 3]
    model = make_folder(tmp_path, "llama")
    model.resize_token_embeddings(400, mean_resizing=False)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    theirs = Tokenizer.from_str(json.dumps(data))
    with open_folder(tmp_path) as file:
        tokenizer = load_tokenizer(file.metadata, cutting=file.pre_tokenizer)
    for text in ("the other theory", "  another ant\u00e9", "thing; \U0001f600 that", "anthem"):
        mine = tokenizer.encode(text, add_special=False, parse_special=False)
        assert mine == theirs.encode(text, add_special_tokens=False).ids


# --- what may be wrong ---


def change(folder: Path, name: str, **values: Any) -> None:
    """Set keys of a JSON file; None takes one out."""
    path = folder / name
    data = json.loads(path.read_text(encoding="utf-8")) | values
    data = {key: value for key, value in data.items() if value is not None}
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good folder, to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    make_folder(folder, "qwen3")
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of a good folder."""
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt_oss\x1b[31m"}, r"model_type gpt_oss\?\?31m is not supported"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is not a whole number"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_act": "gelu"}, "another hidden_act than silu"),
        ({"rms_norm_eps": float("inf")}, r"damaged|rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "abacus"}}, "rope scaling abacus is not supported"),
        ({"rope_parameters": 3}, "rope_parameters is not an object"),
        ({"quantization_config": {"bits": 4}}, "quantised already"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": 90}, "tokenizer|embeddings"),
        ({"num_hidden_layers": 3}, "not known"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, changes, says):
    """One line, without anything being allocated."""
    change(folder, "config.json", **changes)
    with pytest.raises(ModelFileError, match=says), open_folder(folder) as file:
        read_spec(file)


def test_pickles_are_refused_by_name(folder):
    """They can run code; the line says how to save the weights instead."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin is a pickle"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.json", "a folder without config.json is no model"),
        ("model.safetensors", "neither model.safetensors nor"),
        ("tokenizer.json", "tokenizer.json is missing"),
    ],
)
def test_a_missing_file_is_named(folder, name, says):
    """Each that is needed."""
    (folder / name).unlink()
    with pytest.raises(ModelFileError, match=says):
        open_model(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", 3])
def test_an_index_names_files_of_its_folder_only(folder, name):
    """Paths and other formats are refused."""
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"index\.json"):
        open_folder(folder)


def test_a_tensor_that_nobody_reads_is_refused(folder):
    """It would mean that the model computes something else."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + size].replace(b"self_attn.q_norm", b"self_attn.x_norm", 1)
    path.write_bytes(data[:8] + header + data[8 + size :])
    with pytest.raises(ModelFileError, match=r"x_norm\.weight is not known"):
        open_folder(folder)


@pytest.mark.slow
def test_damaged_files_are_refused_in_one_line(folder):
    """Any change of a header or of a JSON file: a model, or one line; never anything else."""
    rng, refused = Random(3), list[str]()
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    names = ["config.json", "tokenizer.json", "model.safetensors", "tokenizer_config.json"]
    for name in names * 60:
        data = bytearray(good[name])
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(min(len(data), 3000))
            data[at : at + rng.randrange(1, 3)] = rng.randbytes(rng.randrange(3))
        (folder / name).write_bytes(data)
        try:
            with open_folder(folder) as file:
                read_spec(file)
                load_tokenizer(file.metadata, cutting=file.pre_tokenizer)
        except ModelFileError as error:
            refused.append(str(error))
        (folder / name).write_bytes(good[name])
    assert len(refused) > 100
    assert not any("\n" in line for line in refused)
