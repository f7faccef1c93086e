"""Damaged and hostile vocabularies: one clear line each."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model.vocabularies import byte_level, numbers, sentence_piece, tokenizer_keys

from kvtrio.model.errors import ModelFileError
from kvtrio.model.tokenizer import load_tokenizer


def without(metadata: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != f"tokenizer.ggml.{name}"}


def changed(metadata: dict[str, Any], **values: Any) -> dict[str, Any]:
    return metadata | tokenizer_keys(**values)


SPM, BPE = sentence_piece(), byte_level()
NUM_SPM, NUM_BPE = len(SPM["tokenizer.ggml.tokens"]), len(BPE["tokenizer.ggml.tokens"])
TOKENS = BPE["tokenizer.ggml.tokens"]

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no model": (without(BPE, "model"), 'tokenizer model "" is not supported'),
    "odd model": (changed(BPE, model="t5"), 'tokenizer model "t5" is not supported'),
    "model is a number": (changed(BPE, model=7), "model is not a text"),
    "no tokens": (without(BPE, "tokens"), "tokens is missing or empty"),
    "empty tokens": (changed(BPE, tokens=numbers([])), "tokens is missing or empty"),
    "tokens are numbers": (changed(BPE, tokens=numbers([1, 2])), "not a list of strings"),
    "token is a number": (changed(BPE, tokens=[*TOKENS[:-1], 5]), "not a list of strings"),
    "twins": (changed(BPE, tokens=[*TOKENS[:-1], TOKENS[3]]), "tokens 3 and .* are the same"),
    "types too short": (changed(BPE, token_type=numbers([1])), "token_type has 1 entries for"),
    "types are text": (changed(BPE, token_type=["a"]), "token_type is not a list of numbers"),
    "types are fractions": (
        changed(BPE, token_type=numbers([1.0] * NUM_BPE, np.float32)),
        "token_type does not hold whole numbers",
    ),
    "scores too short": (changed(SPM, scores=numbers([0.5], np.float32)), "scores has 1 entries"),
    "no scores": (without(SPM, "scores"), "scores is missing"),
    "scores are no numbers": (
        changed(SPM, scores=numbers([float("nan")] * NUM_SPM, np.float32)),
        "scores holds values that are not numbers",
    ),
    "no merges": (without(BPE, "merges"), "merges is missing or empty"),
    "merges are numbers": (changed(BPE, merges=numbers([1])), "merges is not a list of strings"),
    "merge of one part": (changed(BPE, merges=["h e", "he"]), "entry 1 is not two parts"),
    "empty merge": (changed(BPE, merges=[""]), "entry 0 is not two parts"),
    "merge of one space": (changed(BPE, merges=[" "]), "entry 0 is not two parts"),
    "unknown merge": (changed(BPE, merges=["h h"]), "entry 0 makes no known token"),
    "unknown part": (changed(BPE, merges=["zz z"]), "entry 0 makes no known token"),
    "bos too large": (changed(BPE, bos_token_id=NUM_BPE), f"bos_token_id is {NUM_BPE}, but"),
    "eos negative": (changed(BPE, eos_token_id=-1), "eos_token_id is -1, but"),
    "eot is text": (changed(BPE, eot_token_id="1"), "eot_token_id is not a whole number"),
    "eom is a flag": (changed(BPE, eom_token_id=True), "eom_token_id is not a whole number"),
    "fill too large": (changed(BPE, fim_pad_token_id=2**32), "fim_pad_token_id is 4294967296"),
    "old name too large": (changed(BPE, prefix_token_id=2**31), "prefix_token_id is 2147483648"),
    "flag is a number": (changed(BPE, add_bos_token=1), "add_bos_token is not true or false"),
    "flag is text": (changed(SPM, add_space_prefix="no"), "add_space_prefix is not true"),
    "no start token": (changed(BPE, add_bos_token=True), "bos_token_id is missing"),
    "no end token": (changed(BPE, add_eos_token=True), "eos_token_id is missing"),
    "unknown pre": (changed(BPE, pre="new-model"), 'pre-tokenizer "new-model" is not known'),
    "pre is a number": (changed(BPE, pre=5), "pre is not a text"),
    "pre has escapes": (changed(BPE, pre="a\x1b[2Jb\n"), r'pre-tokenizer "a\?\?2Jb\?"'),
    "byte missing": (
        changed(
            SPM,
            tokens=[t.replace("<0x41>", "A?") for t in SPM["tokenizer.ggml.tokens"]],
            token_type=numbers([1] * NUM_SPM),
        ),
        "no token for the byte 0x41",
    ),
    "byte misspelled": (
        changed(SPM, tokens=[t.replace("<0x41>", "<0xZZ>") for t in SPM["tokenizer.ggml.tokens"]]),
        "type of a byte but not the form",
    ),
    "gemma4 without merges": (changed(SPM, model="gemma4", bos_token_id=1), "merges is missing"),
}


@pytest.mark.parametrize(("metadata", "message"), CASES.values(), ids=CASES.keys())
def test_one_clear_line(metadata: dict[str, Any], message: str) -> None:
    """A damaged vocabulary is refused with one line that says what is wrong."""
    with pytest.raises(ModelFileError, match=message) as caught:
        load_tokenizer(metadata)

    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_missing_pre_is_the_default() -> None:
    """A file without the name, unlike one with an unknown name, takes the default rules."""
    load_tokenizer(without(BPE, "pre"))


def test_empty_token_texts_get_names() -> None:
    """Empty token texts are told apart by their ids."""
    tokens = [*TOKENS[:-2], "", ""]

    assert load_tokenizer(changed(BPE, tokens=tokens)).vocab_size == NUM_BPE


ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.integers(-5, 2**33),
    st.booleans(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.text(max_size=3), max_size=4),
    st.lists(st.integers(-3, 9), max_size=4).map(lambda values: numbers(list(values))),
)
KEYS = [
    *("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id"),
    *("eot_token_id", "fim_rep_token_id", "add_bos_token", "add_eos_token", "add_space_prefix"),
]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.booleans(), st.dictionaries(st.sampled_from(KEYS), ODD, max_size=3))
def test_no_traceback_whatever_the_file_says(is_bpe: bool, odd: dict[str, Any]) -> None:
    """Any values under any keys either load or are refused with ModelFileError."""
    try:
        tokenizer = load_tokenizer(changed(BPE if is_bpe else SPM, **odd))
    except ModelFileError:
        return
    ids = tokenizer.encode("hello <s> é", add_special=True, parse_special=True)
    assert isinstance(tokenizer.decode(ids), str)
