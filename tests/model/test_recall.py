"""Recall, on the vocabularies of real model families and with random ways to write a text."""

import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrio.model.answers import ENTRY_OVERHEAD_BYTES, AnswerStore
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.matcher import TextMatcher
from kvtrio.model.recall import Encoded, Recall
from kvtrio.model.tokenizer import Fragment, Tokenizer, load_tokenizer

FAMILIES = ("llama-spm", "phi-3", "gpt-2", "qwen2", "deepseek-llm", "gemma-4")
SWALLOWED = b"\t\n\v\f\r"
WITH_SPACE_PREFIX = ("llama-spm", "phi-3")
LIMIT = 1 << 20
LONGEST = 24
"""Bytes of the longest token that is tried."""
HERE, THERE = b"here", b"there"
TEXTS = (
    "Once upon a time, there were 12345 goats; they weren't afraid.\n\n  Then\tcame the wolf.",
    "def f(x):\n    return x  # d\u00e9j\u00e0 vu \u2014 \u4f60 \U0001f9d9\u200d\u2642\ufe0f!!",
    " \u043f\u0440\u0438\u0432\u0435\u0442   \u043c\u0438\u0440 ...\r\n'll <b> <|im_end|> </s>",
)
RESTS = (  # what a template puts behind an answer, then what joins up with its last word
    "{special}\nNext?",
    *("", "Q", "lo!", " And", "\n", "\n\n  x", "'ll do", "7", "\u0301", "end|>"),
)


@frozen(eq=False)
class Family:
    """A tokenizer with the means to write a text in many ways."""

    name: str
    tokenizer: Tokenizer = field(repr=False)
    by_bytes: dict[bytes, int] = field(repr=False)
    special_text: str

    def write(self, text: str, rng: random.Random) -> list[int]:
        """Random tokens that spell ``text``."""
        raw, at = text.encode(), 0
        ids: list[int] = []
        while at < len(raw):
            ends = range(at + 1, min(at + LONGEST, len(raw)) + 1)
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


@pytest.fixture(scope="module")
def families(shared: Path) -> list[Family]:
    return [load(shared / "tokenizer-vectors" / f"{name}.gguf") for name in FAMILIES]


@pytest.fixture(scope="module")
def small(shared: Path) -> Family:
    return load(shared / "tokenizer-vectors" / "llama-spm.gguf")


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
    rest = list(prompt.ids[kept:])
    if family.name == "phi-3" and kept and rest != plain[len(plain) - len(rest) :]:
        # Its special tokens swallow the spaces behind them; written with ordinary tokens, as models
        # may, they do not, so that the text up to the next special token can begin otherwise.
        controls = [i for i, token in enumerate(rest) if family.tokenizer.is_control(token)]
        rest = rest[controls[0] :] if controls else []
    assert rest == plain[len(plain) - len(rest) :]
    if not kept:
        assert list(prompt.ids) == plain
        return
    spelled, expected = family.spelled(prompt.ids), family.spelled(plain)
    if family.name in WITH_SPACE_PREFIX:  # these begin each fragment with a space of their own
        spelled, expected = spelled.replace(b" ", b""), expected.replace(b" ", b"")
    if family.name == "phi-3":
        # Special tokens swallow the spaces behind them: of text, not of what a model wrote there.
        spelled, expected = (each.translate(None, SWALLOWED) for each in (spelled, expected))
    assert spelled == expected


# --- what a user sees ---


def test_an_answer_with_other_tokens_keeps_them(family: Family) -> None:
    """Text that was written with unusual tokens comes back with exactly these."""
    recall = Recall(family.tokenizer, AnswerStore(LIMIT))
    ids = [family.by_bytes[letter] for letter in (b"h", b"e", b"l", b"lo", b"!")]
    first = recall.encode(HERE, "Say hello:")
    recall.note(first, ids, "hello!")
    text = "Say hello:hello!" + family.special_text + "Thanks"
    second = recall.encode(HERE, text)
    assert list(second.ids[: len(first.ids) + 5]) == [*first.ids, *ids]
    assert second.num_recalled_tokens == 5
    assert list(second.ids) != family.plain(text)
    check(family, second, text)


