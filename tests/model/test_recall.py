"""Recall, on the vocabularies of real model families and with random ways to write a text."""

import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.matcher import TextMatcher
from kvtrio.model.recall import ENTRY_OVERHEAD_BYTES, Encoded, Recall
from kvtrio.model.tokenizer import Tokenizer, load_tokenizer

FAMILIES = ("llama-spm", "phi-3", "gpt-2", "qwen2", "deepseek-llm", "gemma-4")
WITH_SPACE_PREFIX = ("llama-spm", "phi-3")
LIMIT = 1 << 20
HERE, THERE = b"here", b"there"
TEXTS = (
    "Once upon a time, there were 12345 little goats; they weren't afraid.\n\n  Then\tcame the wolf.",
    "def f(x):\n    return x  # d\u00e9j\u00e0 vu \u2014 \u4f60\u597d\u4e16\u754c \U0001f9d9\u200d\u2642\ufe0f!!",
    " \u043f\u0440\u0438\u0432\u0435\u0442   \u043c\u0438\u0440 ...\r\n'll 'S <b>bold</b> <|im_end|> </s>",
)
# A special token of each family comes first, then what joins up with the answer's last word.
RESTS = ("{special}\nNext?", "", "Q", "lo!", " And", "\n", "\n\n  x", "'ll do", "7", "\u0301", "end|>")

Ids = Sequence[int]


@frozen(eq=False)
class Family:
    """A tokenizer with the means to write a text in many ways."""

    name: str
    tokenizer: Tokenizer
    by_bytes: dict[bytes, int]
    special_text: str

    @property
    def longest(self) -> int:
        return 24

    def write(self, text: str, rng: random.Random) -> list[int]:
        """Random tokens that spell ``text``."""
        raw, at, ids = text.encode(), 0, []
        while at < len(raw):
            ends = range(at + 1, min(at + self.longest, len(raw)) + 1)
            ways = [self.by_bytes[raw[at:end]] for end in ends if raw[at:end] in self.by_bytes]
            ids.append(rng.choice(ways))
            at += len(self.tokenizer.token_bytes(ids[-1]))
        return ids

    def plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=True, parse_special=True)

    def spelled(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.tokenizer.token_bytes, ids))

    def rest(self, number: int) -> str:
        return RESTS[number].format(special=self.special_text)


@cache
def load(path: Path) -> Family:
    with open_gguf(path) as file:
        tokenizer = load_tokenizer(file.metadata)
    visible = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_control(i)]
    by_bytes = {tokenizer.token_bytes(i): i for i in reversed(visible)}
    end = max(i for i in tokenizer.eog_ids if tokenizer.is_control(i))
    return Family(path.stem, tokenizer, by_bytes, tokenizer.token_bytes(end).decode())


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, shared: Path) -> Family:
    return load(shared / "tokenizer-vectors" / f"{request.param}.gguf")


@pytest.fixture
def qwen(shared: Path) -> Family:
    return load(shared / "tokenizer-vectors" / "qwen2.gguf")


def answer(family: Family, ids: Iterable[int], stops: Sequence[str] = ()) -> str:
    """The text that a caller gets for generated ``ids``."""
    matcher = TextMatcher(family.tokenizer, stops)
    texts = []
    for token_id in ids:
        piece = matcher.push(token_id)
        texts.append(piece.text)
        if piece.stopped:
            break
    return "".join([*texts, matcher.flush()])


def num_kept(prompt: Encoded) -> int:
    return prompt.borders.counts[-1] if prompt.borders else 0


def check(family: Family, prompt: Encoded, text: str) -> None:
    """The rest is the end of the ordinary encoding, and everything together spells the text."""
    plain = family.plain(text)
    kept = num_kept(prompt)
    rest = prompt.ids[kept:]
    assert list(rest) == plain[len(plain) - len(rest) :]
    if not kept:
        assert list(prompt.ids) == plain
        return
    assert prompt.text[prompt.borders.ends[-1] :] == text.encode()[prompt.borders.ends[-1] :]
    spelled, expected = family.spelled(prompt.ids), family.spelled(plain)
    if family.name in WITH_SPACE_PREFIX:  # these begin each fragment with a space of their own
        spelled, expected = spelled.replace(b" ", b""), expected.replace(b" ", b"")
    assert spelled == expected


