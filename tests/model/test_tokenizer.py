"""What a tokenizer does with special tokens, odd text and odd vocabularies."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model.vocabularies import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER,
    byte_level,
    numbers,
    sentence_piece,
    tokenizer_keys,
)

from kvtrio.model.bpe import SPACE_MARK
from kvtrio.model.pretokenizers import PRE_TOKENIZERS
from kvtrio.model.special_tokens import END_TEXTS
from kvtrio.model.spm import make_sentence_piece
from kvtrio.model.tokenizer import MAX_TEXT_CHARS, TextTooLong, Tokenizer, load_tokenizer
from kvtrio.model.vocabulary import TokenType, read_vocabulary


def load(metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(metadata)


def ids_of(metadata: dict[str, Any], *texts: str) -> list[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return [tokens.index(text) for text in texts]


def encode(tokenizer: Tokenizer, text: str, add: bool = False, parse: bool = False) -> list[int]:
    return tokenizer.encode(text, add_special=add, parse_special=parse)


# --- special tokens ---


def test_control_tokens_are_text_unless_parsed() -> None:
    """A control token's text becomes the token only when asked for."""
    metadata = byte_level({"<s>": CONTROL})
    tokenizer = load(metadata)

    assert ids_of(metadata, "hello", "<s>") == encode(tokenizer, "hello<s>", parse=True)
    assert ids_of(metadata, "hello", "<", "s", ">") == encode(tokenizer, "hello<s>")


def test_user_defined_tokens_always_match() -> None:
    """A user-defined token is cut out of the text whether or not special tokens are parsed."""
    metadata = byte_level({"<x>": USER})
    tokenizer = load(metadata)

    assert ids_of(metadata, "<x>", "a") == encode(tokenizer, "<x>a")


def test_longest_special_token_wins_over_the_whole_text() -> None:
    """A longer special text is cut out first, even where a shorter one starts earlier."""
    metadata = byte_level({"<ab": USER, "b>cd": USER, "é>": USER})
    tokenizer = load(metadata)

    assert ids_of(metadata, "<", "a", "b>cd") == encode(tokenizer, "<ab>cd")
    assert ids_of(metadata, "<ab", "<ab") == encode(tokenizer, "<ab<ab")


def test_long_special_runs_do_not_repeat_work() -> None:
    """Runs that every one of thirty nested special texts matches are cut like the longest says."""
    metadata = byte_level({"\n" * count: USER for count in range(2, 32)})
    tokenizer = load(metadata)
    longest, rest = ids_of(metadata, "\n" * 31, "\n" * 8)

    assert [longest] * 6_450 + [rest] == encode(tokenizer, "\n" * (31 * 6_450 + 8))


def test_special_tokens_swallow_spaces_as_the_file_says() -> None:
    """Before or behind them, shorter tokens included; a fragment tells how many."""
    words = {"<l>": USER, "<r>": USER, "\n\n": USER}
    metadata = byte_level(words)
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    spaces = numbers([0] * (num_tokens - 3) + [1, 2, 0])
    tokenizer = load(metadata | tokenizer_keys(token_spaces=spaces))

    assert ids_of(metadata, "a", "<l>", "a") == encode(tokenizer, "a \n<l>a")
    assert ids_of(metadata, "a", "<r>", "a", "<r>") == encode(tokenizer, "a<r>\n \ta<r> ")
    assert ids_of(metadata, "<r>", "<l>", "<r>", "a") == encode(tokenizer, "<r> <l><r> \n\n\na")
    text = "hello<r> \n a <l>"
    sizes = [
        sum(f.spaces) + len(f.content if isinstance(f.content, str) else "<r>")
        for f in tokenizer.fragments(text, parse_special=True)
    ]
    assert (sizes, sum(sizes)) == ([5, 6, 1, 4], len(text))


@pytest.mark.parametrize(("name", "swallows"), [("Phi-3.5 mini", True), ("Llama", False)])
def test_phi3_swallows_spaces_by_name(name: str, swallows: bool) -> None:
    """As in llama.cpp, since its converted files do not say it; but not behind the start token."""
    metadata = byte_level({"<s>": CONTROL, "<|end|>": CONTROL}) | {"general.name": name}
    newline = () if swallows else ("Ċ",)

    assert ids_of(metadata, "<s>", "Ċ", "a", "<|end|>", *newline, "a") == encode(
        load(metadata), "<s>\na<|end|>\na", parse=True
    )


