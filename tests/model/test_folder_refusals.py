"""What of a Hugging Face folder is read, refused or left out where published ones differ."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from harness.model_folders import MODELS, VOCAB, library, make_folder
from kvtrio.model.architectures import read_spec
from kvtrio.model.errors import ModelFileError
from kvtrio.model.folder import FolderFile, open_folder
from kvtrio.model.tokenizer import Tokenizer, load_tokenizer

BROKEN = {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Good folders, to be copied."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("qwen3", "mamba2")}
    for kind, folder in folders.items():
        make_folder(folder, kind)
    return folders


@pytest.fixture
def folder(kinds: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of one without anything unusual."""
    return copied(kinds["qwen3"], tmp_path)


def copied(source: Path, folder: Path) -> Path:
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values), encoding="utf-8")


def change_weights(folder: Path, leave_out: str = "", **more: np.ndarray) -> None:
    stored = load_file(folder / WEIGHTS) | more
    save_file({key: value for key, value in stored.items() if key != leave_out}, folder / WEIGHTS)


def tokenizer_of(file: FolderFile) -> Tokenizer:
    return load_tokenizer(file.metadata, cutting=file.pre_tokenizer)


# --- config.json and weights ---


@pytest.mark.parametrize("outside", [True, False])
def test_a_rope_that_nothing_applies_is_refused(folder: Path, outside: bool) -> None:
    """Scaling as in Llama 3, in a kind of model whose layers would not see its factors."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    change(folder, "config.json", **{"rope_scaling" if outside else "rope_parameters": rope})
    if outside:
        change(folder, "config.json", rope_parameters=None)
    with pytest.raises(ModelFileError, match="rope scaling llama3 is not supported"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("limit", "is_good"),
    [
        ([0.0, float("inf")], True),
        ([0.0, {"__float__": "Infinity"}], True),
        ([0.001, 0.1], False),
        ([0.0, [1]], False),
        ("no", False),
    ],
)
def test_limits_of_steps(kinds: dict[str, Path], tmp_path: Path, limit: Any, is_good: bool) -> None:
    """No limit is read as either version of the library writes it; any other is refused."""
    folder = copied(kinds["mamba2"], tmp_path)
    change(folder, "config.json", time_step_limit=limit)
    if is_good:
        with open_folder(folder) as file:
            read_spec(file)
        return
    with pytest.raises(ModelFileError, match="time_step_limit"):
        open_folder(folder)


def test_frequencies_in_old_folders_are_left_out(folder: Path) -> None:
    """They follow from config.json."""
    change_weights(
        folder, **{"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    )
    with open_folder(folder) as file:
        read_spec(file)


def test_a_missing_head_is_not_taken_from_the_embedding(folder: Path) -> None:
    """Unless config.json says so, there or beside the text model's part."""
    change_weights(folder, leave_out="lm_head.weight")
    with pytest.raises(ModelFileError, match=r"lm_head\.weight is missing"):
        open_folder(folder)
    inner = json.loads((folder / "config.json").read_text())
    inner.pop("tie_word_embeddings", None)
    outer = {"model_type": "more", "text_config": inner, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(outer), encoding="utf-8")
    with open_folder(folder) as file:
        assert "output.weight" not in file.tensors


def test_heads_are_tied_where_the_library_ties_them() -> None:
    """Each kind of model, where config.json does not say."""
    from kvtrio.model.folder_tensors import _ties_by_default

    for kind, (name, _) in MODELS.items():
        config = getattr(library(), f"{name}Config")
        assert _ties_by_default(kind.split("-")[0]) is bool(config().tie_word_embeddings), kind


# --- tokenizer and template ---


def test_tokens_without_embedding_are_left_out(folder: Path) -> None:
    """Gemma 3's smallest have one for images at the end: its text stays text."""
    data = json.loads((folder / "tokenizer.json").read_text())
    more = {"id": VOCAB, "content": "<image>", "special": True}
    change(folder, "tokenizer.json", added_tokens=[*data["added_tokens"], more])
    with open_folder(folder) as file:
        tokenizer = tokenizer_of(file)
    assert tokenizer.vocab_size == VOCAB
    assert len(tokenizer.encode("<image>", add_special=False, parse_special=True)) > 1