# --- what a user sees ---


def test_an_answer_with_other_tokens_keeps_them(family: Family) -> None:
    """Text that was written with unusual tokens comes back with exactly these."""
    recall = Recall(family.tokenizer, LIMIT)
    ids = [family.by_bytes[letter] for letter in (b"h", b"e", b"l", b"lo", b"!")]
    first = recall.encode(HERE, "Say hello:")
    recall.note(first, ids, "hello!")
    text = "Say hello:hello!" + family.special_text + "Thanks"
    second = recall.encode(HERE, text)
    assert list(second.ids[: len(first.ids) + 5]) == [*first.ids, *ids]
    assert second.num_recalled_tokens == 5
    assert list(second.ids) != family.plain(text)
    check(family, second, text)


def test_a_continued_text_keeps_all_but_the_joined_token(qwen: Family) -> None:
    """Row 5 of the field reports: two forced ids again and again, then more text behind them."""
    pair = [qwen.by_bytes[b" go"], qwen.by_bytes[b"at"]]
    assert qwen.plain(" goat") != pair
    recall = Recall(qwen.tokenizer, LIMIT)
    first = recall.encode(HERE, "The farm has")
    recall.note(first, pair * 4, " goat" * 4)
    second = recall.encode(HERE, "The farm has" + " goat" * 4 + "Q")
    assert list(second.ids[:-1]) == [*first.ids, *pair * 4]


def test_the_border_moves_back_to_where_words_part(qwen: Family) -> None:
    """A word that the new text completes is encoded as one; what lies before it is kept."""
    recall = Recall(qwen.tokenizer, LIMIT)
    ids = [qwen.by_bytes[piece] for piece in (b" s", b"ay", b" hel")]
    first = recall.encode(HERE, "They")
    recall.note(first, ids, " say hel")
    second = recall.encode(HERE, "They say hello")
    assert list(second.ids) == [*first.ids, *ids[:2], qwen.by_bytes[b" hello"]]


def test_a_stop_string_inside_a_token_drops_that_token(qwen: Family) -> None:
    """Row 16: only tokens whose text is wholly in the answer count, whatever was computed."""
    recall = Recall(qwen.tokenizer, LIMIT)
    ids = qwen.write("A: y", random.Random(1)) + [qwen.by_bytes[b"es"], qwen.by_bytes[b" no"]]
    text = answer(qwen, ids, stops=["s n"])
    assert text == "A: ye"
    first = recall.encode(HERE, "Q?\n")
    recall.note(first, ids, text)
    second = recall.encode(HERE, "Q?\n" + text + qwen.special_text)
    assert second.num_recalled_tokens <= len(ids) - 2
    assert qwen.by_bytes[b"es"] not in second.ids
    check(qwen, second, "Q?\n" + text + qwen.special_text)


def test_an_end_token_is_no_part_of_an_answer(family: Family) -> None:
    """The token that ended the generation has no text, so the client cannot have sent it."""
    recall = Recall(family.tokenizer, LIMIT)
    end = max(i for i in family.tokenizer.eog_ids if family.tokenizer.is_control(i))
    ids = family.write("fine", random.Random(2))
    first = recall.encode(HERE, "Well?")
    recall.note(first, [*ids, end, *ids], "fine")
    second = recall.encode(HERE, "Well?fine" + family.special_text)
    assert list(second.ids) == [*first.ids, *ids, end]
    assert second.num_recalled_tokens == len(ids)