@pytest.mark.parametrize("text", ["<|im_end|>", "<eos>", "<|eom_id|>", "[e~["])
def test_end_texts_end_generation_whatever_their_type(text: str) -> None:
    """Tokens with the text of an end token are control tokens and end a generation."""
    metadata = byte_level({text: NORMAL})
    tokenizer = load(metadata)
    (token,) = ids_of(metadata, text)

    assert text in END_TEXTS.split()
    assert {token} == tokenizer.eog_ids
    assert tokenizer.is_control(token)
    assert [token] == encode(tokenizer, text, parse=True)
    assert len(encode(tokenizer, text)) > 1


def test_fill_tokens_are_found_by_text() -> None:
    """Fill-in-the-middle texts are control; padding, repository and separator end a generation."""
    metadata = byte_level({"<|fim_prefix|>": NORMAL, "<|fim_pad|>": NORMAL, "<|file_sep|>": NORMAL})
    tokenizer = load(metadata)
    prefix, pad, separator = ids_of(metadata, "<|fim_prefix|>", "<|fim_pad|>", "<|file_sep|>")

    assert all(map(tokenizer.is_control, (prefix, pad, separator)))
    assert {pad, separator} == tokenizer.eog_ids


def test_named_fill_token_is_not_looked_for() -> None:
    """Where the file names the token of a kind, its texts are not searched."""
    metadata = byte_level({"<|fim_pad|>": NORMAL, "<other>": NORMAL})
    pad, other = ids_of(metadata, "<|fim_pad|>", "<other>")
    tokenizer = load(metadata | tokenizer_keys(fim_pad_token_id=other))

    assert {other} == tokenizer.eog_ids
    assert not tokenizer.is_control(pad)


def test_named_ends_end_generation() -> None:
    """The eos, eot and eom ids of the file end a generation."""
    metadata = byte_level({"<a>": CONTROL, "<b>": CONTROL, "<c>": CONTROL})
    a, b, c = ids_of(metadata, "<a>", "<b>", "<c>")
    named = tokenizer_keys(eos_token_id=a, eot_token_id=b, eom_token_id=np.uint32(c))

    assert {a, b, c} == load(metadata | named).eog_ids


def test_gpt_oss_structure_stays_visible() -> None:
    """gpt-oss's markers are text, and its <|end|> does not end a generation."""
    names = ("<|channel|>", "<|end|>", "<|return|>", "<|call|>")
    metadata = byte_level(dict.fromkeys(names, CONTROL))
    tokenizer = load(metadata)
    channel, end, final, call = ids_of(metadata, *names)

    assert {final, call} == tokenizer.eog_ids
    assert [tokenizer.is_control(token) for token in (channel, end, final, call)] == [
        False,
        False,
        True,
        True,
    ]


def test_gemma4_html_end_is_plain_text() -> None:
    """Beside <|tool_response>, </s> is the HTML tag."""
    metadata = byte_level({"</s>": CONTROL, "<|tool_response>": CONTROL})
    tokenizer = load(metadata)
    html, response = ids_of(metadata, "</s>", "<|tool_response>")

    assert {response} == tokenizer.eog_ids
    assert not tokenizer.is_control(html)


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "text", "expected"),
    [
        (True, False, "a", ["<s>", "a"]),
        (True, False, "<s>a", ["<s>", "a"]),
        (True, False, "", ["<s>"]),
        (False, False, "<s>a", ["<s>", "a"]),
        (False, False, "a", ["a"]),
        (True, True, "a", ["<s>", "a", "</s>"]),
        (True, True, "<s>a</s>", ["<s>", "a", "</s>"]),
    ],
)
def test_ends_are_added_once(add_bos: bool, add_eos: bool, text: str, expected: list[str]) -> None:
    """Start and end tokens are added where the model wants them, and never twice."""
    metadata = byte_level()
    bos, eos = ids_of(metadata, "<s>", "</s>")
    metadata |= tokenizer_keys(
        bos_token_id=bos, eos_token_id=eos, add_bos_token=add_bos, add_eos_token=add_eos
    )

    assert ids_of(metadata, *expected) == encode(load(metadata), text, add=True, parse=True)