def test_special_tokens_swallow_the_spaces_that_the_library_says(folder: Path) -> None:
    """Before and behind, as tokenizer.json has it for each."""
    data = json.loads((folder / "tokenizer.json").read_text())
    added = data["added_tokens"]
    added[0]["lstrip"], added[1]["rstrip"] = True, True
    change(folder, "tokenizer.json", added_tokens=added)
    theirs = library().PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    with open_folder(folder) as file:
        tokenizer = tokenizer_of(file)
    for text in ("the <pad>\tthe", "<s> \n the</s>\nthe", "a <s> <pad> b", " <pad>", "<s>\n"):
        mine = tokenizer.encode(text, add_special=False, parse_special=True)
        assert mine == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_space_before_texts_stands_where_the_library_has_it(folder: Path, scheme: str) -> None:
    """Mistral's later files have it at the start alone, not behind special tokens."""
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = {text: token for text, token in data["model"]["vocab"].items() if token < VOCAB - 1}
    vocab |= {"\u2581": VOCAB - 1}
    model = data["model"] | {"vocab": vocab, "byte_fallback": True, "merges": []}
    model["merges"] = [pair for pair in data["model"]["merges"] if "".join(pair) in vocab]
    mark = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    change(folder, "tokenizer.json", model=model, pre_tokenizer=mark, decoder=None)
    theirs = library().PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    with open_folder(folder) as file:
        metadata = dict(file.metadata)
    assert metadata["tokenizer.ggml.add_space_prefix"] is (scheme != "never")
    metadata["tokenizer.ggml.tokens"] = [
        *metadata["tokenizer.ggml.tokens"],
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    for key, more in (("token_type", 6), ("scores", 0.0), ("token_spaces", 0)):
        key = f"tokenizer.ggml.{key}"
        metadata[key] = np.append(metadata[key], np.full(256, more, metadata[key].dtype))
    tokenizer = load_tokenizer(metadata)
    for text in ("the", "<s>the</s> the", " the<s>", "a b<s>  a"):
        mine = tokenizer.encode(text, add_special=False, parse_special=True)
        assert mine == theirs.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normaliser Lowercase"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}}}, "normaliser Replace"),
        ({"pre_tokenizer": {"type": "Split", "behavior": "Isolated"}}, "cutting words"),
        ({"pre_tokenizer": BROKEN}, "damaged: a pattern"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "end_of_word_suffix"),
        ({"model": {"byte_fallback": True}, "normalizer": {"type": "Replace"}}, "replacing"),
    ],
)
def test_changes_of_text_that_nobody_makes_are_refused(
    folder: Path, values: dict[str, Any], says: str
) -> None:
    """The ids would be others than the model was trained with."""
    data = json.loads((folder / "tokenizer.json").read_text())
    model = data["model"] | values.get("model", {})
    change(folder, "tokenizer.json", **(values | {"model": model}))
    with pytest.raises(ModelFileError, match=says):
        open_folder(folder)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (None, {"chat_template.json": '{"chat_template": "old"}'}, "old"),
        ("own", {"chat_template.json": '{"chat_template": "old"}'}, "own"),
        ("own", {"chat_template.jinja": "new"}, "new"),
        ([{"name": ["x"]}, {"name": "default", "template": "named"}], {}, "named"),
        ([{"name": "rag", "template": "named"}], {}, None),
    ],
)
def test_where_a_template_stands(
    folder: Path, own: Any, files: dict[str, str], expected: str | None
) -> None:
    """In a file of its own, in the settings, alone or among others, or in the processor's file."""
    change(folder, "tokenizer_config.json", chat_template=own)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    with open_folder(folder) as file:
        assert file.metadata.get("tokenizer.chat_template") == expected