def test_an_unfinished_character_is_dropped(family: Family) -> None:
    """An answer that was cut inside a character is recalled up to the character before it."""
    recall = Recall(family.tokenizer, LIMIT)
    ids = family.write("ab", random.Random(3)) + [family.by_bytes[b"\xf0"]]
    text = answer(family, ids)
    assert text == "ab\ufffd"
    first = recall.encode(HERE, "x:")
    recall.note(first, ids, text)
    second = recall.encode(HERE, "x:ab\ufffd" + family.special_text)
    assert list(second.ids[: num_kept(second)]) == [*first.ids, *ids[:-1]]
    check(family, second, "x:ab\ufffd" + family.special_text)


def test_special_text_that_the_model_spelled_stays_plain(family: Family) -> None:
    """An answer that spells a special token with ordinary tokens does not become that token."""
    recall = Recall(family.tokenizer, LIMIT)
    special = family.special_text
    ids = [family.by_bytes[bytes([byte])] for byte in special.encode()]
    first = recall.encode(HERE, "Spell it:")
    recall.note(first, ids, special)
    second = recall.encode(HERE, "Spell it:" + special + special + "ok")
    assert list(second.ids[: num_kept(second)]) == [*first.ids, *ids]
    assert family.plain("Spell it:" + special) != [*first.ids, *ids]
    check(family, second, "Spell it:" + special + special + "ok")


def test_a_special_token_across_the_border_is_one_token(qwen: Family) -> None:
    """Answer and new text that form a special token together are encoded as the tokenizer would."""
    recall = Recall(qwen.tokenizer, LIMIT)
    ids = [qwen.by_bytes[piece] for piece in (b"o", b"k", b"<", b"|")]
    first = recall.encode(HERE, "So:")
    recall.note(first, ids, "ok<|")
    second = recall.encode(HERE, "So:ok<|im_end|>")
    (end,) = qwen.tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
    assert list(second.ids) == [*first.ids, *ids[:2], end]


def test_a_trimmed_answer_is_kept_up_to_the_trimmed_token(qwen: Family) -> None:
    """A template that strips white space costs the tokens that held it, not the answer."""
    recall = Recall(qwen.tokenizer, LIMIT)
    ids = [qwen.by_bytes[piece] for piece in (b"O", b"k", b".", b"\n\n")]
    first = recall.encode(HERE, "So:")
    recall.note(first, ids, "Ok.\n\n")
    second = recall.encode(HERE, "So:Ok." + qwen.special_text)
    assert list(second.ids[:-1]) == [*first.ids, *ids[:3]]


def test_a_conversation_keeps_every_answer(family: Family) -> None:
    """Turn after turn all answers keep their ids, and one entry is all that is held."""
    rng = random.Random(4)
    recall = Recall(family.tokenizer, LIMIT)
    text, computed = "System text." + family.special_text, []
    for turn in range(5):
        text += f"Question {turn}{family.special_text}"
        prompt = recall.encode(HERE, text)
        assert list(prompt.ids[: len(computed)]) == computed
        ids = family.write(f"Answer {turn}, and so on.", rng)
        recall.note(prompt, ids, answer(family, ids))
        computed = [*prompt.ids, *ids]
        text += answer(family, ids) + family.special_text
        assert recall.num_entries == 1
    edited = text.replace("Question 4", "Other")
    again = recall.encode(HERE, edited)
    assert again.num_recalled_tokens > 3 * len("Answer") // 2
    check(family, again, edited)


def test_of_several_answers_each_is_found(qwen: Family) -> None:
    """Answers to the same prompt are held side by side."""
    recall = Recall(qwen.tokenizer, LIMIT)
    first = recall.encode(HERE, "Name one:")
    names = ["cat", "cats", "dog", "cow"]
    written = {name: [qwen.by_bytes[bytes([b])] for b in name.encode()] for name in names}
    for name in names:
        recall.note(first, written[name], name)
    for name in names:
        second = recall.encode(HERE, f"Name one:{name}{qwen.special_text}")
        assert list(second.ids[:-1]) == [*first.ids, *written[name]]
    assert recall.num_entries == 4


