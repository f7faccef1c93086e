"""Pinned blocks: kept for a time, as long as they are not too many.

1. At most ``limit`` blocks are pinned, inner ones counted like leaves.
2. A conversation is pinned from its start on; where the limit is met, its rest is not pinned.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from attrs import define, field

from kvtrio.core.blocks import Block


@define(eq=False)
class Pins:
    """pin / unpin / expire."""

    limit: int
    num_pinned: int = field(init=False, default=0)
    _num_entries: int = field(init=False, default=0)
    _ends: list[tuple[float, int, Block]] = field(init=False, factory=list)

    def pin(self, blocks: Sequence[Block], until_s: float, now: float) -> None:
        """Pin held, published blocks, in order of position."""
        self.expire(now)
        for block in blocks:
            if not block.pinned_until_s:
                if self.num_pinned >= self.limit:
                    return
                self.num_pinned += 1
            if until_s > block.pinned_until_s:
                block.pinned_until_s = until_s
                self._num_entries += 1
                heappush(self._ends, (until_s, self._num_entries, block))

    def unpin(self, block: Block) -> None:
        assert self.num_pinned >= 0
        if block.pinned_until_s:
            block.pinned_until_s = 0.0
            self.num_pinned -= 1

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            until_s, _, block = heappop(self._ends)
            if block.pinned_until_s == until_s:
                self.unpin(block)
