"""Encoding of SentencePiece BPE vocabularies (``tokenizer.ggml.model`` "llama").

The pair of neighbours whose joined text is the token with the best score merges first, the leftmost
of equals; characters left without a token become byte tokens. Same result as SentencePiece's BPE
model and llama.cpp.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count

from attrs import field, frozen

from kvtrio.model.errors import ModelFileError
from kvtrio.model.vocabulary import PREFIX, Vocabulary

SPACE_MARK = "\u2581"
MAX_CACHED_WORDS = 65_536
MAX_CACHED_CHARS = 48
PIECE_CHARS = 4096
"""Worked on in one go: about 3 ms. In between is a pause, and no call that keeps every other thread
waiting is longer."""


@frozen(eq=False)
class SentencePieceEncoder:
    """Words are encoded apart and remembered, where no token can span two of them."""

    _ids: Mapping[str, int] = field(repr=False)
    _ranks: Sequence[float] = field(repr=False)
    """Negated scores: the smallest merges first."""
    _byte_ids: tuple[int, ...] = field(repr=False)
    _words: re.Pattern[str]
    _cuts: re.Pattern[str]
    """Empty, where a word may end and the next begin."""
    _add_space_prefix: bool
    _pause: Callable[[], None]
    _cache: dict[str, tuple[int, ...]] = field(factory=dict, repr=False)

    def encode(self, text: str, after_special: bool) -> list[int]:
        if self._add_space_prefix and after_special:
            text = " " + text
        out: list[int] = []
        cache = self._cache
        for word in self._split(text.replace(" ", SPACE_MARK)):
            ids = cache.get(word)
            if ids is None:
                ids = tuple(self._merge(word))
                if len(word) <= MAX_CACHED_CHARS:
                    if len(cache) >= MAX_CACHED_WORDS:
                        cache.clear()
                    cache[word] = ids
            out.extend(ids)
        return out

    def _split(self, text: str) -> Iterator[str]:
        """The words, found piece by piece; a piece ends where a word does."""
        start = 0
        while start < len(text):
            near = start + PIECE_CHARS
            end = last = self._next_cut(text, near)
            if end > near + PIECE_CHARS:  # the piece's last word is longer than a piece
                cuts = self._cuts.finditer(text, start + 1, near)
                last = max((cut.start() for cut in cuts), default=start)
            yield from self._words.findall(text, start, last)
            if last < end:
                yield text[last:end]
            if end < len(text):
                self._pause()
            start = end

    def _next_cut(self, text: str, start: int) -> int:
        for at in range(start, len(text), PIECE_CHARS):
            if cut := self._cuts.search(text, at, at + PIECE_CHARS):
                return cut.start()
        return len(text)

    def _merge(self, word: str) -> list[int]:
        piece = list(word)
        ids, ranks = self._ids, self._ranks
        after = [*range(1, len(piece)), -1]
        before = [*range(-1, len(piece) - 1)]
        heap: list[tuple[float, int, int, str]] = []
        for left in range(len(piece) - 1):
            joined = piece[left] + piece[left + 1]
            if joined in ids:
                # One by one, not by heapify: that would be one long call for a long word.
                heappush(heap, (ranks[ids[joined]], left, left + 1, joined))
        for number in count(1):
            if not heap:
                break
            if number % PIECE_CHARS == 0:
                self._pause()
            _, left, right, joined = heappop(heap)
            if not piece[left] or not piece[right] or piece[left] + piece[right] != joined:
                continue  # one of the two was merged in the meantime
            piece[left], piece[right] = joined, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            for one, two in ((before[left], left), (left, after[left])):
                if one >= 0 and two >= 0:
                    joined = piece[one] + piece[two]
                    if joined in ids:
                        heappush(heap, (ranks[ids[joined]], one, two, joined))
        return self._finish(piece)

    def _finish(self, piece: list[str]) -> list[int]:
        out: list[int] = []
        for part in filter(None, piece):
            token = self._ids.get(part)
            if token is None:
                out.extend(self._byte_ids[byte] for byte in part.encode())
            else:
                out.append(token)
        return out


def go_on() -> None:
    """No pause."""


def make_sentence_piece(
    vocabulary: Vocabulary, add_space_prefix: bool, pause: Callable[[], None] = go_on
) -> SentencePieceEncoder:
    """``pause`` is called again and again while a long text is worked on. Raises ModelFileError
    when the file has no scores or lacks a byte token."""
    if vocabulary.scores is None:
        raise ModelFileError(f"{PREFIX}scores is missing")
    border = _border(vocabulary)
    return SentencePieceEncoder(
        vocabulary.ids,
        [-score for score in vocabulary.scores],
        _byte_tokens(vocabulary),
        re.compile(f".+?(?:{border}|\\Z)", re.DOTALL),
        re.compile(border),
        add_space_prefix,
        pause,
    )


def _byte_tokens(vocabulary: Vocabulary) -> tuple[int, ...]:
    found = []
    for byte in range(256):
        token = vocabulary.ids.get(f"<0x{byte:02X}>")
        if token is None and byte < 128:
            token = vocabulary.ids.get(chr(byte))
        if token is None:
            raise ModelFileError(f"{PREFIX}tokens has no token for the byte 0x{byte:02X}")
        found.append(token)
    return tuple(found)


def _border(vocabulary: Vocabulary) -> str:
    """Matches before a space, except behind a character that some token joins with a space.

    Two neighbours can only merge into a token that holds the end of one next to the start of the
    other, so a cut between characters that no token holds side by side changes nothing.
    """
    joining = {SPACE_MARK}
    for text in vocabulary.texts:
        at = text.find(SPACE_MARK, 1)
        while at > 0:
            joining.add(text[at - 1])
            at = text.find(SPACE_MARK, at + 1)
    glue = re.escape("".join(sorted(joining)))
    return f"(?<![{glue}])(?={SPACE_MARK})"