@pytest.mark.parametrize(
    ("pre", "add_bos"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)]
)
def test_start_token_by_family(pre: str, add_bos: bool) -> None:
    """Without a flag in the file, the family says whether prompts start with a token."""
    metadata = byte_level(pre=pre)
    (bos,) = ids_of(metadata, "<s>")

    assert add_bos == load(metadata | tokenizer_keys(bos_token_id=bos)).add_bos


def test_gemma4_always_starts() -> None:
    """Gemma 4 gets its start token even if the file says otherwise."""
    metadata = sentence_piece(model="gemma4", merges=["a b"], bos_token_id=1, add_bos_token=False)

    assert load(metadata).add_bos


# --- text ---


def test_lone_surrogates_are_replaced() -> None:
    """Half an emoji from JSON counts as U+FFFD."""
    for metadata in (byte_level(), sentence_piece()):
        tokenizer = load(metadata)

        assert encode(tokenizer, "a\ufffdb") == encode(tokenizer, "a\ud83db")


def test_text_has_a_longest_length() -> None:
    """Text beyond the limit is refused instead of overtaxing the regular expressions."""
    with pytest.raises(TextTooLong):
        encode(load(sentence_piece()), "a" * (MAX_TEXT_CHARS + 1))


def test_bytes_without_token_are_dropped_apart() -> None:
    """A byte that has no token vanishes, but its neighbours do not merge over the gap."""
    metadata = byte_level(merges=["! !"])
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index(chr(256 + 4))] = "nothing"  # the byte 0x04

    assert ids_of(metadata, "!", "!") == encode(load(metadata), "!\x04!")


def test_broken_token_text_is_kept_as_bytes() -> None:
    """A token with invalid UTF-8 loads, never matches, and gives its bytes back."""
    metadata = byte_level({"\udcff": USER})
    tokenizer = load(metadata)
    (token,) = ids_of(metadata, "\udcff")

    assert tokenizer.token_bytes(token) == b"\xff"
    assert token not in encode(tokenizer, "\udcff\ufffd", parse=True)


def test_token_bytes_by_type() -> None:
    """Bytes, special texts, unused tokens and spaces each give what they stand for."""
    metadata = sentence_piece({"▁a": -1.0, "<un>": -2.0, "é": -3.0})
    metadata["tokenizer.ggml.token_type"][260] = UNUSED
    tokenizer = load(metadata)

    assert [tokenizer.token_bytes(i) for i in (0, 1, 3, 258)] == [b"<unk>", b"<s>", b"\0", b"\xff"]
    assert [b" a", b"", "é".encode()] == [tokenizer.token_bytes(i) for i in (259, 260, 261)]
    for bad in (-1, 262):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            tokenizer.token_bytes(bad)


def test_byte_level_token_outside_the_alphabet_is_its_text() -> None:
    """A normal token that is not written in the byte alphabet stands for its own text."""
    metadata = byte_level({"日 本": NORMAL})
    tokenizer = load(metadata)

    assert tokenizer.decode(ids_of(metadata, "日 本")) == "日 本"


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_round_trip(text: str) -> None:
    """Whatever is encoded decodes to the same text (after the SentencePiece space)."""
    assert text == BYTES.decode(encode(BYTES, text))
    assert (f" {text}" if text else "") == PIECES.decode(encode(PIECES, text))


BYTES = load(byte_level())
PIECES = load(sentence_piece())


# --- SentencePiece ---


def naive_sentence_piece(text: str, scores: dict[str, float]) -> list[str]:
    """The definition: merge the best pair, the leftmost of equals, until there is none."""
    pieces = list(text)
    while True:
        pairs = [
            (-scores[left + right], i)
            for i, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.text("ab▁", min_size=2, max_size=4), st.sampled_from([-1.0, -2.0, -3.0]), max_size=14
    ),
    st.text("ab ", max_size=14),
)
def test_sentence_piece_equals_its_definition(scores: dict[str, float], text: str) -> None:
    """The heap, the cut into words and the cache give what plain repetition gives."""
    scores = {"a": -9.0, "b": -9.0, "▁": -9.0} | scores
    vocabulary = read_vocabulary(sentence_piece(scores))
    encoder = make_sentence_piece(vocabulary, add_space_prefix=False)
    expected = naive_sentence_piece(text.replace(" ", SPACE_MARK), scores)

    for _ in range(2):  # the second time from the cache
        assert expected == [vocabulary.texts[i] for i in encoder.encode(text, True)]


