"""Which tokens the text that was given is made of.

Text is held back while it may be the beginning of a stop string, and dropped if it was one. The
log-probabilities of its tokens are held back and dropped with it, so the entries that a caller gets
are those of the text that it gets. A token of which a stop string cut a part off has no entry, as
in llama-server.
"""

from collections import deque
from collections.abc import Sequence

from attrs import define, field

from kvtrio.core.batch import Sampled
from kvtrio.model.matcher import PieceDecoder


@define(eq=False)
class Alignment:
    """Of one answer; fed with every token and every piece of text in order."""

    _decoder: PieceDecoder
    _num_decoded: int = field(init=False, default=0)
    """Characters of all tokens so far."""
    _num_given: int = field(init=False, default=0)
    """Characters of the text so far."""
    _held: deque[tuple[int, Sampled]] = field(init=False, factory=deque)
    """Tokens, each with the number of characters that must be given before it may be."""

    def advance(self, sampled: Sequence[Sampled], text: str) -> tuple[Sampled, ...]:
        """Take tokens, and text that became certain with them; return the tokens it ends."""
        for token in sampled:
            self._num_decoded += len(self._decoder.push(token.token_id))
            # The beginning of a character is given when the character is.
            needed = self._num_decoded + self._decoder.is_within_character
            self._held.append((needed, token))
        self._num_given += len(text)
        ready: list[Sampled] = []
        while self._held and self._held[0][0] <= self._num_given:
            ready.append(self._held.popleft()[1])
        return tuple(ready)