@pytest.mark.parametrize(
    ("spans", "number"),
    [([], 0), ([(0, 4)], 0), ([(4, 10)], 5), ([(5, 10)], 0), ([(4, 6), (6, 10)], 5)],
)
def test_tokens_are_kept_where_an_answer_stands(
    family: Family, spans: list[tuple[int, int]], number: int
) -> None:
    """And nowhere else; the parts are given in characters, not bytes."""
    recall = Recall(family.tokenizer, AnswerStore(LIMIT))
    ids = [family.by_bytes[letter] for letter in (b"h", b"e", b"l", b"lo", b"!")]
    recall.note(recall.encode(HERE, "\u4f60\u4f60\u4f60:"), ids, "hello!")
    text = "\u4f60\u4f60\u4f60:hello!" + family.special_text
    again = recall.encode(HERE, text, lambda: spans)
    assert again.num_recalled_tokens == number
    check(family, again, text)


@pytest.mark.parametrize(("end", "number"), [(14, 4), (13, 2), (9, 2), (8, 2), (7, 0)])
def test_tokens_are_kept_up_to_one_that_leaves_the_answer(
    qwen: Family, end: int, number: int
) -> None:
    """What begins in an answer and goes on beyond it is ordinary text, and so is all behind."""
    recall = Recall(qwen.tokenizer, AnswerStore(LIMIT))
    ids = [qwen.by_bytes[piece] for piece in (b" s", b"ay", b" hel", b"lo")]
    recall.note(recall.encode(HERE, "They"), ids, " say hello")
    again = recall.encode(HERE, "They say hello. Fine.", lambda: [(4, end), (15, 21)])
    assert again.num_recalled_tokens == number
    check(qwen, again, "They say hello. Fine.")


