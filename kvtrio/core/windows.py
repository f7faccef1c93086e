"""How a running request holds what its next tokens see in groups with a sliding window.

1. It holds the parts of its blocks from the first one that the next token sees.
2. What falls out of the window stays cached while there is room: at an eighth of its worth where
   a later prompt may want to resume (see ``RequestStates.stops``), else at none.
3. What it sees when it leaves is worth most, with a few blocks before it, since the last tokens of
   an answer are often read otherwise when they come back.
"""

from bisect import bisect_right
from collections.abc import Callable

from attrs import define, field

from kvtrio.core.blocks import Block, Part
from kvtrio.core.index import Match
from kvtrio.core.parts import PASSED_SHARE, Parts
from kvtrio.core.request import Request

MARGIN = 64
"""Tokens before a sequence's last window that are kept with it."""


@define(eq=False)
class RequestWindows:
    """The requests' side of ``Parts``."""

    parts: Parts
    _window: int = field(init=False)
    _size: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._window, self._size = self.parts.config.window, self.parts.config.block_size

    def first_seen(self, position: int) -> int:
        """Index of the first block that the token at ``position`` sees."""
        return max(0, position - self._window + 1) // self._size

    def covered(self, match: Match) -> int:
        """How much of a match a request can resume behind: all parts that the next token sees must
        be there."""
        blocks = match.blocks if match.partial is None else (*match.blocks, match.partial)
        return self.last_covered(lambda index: blocks[index].part is not None, match.num_tokens)

    def last_covered(self, has_part: Callable[[int], bool], end: int) -> int:
        """The same of a sequence of ``end`` tokens. ``has_part``: of its block with an index."""
        position, index = end, (end - 1) // self._size
        first = self.first_seen(position)
        while index >= first and position:
            if not has_part(index):
                position = index * self._size
                first = self.first_seen(position)
            index -= 1
        return position

    def hold(self, match: Match) -> None:
        """What is seen behind ``match``, wherever it lies."""
        for part in self._seen(match):
            self.parts.hold(part)

    def resume(self, request: Request, match: Match, now: float) -> None:
        """Have what is seen behind ``match``, which is held, instead of what the request held. Its
        blocks are still those it had."""
        for block in request.blocks[request.first_part :]:
            self._pass(request, block, now)
        for part in self._seen(match):
            self.parts.bring(part, now)
        request.first_part = self.first_seen(match.num_tokens)

    def _seen(self, match: Match) -> list[Part]:
        seen = [_part(block) for block in match.blocks[self.first_seen(match.num_tokens) :]]
        if match.partial is not None:
            seen.append(_part(match.partial))
        return seen

    def advance(self, request: Request, now: float) -> None:
        """Let go of what the next token does not see."""
        first = self.first_seen(request.num_computed_tokens)
        for block in request.blocks[request.first_part : first]:
            self._pass(request, block, now)
        request.first_part = max(first, request.first_part)

    def let_go(self, source: Block, now: float) -> None:
        """What was copied from."""
        self.parts.release(_part(source), now)

    def leave(self, request: Request, now: float) -> None:
        """The request's end, for now: its blocks are still held."""
        position, first = request.num_computed_tokens, request.first_part
        before = request.blocks[max(0, first - MARGIN // self._size) : first]
        for block in (*before, *request.blocks[first:]):
            if part := block.part:
                self.parts.keep(part, position)
                part.pinned_until_s = max(part.pinned_until_s, block.pinned_until_s)
        for part in [block.part for block in before if block.part]:
            if part.is_candidate:
                self.parts.hold(part)
                self.parts.release(part, now)
        for block in request.blocks[first:]:
            self.parts.release(_part(block), now)
        request.first_part = 0

    def _pass(self, request: Request, block: Block, now: float) -> None:
        part = _part(block)
        if block.key is not None:
            part.is_wanted = part.is_wanted or self._is_wanted(request, block)
            worth = self.parts.worth(block.end) * PASSED_SHARE if part.is_wanted else 0.0
            part.worth, part.end = worth, request.num_computed_tokens
        self.parts.release(part, now)

    def _is_wanted(self, request: Request, block: Block) -> bool:
        """Whether a wanted position sees it."""
        stops, start = request.stops, block.start
        at = bisect_right(stops, start)
        return at < len(stops) and stops[at] < start + self._size + self._window - 1


def _part(block: Block) -> Part:
    assert block.part is not None
    return block.part
