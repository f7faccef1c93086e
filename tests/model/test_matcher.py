"""From tokens to text: unfinished characters and stop strings."""

from itertools import pairwise

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrio.model.matcher import MAX_STOP_CHARS, MAX_STOPS, PieceDecoder, TextMatcher


@frozen
class Pieces:
    """A tokenizer whose token i stands for ``pieces[i]``; None is a control token."""

    pieces: tuple[bytes | None, ...]

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id] or b"<control>"

    def is_control(self, token_id: int) -> bool:
        return self.pieces[token_id] is None


def matched(pieces: list[bytes | None], *stops: str) -> tuple[list[str], str | None]:
    """The text after each token, the flushed rest at the end; and the stop string met."""
    matcher = TextMatcher(Pieces(tuple(pieces)), stops)
    texts = []
    for token in range(len(pieces)):
        piece = matcher.push(token)
        texts.append(piece.text)
        assert piece.stopped == (matcher.stop_word is not None)
        if piece.stopped:
            break
    return [*texts, matcher.flush()], matcher.stop_word


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the stop string that is complete first ends the text, the longest of those
    that end together."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


def split(data: bytes, cuts: list[int]) -> list[bytes | None]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


def test_stop_string_over_tokens() -> None:
    """A stop string spread over tokens is cut exactly, and nothing of it gets out."""
    texts, stop = matched([b"al", b"pha be", b"ta ga", b"mma!"], "beta gamma")

    assert texts == ["al", "pha ", "", "", ""]
    assert stop == "beta gamma"


def test_no_stop_loses_nothing() -> None:
    """Text that only began like a stop string comes out, at the latest at the end."""
    assert matched([b"al", b"pha be", b"ta ga", b"mma!"], "zzz") == (
        ["al", "pha be", "ta ga", "mma!", ""],
        None,
    )


def test_partial_stop_is_flushed() -> None:
    """A beginning of a stop string that is never finished is text."""
    assert matched([b"one ", b"E", b"ND"], "END?") == (["one ", "", "", "END"], None)
    assert matched([b"aa", b"b", b"ab", b"d"], "abc") == (["a", "", "ab", "abd", ""], None)


def test_earliest_complete_stop_wins() -> None:
    """Of two stop strings the one that is complete first ends the text, however tokens fall."""
    assert matched([b"abcd"], "abcd", "bc") == (["a", ""], "bc")
    assert matched([b"a", b"b", b"cd"], "abcd", "bc") == (["", "", "a", ""], "bc")


def test_longest_of_stops_that_end_together_wins() -> None:
    """Where one stop string ends another, the longer is cut off."""
    assert matched([b"xabc"], "c", "abc", "bc") == (["x", ""], "abc")


@pytest.mark.parametrize("num_pieces", [1, 2, 4])
def test_split_character_is_held_back(num_pieces: int) -> None:
    """The bytes of one emoji in several tokens come out as one character."""
    data = "👍".encode()
    size = 4 // num_pieces
    texts, _ = matched([data[i : i + size] for i in range(0, 4, size)])

    assert [*[""] * (num_pieces - 1), "👍", ""] == texts


def test_invalid_bytes_are_replaced_at_once() -> None:
    """A byte that cannot belong to a character becomes U+FFFD without waiting."""
    assert matched([b"\xff", b"\x80", b"a"]) == (["\ufffd", "\ufffd", "a", ""], None)
    assert matched([b"\xe2\x82", b"a"]) == (["", "\ufffda", ""], None)


def test_unfinished_character_is_flushed() -> None:
    """An end in the middle of a character gives U+FFFD."""
    assert matched([b"a\xf0\x9f"]) == (["a", "\ufffd"], None)


def test_control_tokens_have_no_text() -> None:
    """Control tokens are silent, even inside a character."""
    texts, _ = matched([b"a", None, b"\xc3", None, b"\xa9"])

    assert texts == ["a", "", "", "", "é", ""]


def test_nothing_follows_a_stop() -> None:
    """After the stop, tokens and the flush give no text."""
    matcher = TextMatcher(Pieces((b"a.b", b"c")), (".",))

    assert matcher.push(0).text == "a"
    assert (matcher.push(1).text, matcher.push(1).stopped, matcher.flush()) == ("", True, "")


def test_stop_with_lone_surrogate_counts_as_replacement() -> None:
    """Half an emoji in a stop string is U+FFFD, as everywhere."""
    assert matched([b"x\xff"], "\ud83d") == (["x", ""], "\ufffd")


def test_empty_stops_are_ignored() -> None:
    """An empty stop string stops nothing."""
    assert matched([b"abc"], "") == (["abc", ""], None)


@pytest.mark.parametrize("stops", [["x"] * (MAX_STOPS + 1), ["x" * (MAX_STOP_CHARS + 1)]])
def test_stops_are_bounded(stops: list[str]) -> None:
    """Too many or too long stop strings are refused before anything is built."""
    with pytest.raises(ValueError, match="stop strings"):
        TextMatcher(Pieces(()), stops)


@pytest.mark.slow
def test_long_stops_cost_no_more() -> None:
    """Stop strings that almost match everywhere do not multiply the work."""
    stops = ("a" * (MAX_STOP_CHARS // 2) + "b", *("a" * 10 + chr(0x4E00 + i) for i in range(200)))
    matcher = TextMatcher(Pieces((b"a" * 1_000,)), stops)
    text = "".join(matcher.push(0).text for _ in range(300)) + matcher.flush()

    assert text == "a" * 300_000


def test_decoder_starts_again_after_flush() -> None:
    """A decoder that was flushed holds nothing from before."""
    decoder = PieceDecoder(Pieces((b"\xc3", b"\xa9")))

    assert (decoder.push(0), decoder.flush(), decoder.push(1)) == ("", "\ufffd", "\ufffd")


TEXTS = st.one_of(
    st.binary(max_size=30),
    st.text("abé👍", max_size=20).map(str.encode),
)
STOPS = st.lists(st.text("abé👍\ufffd", min_size=1, max_size=5), max_size=4)
CUTS = st.lists(st.integers(0, 100), max_size=12)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(TEXTS, STOPS, CUTS)
def test_text_does_not_depend_on_tokens(data: bytes, stops: list[str], cuts: list[int]) -> None:
    """However bytes are cut into tokens, the pieces and the flush make up the decoded text up to
    the earliest stop; and nothing is held back longer than a stop string could still need."""
    matcher = TextMatcher(Pieces(tuple(split(data, cuts))), stops)
    text = ""
    seen = b""
    for token, piece in enumerate(split(data, cuts)):
        text += matcher.push(token).text
        seen += piece or b""
        if matcher.stop_word is None:
            whole = seen.decode("utf-8", "ignore")
            assert len(whole) - len(text) < max(map(len, stops), default=1) + 3
    text += matcher.flush()

    assert cut(data.decode("utf-8", "replace"), stops) == (text, matcher.stop_word)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS, CUTS)
def test_nothing_of_a_stop_gets_out(data: bytes, stops: list[str], cuts: list[int]) -> None:
    """At every moment, the text so far could still be continued by any stop string."""
    pieces = split(data, cuts)
    matcher = TextMatcher(Pieces(tuple(pieces)), stops)
    final = cut(data.decode("utf-8", "replace"), stops)[0]
    text = ""
    for token in range(len(pieces)):
        text += matcher.push(token).text

        assert final.startswith(text)