def test_prompt_text_is_encoded_as_it_comes(family: Family) -> None:
    """What was only ever prompt is never recalled, however much of it comes back."""
    recall = Recall(family.tokenizer, LIMIT)
    prompt = TEXTS[0] + family.special_text
    recall.note(recall.encode(HERE, prompt), family.write("Aha", random.Random(5)), "Aha")
    for end in range(0, len(prompt), 7):
        for text in (prompt[:end], prompt[:end] + "zz", prompt + "zz" + prompt[:end]):
            encoded = recall.encode(HERE, text)
            assert list(encoded.ids) == family.plain(text)
            assert encoded.num_recalled_tokens == 0


def test_no_end_token_stands_inside_a_conversation(qwen: Family) -> None:
    """With a vocabulary that ends each prompt with a token, there is nothing to recall."""
    family = evolve(qwen, tokenizer=evolve(qwen.tokenizer, add_eos=True))
    recall = Recall(family.tokenizer, LIMIT)
    recall.note(recall.encode(HERE, "a"), qwen.write("b", random.Random(6)), "b")
    assert recall.num_entries == 0
    assert list(recall.encode(HERE, "ab").ids) == family.plain("ab")


# --- in general ---


@st.composite
def answers(draw: st.DrawFn) -> tuple[int, int, str | None]:
    """(seed of the way to write it, number of the text, stop string)."""
    stop = draw(st.sampled_from([None, "e", "\n", "w"]))
    return draw(st.integers(0, 2**32)), draw(st.integers(0, len(TEXTS))), stop


def generated(family: Family, seed: int, number: int, stop: str | None) -> tuple[list[int], str]:
    """Tokens that spell a text, or any tokens at all; with the text that the caller gets."""
    rng = random.Random(seed)
    if number < len(TEXTS):
        start = rng.randrange(len(TEXTS[number]))
        ids = family.write(TEXTS[number][start : start + rng.randrange(60)], rng)
    else:
        ids = [rng.randrange(family.tokenizer.vocab_size) for _ in range(rng.randrange(12))]
    return ids, answer(family, ids, () if stop is None else (stop,))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(st.tuples(answers(), st.integers(0, len(RESTS) - 1)), min_size=1, max_size=4),
    change=st.tuples(st.floats(0, 1), st.sampled_from(["", "x", " ", "\u00e9", "<|im_end|>"])),
)
def test_ids_spell_the_text(
    families: Iterable[Family], turns: list[tuple[tuple[int, int, str | None], int]], change: object
) -> None:
    """Whatever was generated and however the text goes on or was edited: kept ids are those that
    were computed, the rest is as the tokenizer would have it, and together they spell the text."""
    for family in families:
        converse(family, turns, change)


def converse(family: Family, turns: list[tuple[tuple[int, int, str | None], int]], change) -> None:
    recall = Recall(family.tokenizer, LIMIT)
    text, computed = TEXTS[0][:20] + family.special_text, [()]
    for how, rest in turns:
        prompt = recall.encode(HERE, text)
        check(family, prompt, text)
        assert any(seen[: num_kept(prompt)] == prompt.ids[: num_kept(prompt)] for seen in computed)
        ids, written = generated(family, *how)
        recall.note(prompt, ids, written)
        computed.append((*prompt.ids, *ids))
        text += written + family.rest(rest)
        assert list(recall.encode(THERE, text).ids) == family.plain(text)
    place, inserted = int(change[0] * len(text)), change[1]
    edited = text[:place] + inserted + text[place + 1 :]
    check(family, recall.encode(HERE, edited), edited)


@pytest.fixture(scope="module")
def families(shared: Path) -> list[Family]:
    return [load(shared / "tokenizer-vectors" / f"{name}.gguf") for name in FAMILIES]


@pytest.mark.slow
def test_an_answer_before_a_special_token_is_kept_whole(families: list[Family]) -> None:
    """As chat templates end each message with one, all ids of all answers are kept in chats."""
    for family in families:
        for seed in range(60):
            recall = Recall(family.tokenizer, LIMIT)
            first = recall.encode(HERE, "user" + family.special_text)
            ids, text = generated(family, seed, seed % len(TEXTS), None)
            recall.note(first, ids, text)
            second = recall.encode(HERE, f"user{family.special_text}{text}{family.special_text}!")
            assert second.ids[: len(first.ids) + len(ids)] == (*first.ids, *ids)