def test_where_answers_stand_is_asked_only_if_something_is_known(small: Family) -> None:
    """It costs a rendering."""
    recall = Recall(small.tokenizer, AnswerStore(LIMIT))
    text = "a:" + small.special_text
    assert list(recall.encode(HERE, text, lambda: 1 // 0).ids) == small.plain(text)


def test_a_continued_text_keeps_all_but_the_joined_token(qwen: Family) -> None:
    """Row 5 of the field reports: two forced ids again and again, then more text behind them."""
    pair = [qwen.by_bytes[b" go"], qwen.by_bytes[b"at"]]
    assert qwen.plain(" goat") != pair
    recall = Recall(qwen.tokenizer, AnswerStore(LIMIT))
    first = recall.encode(HERE, "The farm has")
    recall.note(first, pair * 4, " goat" * 4)
    second = recall.encode(HERE, "The farm has" + " goat" * 4 + "Q")
    assert list(second.ids[:-1]) == [*first.ids, *pair * 4]


def test_the_border_moves_back_to_where_words_part(qwen: Family) -> None:
    """A word that the new text completes is encoded as one; what lies before it is kept."""
    recall = Recall(qwen.tokenizer, AnswerStore(LIMIT))
    ids = [qwen.by_bytes[piece] for piece in (b" s", b"ay", b" hel")]
    first = recall.encode(HERE, "They")
    recall.note(first, ids, " say hel")
    second = recall.encode(HERE, "They say hello")
    assert list(second.ids) == [*first.ids, *ids[:2], qwen.by_bytes[b" hello"]]


def test_a_stop_string_inside_a_token_drops_that_token(qwen: Family) -> None:
    """Row 16: only tokens whose text is wholly in the answer count, whatever was computed."""
    recall = Recall(qwen.tokenizer, AnswerStore(LIMIT))
    ids = qwen.write("A: y", random.Random(1))
    ids += [qwen.by_bytes[b"es"], qwen.by_bytes[b" no"]]
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
    recall = Recall(family.tokenizer, AnswerStore(LIMIT))
    end = max(i for i in family.tokenizer.eog_ids if family.tokenizer.is_control(i))
    ids = family.write("fine", random.Random(2))
    first = recall.encode(HERE, "Well?")
    recall.note(first, [*ids, end, *ids], "fine")
    second = recall.encode(HERE, "Well?fine" + family.special_text)
    assert list(second.ids) == [*first.ids, *ids, end]
    assert second.num_recalled_tokens == len(ids)


@pytest.mark.parametrize("tail", [b"\xf0", b"\xf0\x9f\x98", b"\xf0\x9f\x98AA"])
def test_an_unfinished_character_is_dropped(family: Family, tail: bytes) -> None:
    """An answer is recalled up to the first bytes that were no character, however many they were
    and whatever came after them."""
    recall = Recall(family.tokenizer, AnswerStore(LIMIT))
    ids = family.write("ab", random.Random(3)) + [family.by_bytes[bytes([b])] for b in tail]
    written = answer(family, ids)
    assert written == "ab\ufffd" + "A" * tail.count(b"A")
    first = recall.encode(HERE, "x:")
    recall.note(first, ids, written)
    text = "x:" + written + family.special_text
    second = recall.encode(HERE, text)
    assert list(second.ids[: num_kept(second)]) == [*first.ids, *ids[: -len(tail)]]
    check(family, second, text)


def test_special_text_that_the_model_spelled_stays_plain(family: Family) -> None:
    """An answer that spells a special token with ordinary tokens does not become that token; what
    follows is encoded as it is behind the special token."""
    recall = Recall(family.tokenizer, AnswerStore(LIMIT))
    special = family.special_text
    ids = [family.by_bytes[bytes([byte])] for byte in special.encode()]
    first = recall.encode(HERE, "Spell it:")
    recall.note(first, ids, special)
    second = recall.encode(HERE, "Spell it:" + special + "\nok")
    assert list(second.ids[: num_kept(second)]) == [*first.ids, *ids]
    rest = family.tokenizer.encode("\nok", add_special=False, parse_special=True)
    assert list(second.ids[num_kept(second) :]) == rest


def test_an_edit_at_a_special_token_leaves_the_rest_whole(small: Family) -> None:
    """Behind a kept special text the rest begins as it does anywhere behind a special token."""
    recall = Recall(small.tokenizer, AnswerStore(LIMIT))
    special = small.special_text
    ids = [small.by_bytes[bytes([byte])] for byte in (special + "\u4f61").encode()]
    first = recall.encode(HERE, "Spell it:")
    recall.note(first, ids, special + "\u4f61")
    second = recall.encode(HERE, "Spell it:" + special + "\u4f60")
    assert list(second.ids[: num_kept(second)]) == [*first.ids, *ids[:-3]]
    rest = small.tokenizer.encode("\u4f60", add_special=False, parse_special=True)
    assert list(second.ids[num_kept(second) :]) == rest


def test_a_token_without_text_ends_what_is_kept(family: Family) -> None:
    """A special token that was generated is never taken for text that merely looks like it."""
    recall = Recall(family.tokenizer, AnswerStore(LIMIT))
    special = family.special_text
    (end,) = family.tokenizer.encode(special, add_special=False, parse_special=True)
    ids = [family.by_bytes[bytes([byte])] for byte in special.encode()]
    first = recall.encode(HERE, "Spell it:")
    recall.note(first, [end, *ids], special)
    assert recall.encode(HERE, "Spell it:" + special).num_recalled_tokens == 0


def test_a_special_token_across_the_border_is_one_token(qwen: Family) -> None:
    """Answer and new text that form a special token together are encoded as the tokenizer would."""
    recall = Recall(qwen.tokenizer, AnswerStore(LIMIT))
    ids = [qwen.by_bytes[piece] for piece in (b"o", b"k", b"<", b"|")]
    first = recall.encode(HERE, "So:")
    recall.note(first, ids, "ok<|")
    second = recall.encode(HERE, "So:ok<|im_end|>")
    (end,) = qwen.tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
    assert list(second.ids) == [*first.ids, *ids[:2], end]


def test_a_trimmed_answer_is_kept_up_to_the_trimmed_token(qwen: Family) -> None:
    """A template that strips white space costs the tokens that held it, not the answer."""
    recall = Recall(qwen.tokenizer, AnswerStore(LIMIT))
    ids = [qwen.by_bytes[piece] for piece in (b"O", b"k", b".", b"\n\n")]
    first = recall.encode(HERE, "So:")
    recall.note(first, ids, "Ok.\n\n")
    second = recall.encode(HERE, "So:Ok." + qwen.special_text)
    assert list(second.ids[:-1]) == [*first.ids, *ids[:3]]


def test_a_conversation_keeps_every_answer(family: Family) -> None:
    """Turn after turn all answers keep their ids, and one entry is all that is held."""
    rng = random.Random(4)
    recall = Recall(family.tokenizer, AnswerStore(LIMIT))
    text = "System text." + family.special_text
    computed: list[int] = []
    for turn in range(5):
        text += f"Question {turn}{family.special_text}"
        prompt = recall.encode(HERE, text)
        assert list(prompt.ids[: len(computed)]) == computed
        ids = family.write(f"Answer {turn}, and so on.", rng)
        recall.note(prompt, ids, answer(family, ids))
        computed = [*prompt.ids, *ids]
        text += answer(family, ids) + family.special_text
        assert recall.store.num_entries == 1
    edited = text.replace("Question 4", "Other")
    again = recall.encode(HERE, edited)
    assert again.num_recalled_tokens > 3 * len("Answer") // 2
    check(family, again, edited)


def test_an_edited_answer_keeps_what_comes_before_the_edit(qwen: Family) -> None:
    """A changed answer begins with the old one's ids, and the old one is still known."""
    recall = Recall(qwen.tokenizer, AnswerStore(LIMIT))
    ids = [qwen.by_bytes[piece] for piece in (b" O", b"ne", b" tw", b"o", b" th", b"ree")]
    first = recall.encode(HERE, "Count:")
    recall.note(first, ids, " One two three")
    edited = recall.encode(HERE, "Count: One two four" + qwen.special_text)
    assert list(edited.ids[: num_kept(edited)]) == [*first.ids, *ids[:4]]
    recall.note(edited, ids, " One two three")
    old = recall.encode(HERE, "Count: One two three" + qwen.special_text)
    assert list(old.ids[:-1]) == [*first.ids, *ids]


def test_of_several_answers_each_is_found(qwen: Family) -> None:
    """Answers to the same prompt are held side by side."""
    recall = Recall(qwen.tokenizer, AnswerStore(LIMIT))
    first = recall.encode(HERE, "Name one:")
    names = ["cat", "cats", "dog", "cow"]
    written = {name: [qwen.by_bytes[bytes([b])] for b in name.encode()] for name in names}
    for name in names:
        recall.note(first, written[name], name)
    for name in names:
        second = recall.encode(HERE, f"Name one:{name}{qwen.special_text}")
        assert list(second.ids[:-1]) == [*first.ids, *written[name]]
    assert recall.store.num_entries == 4


def test_prompt_text_is_encoded_as_it_comes(family: Family) -> None:
    """What was only ever prompt is never recalled, however much of it comes back."""
    recall = Recall(family.tokenizer, AnswerStore(LIMIT))
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
    recall = Recall(family.tokenizer, AnswerStore(LIMIT))
    recall.note(recall.encode(HERE, "a"), qwen.write("b", random.Random(6)), "b")
    assert recall.store.num_entries == 0
    assert list(recall.encode(HERE, "ab").ids) == family.plain("ab")


class LossyTokenizer:
    """Characters as tokens, but none for the letter z: it is lost, as in some vocabularies."""

    add_eos = False

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [ord(char) for char in text if char != "z"]

    def fragments(self, text: str, *, parse_special: bool) -> list[Fragment]:
        return [Fragment(text, True)]

    def encode_fragment(self, fragment: Fragment) -> list[int]:
        return self.encode(str(fragment.content), add_special=False, parse_special=True)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def is_control(self, token_id: int) -> bool:
        return False


def test_a_vocabulary_that_loses_characters_shifts_no_border() -> None:
    """Where the encoding does not spell the text there is no telling which token ends where."""
    tokenizer = LossyTokenizer()
    recall = Recall(tokenizer, AnswerStore(LIMIT))
    recall.note(recall.encode(HERE, "a:"), [ord("x"), ord("y")], "xy")
    for text in ("a:xyzq", "a:xyqz", "a:xyq"):
        plain = tokenizer.encode(text, add_special=True, parse_special=True)
        assert list(recall.encode(HERE, text).ids) == plain
    assert recall.encode(HERE, "a:xyq").num_recalled_tokens == 2


# --- in general ---


Answer = tuple[int, int, str | None]
"""Seed of the way to write it, number of the text, stop string."""
Turn = tuple[Answer, int]
"""An answer and the number of what follows it."""
ANSWERS = st.tuples(
    st.integers(0, 2**32),
    st.integers(0, len(TEXTS)),
    st.sampled_from([None, "e", "\n", "w"]),
)


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
    turns=st.lists(st.tuples(ANSWERS, st.integers(0, len(RESTS) - 1)), min_size=1, max_size=4),
    change=st.tuples(st.floats(0, 1), st.sampled_from(["", "x", " ", "\u00e9", "<|im_end|>"])),
)
def test_ids_spell_the_text(
    families: Sequence[Family], turns: Sequence[Turn], change: tuple[float, str]
) -> None:
    """Whatever was generated and however the text goes on or was edited: kept ids are those that
    were computed, the rest is as the tokenizer would have it, and together they spell the text."""
    for family in families:
        converse(family, turns, change)


def converse(family: Family, turns: Sequence[Turn], change: tuple[float, str]) -> None:
    recall = Recall(family.tokenizer, AnswerStore(LIMIT))
    text = TEXTS[0][:20] + family.special_text
    computed: list[tuple[int, ...]] = [()]
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


@pytest.mark.slow
def test_an_answer_before_a_special_token_is_kept_whole(families: list[Family]) -> None:
    """As chat templates end each message with one, all ids of all answers are kept in chats."""
    for family in families:
        for seed in range(60):
            recall = Recall(family.tokenizer, AnswerStore(LIMIT))
            first = recall.encode(HERE, "user" + family.special_text)
            ids, text = generated(family, seed, seed % len(TEXTS), None)
            recall.note(first, ids, text)
            second = recall.encode(HERE, f"user{family.special_text}{text}{family.special_text}!")
            assert second.ids[: len(first.ids) + len(ids)] == (*first.ids, *ids)


# --- the store ---


def held(recall: Recall) -> int:
    return sum(entry.num_bytes for shelf in recall.store._by_text.values() for entry in shelf)


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(0, 5 * ENTRY_OVERHEAD_BYTES),
    notes=st.lists(st.tuples(st.sampled_from([HERE, THERE]), st.text("ab", max_size=6))),
)
def test_the_limit_is_never_exceeded(
    small: Family, limit: int, notes: list[tuple[bytes, str]]
) -> None:
    """Whatever comes, the bytes held are counted right and stay within the limit."""
    recall = Recall(small.tokenizer, AnswerStore(limit))
    for namespace, text in notes:
        prompt = recall.encode(namespace, text)
        check(small, prompt, text)
        recall.note(prompt, small.write("ba", random.Random(len(text))), "ba")
        assert recall.store.num_bytes == held(recall) <= limit
        assert recall.store.num_entries == sum(map(len, recall.store._by_text.values()))
        for shelf in recall.store._by_text.values():
            assert [entry.text for entry in shelf] == sorted({entry.text for entry in shelf})


