"""Which tokens of a new text were in earlier ones: exact, to the token, in bounded memory.

1. The longest common prefix with any text that is known is found whatever its length: texts lie in
   sorted order, and the text that shares most with a new one is its neighbour there.
2. Behind it, runs of 32 tokens and more that are anywhere in a known text are found through grams
   of 16 tokens, of which every sixteenth is indexed; a run is then widened in both directions.
3. The first token behind the common prefix belongs to no run: it is what tells the texts apart.
4. A text that a new one goes on from is forgotten; the new one holds it. Beyond a limit the text
   that was not used for longest goes first.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]
GRAM = 16
MIN_RUN = 2 * GRAM
WIDTH = 4
"""Bytes of a token; big-endian, so that bytes are in the order of tokens."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)
WINDOW = 512
"""Tokens that are compared at once."""


@frozen
class Span:
    """Tokens ``start`` to ``start + length`` of the known text ``key``, or, without a key, new."""

    key: int | None
    start: int
    length: int


@define(eq=False)
class Likeness:
    """Known texts by key, all together at most ``max_tokens`` long."""

    max_tokens: int
    max_spans: int
    num_tokens: int = field(init=False, default=0)
    _texts: dict[int, bytes] = field(init=False, factory=dict)
    """In the order of their last use."""
    _order: list[tuple[bytes, int]] = field(init=False, factory=list)
    _grams: dict[int, tuple[int, int]] = field(init=False, factory=dict)
    """Hash of 16 tokens: a text and a position in it."""

    def spans(self, token_ids: Sequence[int]) -> list[Span]:
        """What ``token_ids`` is made of, without gaps; known texts that it uses become the latest
        used ones."""
        data = packed(token_ids)
        source, same = self._longest_prefix(data)
        spans = [Span(source, 0, same)] if same else []
        spans += self._runs(data, same)
        for span in spans:
            if span.key is not None:
                self._texts[span.key] = self._texts.pop(span.key)
        return spans

    def length(self, key: int) -> int:
        """Of a known text, in tokens."""
        return len(self._texts[key]) // WIDTH

    def add(self, key: int, token_ids: Sequence[int]) -> None:
        """Know ``token_ids`` as ``key``; instead of what ``key`` was before, and of texts that it
        begins with."""
        data = packed(token_ids)
        self.forget(key)
        self._forget_beginnings(data)
        insort(self._order, (data, key))
        self._texts[key] = data
        self.num_tokens += len(data) // WIDTH
        for position, gram in _indexed(data):
            self._grams[gram] = key, position
        while self.num_tokens > self.max_tokens:
            self.forget(next(iter(self._texts)))

    def forget(self, key: int) -> None:
        data = self._texts.pop(key, None)
        if data is None:
            return
        del self._order[bisect_left(self._order, (data, key))]
        self.num_tokens -= len(data) // WIDTH
        for position, gram in _indexed(data):
            if self._grams.get(gram) == (key, position):
                del self._grams[gram]

    def _forget_beginnings(self, data: bytes) -> None:
        """What ``data`` begins with stands right before it, but for texts in between that begin
        with the same; those stay."""
        at = bisect_left(self._order, (data, -1))
        while at > 0 and data.startswith(self._order[at - 1][0]):
            at -= 1
            self.forget(self._order[at][1])

    def _longest_prefix(self, data: bytes) -> tuple[int, int]:
        """A text that shares most with ``data``, and how many tokens; the later one of equals."""
        at = bisect_left(self._order, (data, -1))
        near = self._order[max(at - 1, 0) : at + 1]
        found = [(common(data, text), key) for text, key in near]
        same, key = max(found, default=(0, 0))
        return key, same

    def _runs(self, data: bytes, start: int) -> list[Span]:
        """What lies behind position ``start``."""
        tokens, end = unpacked(data), len(data) // WIDTH
        if start == end:
            return []
        grams = hashes(tokens[start + 1 :]).tolist()
        spans: list[Span] = []
        done, at, last = start, 0, len(grams)
        while at < last and len(spans) < self.max_spans - 2:
            hit = self._grams.get(grams[at])
            run = hit and self._widened(tokens, (start + 1 + at, max(done, start + 1)), hit)
            if not run:
                at += 1
                continue
            place, span = run
            if place > done:
                spans.append(Span(None, 0, place - done))
            spans.append(span)
            done = place + span.length
            at = done - start - 1
        return [*spans, Span(None, 0, end - done)] if done < end else spans

    def _widened(
        self, tokens: Tokens, place: tuple[int, int], hit: tuple[int, int]
    ) -> tuple[int, Span] | None:
        """The whole run around a gram, and where it begins; None if it is short, or if only the
        hashes are equal. ``place``: where the gram is, and the first position a run may have."""
        (at, first), (key, position) = place, hit
        text = unpacked(self._texts[key])
        forward = same_length(tokens[at:], text[position:])
        if forward < GRAM:
            return None
        room = min(at - first, position)
        back = same_length(tokens[at - room : at][::-1], text[position - room : position][::-1])
        if forward + back < MIN_RUN:
            return None
        return at - back, Span(key, position - back, forward + back)


def packed(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype=">u4").tobytes()


def unpacked(data: bytes) -> Tokens:
    return np.frombuffer(data, dtype=">u4")


def common(a: bytes, b: bytes) -> int:
    """Tokens that two packed texts begin with alike."""
    return same_length(unpacked(a), unpacked(b))


def same_length(a: Tokens, b: Tokens) -> int:
    """How many places two rows have in common from their beginnings on."""
    length = min(len(a), len(b))
    for start in range(0, length, WINDOW):
        stop = min(start + WINDOW, length)
        unequal = np.flatnonzero(a[start:stop] != b[start:stop])
        if len(unequal):
            return start + int(unequal[0])
    return length


def hashes(tokens: Tokens) -> NDArray[np.uint64]:
    """Of each run of 16 tokens, a polynomial over 64 bits."""
    count = max(len(tokens) - GRAM + 1, 0)
    wide = tokens.astype(np.uint64) + np.uint64(1)
    total = np.zeros(count, dtype=np.uint64)
    for offset in range(GRAM):
        total = total * FACTOR + wide[offset : offset + count]
    return total


def _indexed(data: bytes) -> list[tuple[int, int]]:
    """(position, hash) of every sixteenth gram."""
    tokens = unpacked(data)
    whole = tokens[: len(tokens) // GRAM * GRAM].astype(np.uint64).reshape(-1, GRAM)
    total = np.zeros(len(whole), dtype=np.uint64)
    for offset in range(GRAM):
        total = total * FACTOR + (whole[:, offset] + np.uint64(1))
    return [(number * GRAM, gram) for number, gram in enumerate(total.tolist())]
