"""From generated token ids to text, as early as it is certain: characters, then stop strings."""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from attrs import define, field

from kvtrio.core.events import Piece
from kvtrio.model.tokenizer import clean_text

MAX_STOPS = 256
MAX_STOP_CHARS = 8_192
"""All stop strings of a request together."""


class PieceSource(Protocol):
    """What is needed of a tokenizer here."""

    def token_bytes(self, token_id: int) -> bytes: ...
    def is_control(self, token_id: int) -> bool: ...


class PieceDecoder:
    """Bytes of tokens to characters.

    An unfinished character (at most three bytes) is held back; a byte that cannot go on becomes
    U+FFFD at once. Control tokens have no text.
    """

    def __init__(self, tokenizer: PieceSource) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_control(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    @property
    def is_within_character(self) -> bool:
        """The beginning of a character is held back."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """U+FFFD if a character was unfinished; the decoder may be used again."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class TextMatcher:
    """One request's ``core.events.Matcher``.

    The stop string that is complete first wins, the longest if several end together, so the result
    does not depend on how the text is cut into tokens. Text is held back only while it is the
    beginning of a stop string. Work is constant per character, whatever the stop strings are.

    Raises ValueError for more than MAX_STOPS stop strings or MAX_STOP_CHARS characters in them.
    """

    stop_word: str | None
    """The stop string that ended the text, as it was given (lone surrogates as U+FFFD)."""

    def __init__(self, tokenizer: PieceSource, stops: Sequence[str] = ()) -> None:
        if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARS:
            raise ValueError("too many or too long stop strings")
        self.stop_word = None
        self._decoder = PieceDecoder(tokenizer)
        words = [clean_text(stop) for stop in stops if stop]
        self._state: _State | None = _build(words) if words else None
        self._held = ""

    def push(self, token_id: int) -> Piece:
        return self._match(self._decoder.push(token_id))

    def flush(self) -> str:
        """What was held back; empty after a stop."""
        text = self._match(self._decoder.flush()).text + self._held
        self._held = ""
        return text

    def _match(self, text: str) -> Piece:
        if self.stop_word is not None:
            return Piece(stopped=True)
        if self._state is None:
            return Piece(text)
        buffer, state = self._held + text, self._state
        for place, char in enumerate(text, len(self._held) + 1):
            state = state.step(char)
            if state.stop is not None:
                self.stop_word, self._held = state.stop, ""
                return Piece(buffer[: place - len(state.stop)], stopped=True)
        self._state = state
        ready = len(buffer) - state.depth
        self._held = buffer[ready:]
        return Piece(buffer[:ready])


@define(eq=False)
class _State:
    """Aho-Corasick automaton: the longest end of the text so far that begins a stop string."""

    depth: int
    """Length of that end: the number of characters to hold back."""
    stop: str | None = None
    """The longest stop string that ends here."""
    next: dict[str, "_State"] = field(factory=dict, repr=False)
    shorter: "_State | None" = field(default=None, repr=False)
    """The next longest such end; None at the root."""

    def step(self, char: str) -> "_State":
        state = self
        while char not in state.next:
            if state.shorter is None:
                return state
            state = state.shorter
        return state.next[char]


def _build(words: Sequence[str]) -> _State:
    root = _State(0)
    for word in words:
        state = root
        for depth, char in enumerate(word, 1):
            state = state.next.setdefault(char, _State(depth))
        state.stop = word
    queue = deque([root])
    while queue:  # by depth, so that ``shorter`` of every shallower state is known
        state = queue.popleft()
        for char, child in state.next.items():
            child.shorter = root if state.shorter is None else state.shorter.step(char)
            child.stop = child.stop or child.shorter.stop
            queue.append(child)
    return root