def test_what_was_used_least_recently_goes_first(small: Family) -> None:
    """A conversation that goes on stays; one that does not makes room."""
    recall = Recall(small.tokenizer, AnswerStore(3 * ENTRY_OVERHEAD_BYTES))
    letters = [small.by_bytes[letter] for letter in (b"a", b"b", b"a", b"b")]

    def is_held(name: str) -> bool:
        return recall.encode(HERE, f"{name}:abab</s>").num_recalled_tokens == 4

    for name in ("one", "two"):
        recall.note(recall.encode(HERE, f"{name}:"), letters, "abab")
    assert is_held("one")
    recall.note(recall.encode(HERE, "three:"), letters, "abab")
    assert [is_held(name) for name in ("one", "two", "three")] == [True, False, True]


def test_what_is_too_large_displaces_nothing(small: Family) -> None:
    """A conversation beyond the whole limit is not held, and the others stay."""
    recall = Recall(small.tokenizer, AnswerStore(3 * ENTRY_OVERHEAD_BYTES))
    letters = [small.by_bytes[letter] for letter in (b"a", b"b")]
    recall.note(recall.encode(HERE, "one:"), letters, "ab")
    recall.note(recall.encode(HERE, "two:" * ENTRY_OVERHEAD_BYTES), letters, "ab")
    assert recall.encode(HERE, "one:ab</s>").num_recalled_tokens == 2
    assert recall.store.num_entries == 1


