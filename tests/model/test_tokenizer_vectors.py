"""Exactness: real vocabularies and recorded prompts, id for id."""

import json
from functools import cache
from pathlib import Path

import pytest
from model.vocabularies import vector_cases

from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.matcher import TextMatcher
from kvtrio.model.tokenizer import Tokenizer, load_tokenizer

NAMES = [
    *("command-r", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm"),
    *("phi-3", "qwen2", "qwen35", "starcoder"),
]


@cache
def tokenizer_of(path: Path) -> Tokenizer:
    with open_gguf(path) as file:
        return load_tokenizer(file.metadata)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_vector(shared: Path, name: str) -> None:
    """Every recorded text gives exactly the recorded ids, and they give the text back."""
    folder = shared / "tokenizer-vectors"
    tokenizer = tokenizer_of(folder / f"{name}.gguf")
    cases = vector_cases(folder, name)

    assert len(cases) >= 46
    for text, ids in cases:
        assert ids == tokenizer.encode(text, add_special=False, parse_special=False)
        assert tokenizer.decode(ids) in (text, f" {text}")


def test_every_vector_has_a_test(shared: Path) -> None:
    """A vocabulary that is added to the shared folder is not forgotten here."""
    found = {path.stem for path in (shared / "tokenizer-vectors").glob("*.gguf")}

    assert set(NAMES) == found


def generated_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    matcher = TextMatcher(tokenizer)
    return "".join(matcher.push(token).text for token in ids) + matcher.flush()


def check_golden(path: Path, model: Path) -> None:
    golden = json.loads(path.read_text())
    tokenizer = tokenizer_of(model)

    assert golden["cases"]
    for case in golden["cases"]:
        ids = tokenizer.encode(case["prompt"], add_special=True, parse_special=True)
        assert case["prompt_tokens"] == ids
        assert case["greedy_text"] == generated_text(tokenizer, case["greedy_tokens"])
    long = golden["long"]["prompt_tokens"]
    again = tokenizer.encode(tokenizer.decode(long), add_special=True, parse_special=True)
    assert long == again


@pytest.mark.slow
def test_small_models(shared: Path) -> None:
    """All recordings of the small models: the prompts give the recorded ids, these the texts."""
    recordings = sorted((shared / "tiny" / "golden").glob("*.json"))

    assert len(recordings) > 60
    for path in recordings:
        model = json.loads(path.read_text())["model"]
        check_golden(path, shared / "tiny" / "models" / model)


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("kind", ["f32", "q4_1"])
def test_smollm2_prompts(shared: Path, smollm2: Path, kind: str) -> None:
    """SmolLM2's recorded prompts, the long one included, give the recorded ids and texts."""
    check_golden(shared / "golden" / f"smollm2-135m-{kind}.json", smollm2)


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("kind", ["f32", "q4_k_m"])
def test_gemma_prompts(shared: Path, gemma3: Path, kind: str) -> None:
    """Gemma's recorded prompts give the recorded ids, with one start token, and the texts."""
    check_golden(shared / "golden" / f"gemma3-270m-{kind}.json", gemma3)


@pytest.mark.models
def test_smollm2_ends_generation(smollm2: Path) -> None:
    """The end list by text adds the tokens that the file does not name."""
    tokenizer = tokenizer_of(smollm2)

    assert {0, 2, 4} == tokenizer.eog_ids
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