@given(st.text("ab \n\u00e9", max_size=60), st.integers(1, 9))
def test_sentence_piece_cuts_words_alike_in_pieces(text: str, num_chars: int) -> None:
    """A text is cut into the same words however little of it is looked at in one go."""
    pieces = {"\u2581": -9.0, "a\u2581": -3.0, "\u2581ab": -2.0}
    encoder = make_sentence_piece(read_vocabulary(sentence_piece(pieces)), False)
    marked = text.replace(" ", SPACE_MARK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtrio.model.spm.PIECE_CHARS", num_chars)
        words = list(encoder._split(marked))
    assert words == encoder._words.findall(marked)
    assert "".join(words) == marked


@pytest.mark.parametrize("text", ["ab " * 10_000, "ab" * 15_000])
def test_long_texts_pause(text: str) -> None:
    """Again and again, whether there are many words or one; short texts never do."""
    pauses: list[int] = []
    tokenizer = load_tokenizer(sentence_piece(), pause=lambda: pauses.append(1))
    assert encode(tokenizer, text) == encode(PIECES, text)
    assert 3 <= len(pauses) <= 8
    pauses.clear()
    encode(tokenizer, text[:1000])
    assert pauses == []


def test_space_prefix_after_special_tokens() -> None:
    """A space is put before text at the start and behind special tokens, if the model wants it."""
    metadata = sentence_piece()
    with_space, without = load(metadata), load(metadata | tokenizer_keys(add_space_prefix=False))
    expected = ids_of(metadata, "▁ab", "<s>", "▁ab")

    assert expected == encode(with_space, "ab<s>ab", parse=True)
    assert ids_of(metadata, "ab", "<s>", "ab") == encode(without, "ab<s>ab", parse=True)


def test_unknown_characters_become_bytes() -> None:
    """A character without a token becomes its UTF-8 bytes."""
    tokenizer = load(sentence_piece())

    assert [3 + byte for byte in "é".encode()] == encode(tokenizer, "é")[1:]


# --- families ---


def test_all_families_cut_a_text_without_loss() -> None:
    """Every known pre-tokenizer compiles, and its pieces hold the whole text."""
    text = "It's 12345 o'clock,\r\n\tnaïve ΑΒΓ αβγ ٣٤ 日本語。😀  \u3000end \x85"
    for name, rules in PRE_TOKENIZERS.items():
        if rules.is_raw:
            continue
        tokenizer = load(byte_level(pre=name, bos_token_id=0))

        assert text == tokenizer.decode(encode(tokenizer, text)), name


def test_default_types_are_normal() -> None:
    """Without token types, only the texts say what is special."""
    metadata = byte_level({"<|im_end|>": CONTROL, "<z>": CONTROL})
    del metadata["tokenizer.ggml.token_type"]
    vocabulary = read_vocabulary(metadata)

    assert set(vocabulary.types) == {TokenType.NORMAL}
    assert load(metadata).is_control(ids_of(metadata, "<|im_end|>")[0])


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["deepseek-llm", "llama-bpe", "gpt-4o", "default"])
def test_long_runs_end(pre: str) -> None:
    """A long run of one kind takes work in proportion: with its square this would take minutes."""
    tokenizer = load(byte_level(pre=pre, bos_token_id=0))
    for unit in (" ", "a", "A", "0", "!", " \n", "中"):
        text = unit * (100_000 // len(unit.encode())) + "x中"

        assert len(text.encode()) == len(encode(tokenizer, text))


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["a", " ", "ab", "é"])
def test_long_runs_end_in_sentence_piece(unit: str) -> None:
    """The heap takes a run of one character in proportion, too."""
    text = unit * (100_000 // len(unit))

    assert f" {text}" == PIECES.decode(encode(PIECES, text))