def test_a_limit_of_nothing_holds_nothing(small: Family) -> None:
    """Switched off, prompts are encoded as the tokenizer does it."""
    recall = Recall(small.tokenizer, AnswerStore(0))
    recall.note(recall.encode(HERE, "a:"), small.write("abab", random.Random(7)), "abab")
    assert recall.store.num_entries == recall.store.num_bytes == 0
    assert list(recall.encode(HERE, "a:abab").ids) == small.plain("a:abab")


def test_a_lookup_compares_few_texts(small: Family) -> None:
    """Of a thousand stored texts with the same long beginning a look-up reads about ten."""
    num_read = 0

    class CountedText(bytes):
        def __lt__(self, other: bytes) -> bool:
            nonlocal num_read
            num_read += 1
            return bytes.__lt__(self, other)

    recall = Recall(small.tokenizer, AnswerStore(1 << 30))
    letters = small.write("abab", random.Random(8))
    for number in range(1_000):
        name = "x" * 5_000 + f"{number:04}:"
        recall.note(Encoded(HERE, CountedText(name.encode()), (1, 2)), letters, "abab")
    assert recall.store.num_entries == 1_000
    for entry in recall.store._by_text[HERE]:
        object.__setattr__(entry, "text", CountedText(entry.text))
    num_read = 0
    assert recall.store.find(HERE, ("x" * 5_000 + "0777:abab").encode()) is not None
    assert 0 < num_read <= 11


def test_nothing_held_shows_in_a_repr(small: Family) -> None:
    """Texts and ids stay out of whatever prints these objects."""
    recall = Recall(small.tokenizer, AnswerStore(LIMIT))
    recall.note(recall.encode(HERE, "CANARY:"), small.write("CANARY", random.Random(9)), "CANARY")
    encoded = recall.encode(HERE, "CANARY:CANARY")
    assert encoded.source is not None
    shown = repr(recall) + repr(encoded) + repr(encoded.source)
    assert "CANARY" not in shown
    assert len(shown) < 600