# --- the store ---


def held(recall: Recall) -> int:
    return sum(entry.num_bytes for shelf in recall._by_text.values() for entry in shelf)


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(0, 5 * ENTRY_OVERHEAD_BYTES),
    notes=st.lists(st.tuples(st.sampled_from([HERE, THERE]), st.text("ab", max_size=6))),
)
def test_the_limit_is_never_exceeded(
    small: Family, limit: int, notes: list[tuple[bytes, str]]
) -> None:
    """Whatever comes, the bytes held are counted right and stay within the limit."""
    recall = Recall(small.tokenizer, limit)
    for namespace, text in notes:
        prompt = recall.encode(namespace, text)
        check(small, prompt, text)
        recall.note(prompt, small.write("ba", random.Random(len(text))), "ba")
        assert recall.num_bytes == held(recall) <= limit
        assert recall.num_entries == sum(map(len, recall._by_text.values()))
        for shelf in recall._by_text.values():
            assert [entry.text for entry in shelf] == sorted({entry.text for entry in shelf})


@pytest.fixture(scope="module")
def small(shared: Path) -> Family:
    return load(shared / "tokenizer-vectors" / "llama-spm.gguf")


def test_what_was_used_least_recently_goes_first(small: Family) -> None:
    """A conversation that goes on stays; one that does not makes room."""
    recall = Recall(small.tokenizer, 3 * ENTRY_OVERHEAD_BYTES)
    letters = [small.by_bytes[letter] for letter in (b"a", b"b", b"a", b"b")]

    def is_held(name: str) -> bool:
        return recall.encode(HERE, f"{name}:abab</s>").num_recalled_tokens == 4

    for name in ("one", "two"):
        recall.note(recall.encode(HERE, f"{name}:"), letters, "abab")
    assert is_held("one")
    recall.note(recall.encode(HERE, "three:"), letters, "abab")
    assert [is_held(name) for name in ("one", "two", "three")] == [True, False, True]


def test_a_limit_of_nothing_holds_nothing(small: Family) -> None:
    """Switched off, prompts are encoded as the tokenizer does it."""
    recall = Recall(small.tokenizer, 0)
    recall.note(recall.encode(HERE, "a:"), small.write("abab", random.Random(7)), "abab")
    assert recall.num_entries == recall.num_bytes == 0
    assert list(recall.encode(HERE, "a:abab").ids) == small.plain("a:abab")


def test_a_lookup_compares_few_texts(small: Family) -> None:
    """Of a thousand stored texts with the same long beginning a look-up reads about ten."""
    num_read = 0

    class CountedText(bytes):
        def __lt__(self, other: bytes) -> bool:
            nonlocal num_read
            num_read += 1
            return bytes.__lt__(self, other)

    recall = Recall(small.tokenizer, 1 << 30)
    letters = small.write("abab", random.Random(8))
    for number in range(1_000):
        name = "x" * 5_000 + f"{number:04}:"
        recall.note(Encoded(HERE, CountedText(name.encode()), (1, 2)), letters, "abab")
    assert recall.num_entries == 1_000
    shelf = recall._by_text[HERE]
    for entry in shelf:
        object.__setattr__(entry, "text", CountedText(entry.text))
    num_read = 0
    assert recall._find(HERE, ("x" * 5_000 + "0777:abab").encode()) is not None
    assert 0 < num_read <= 11


def test_nothing_held_shows_in_a_repr(small: Family) -> None:
    """Texts and ids stay out of whatever prints these objects."""
    recall = Recall(small.tokenizer, LIMIT)
    recall.note(recall.encode(HERE, "CANARY:"), small.write("CANARY", random.Random(9)), "CANARY")
    encoded = recall.encode(HERE, "CANARY:CANARY")
    assert encoded.source is not None
    shown = repr(recall) + repr(encoded) + repr(encoded.source)
    assert "CANARY" not in shown
    assert len(shown) < 600
