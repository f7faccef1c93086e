"""How a running request gets the state of its recurrent layers, and where it leaves checkpoints.

1. Its slot is taken when it starts and becomes the checkpoint at its end when it leaves.
2. A prompt's chunks end where a later prompt may want to resume, at ends of blocks: a block is
   published when the step that fills it has run, and the next step begins with the copy.
3. An answer keeps one behind it: its last tokens are often read otherwise when they come back.
4. What is not kept (``AUXILIARY``) leaves none.
"""

from bisect import bisect_right, insort

from attrs import define

from kvtrio.core.blocks import Block, Checkpoint
from kvtrio.core.events import Submit
from kvtrio.core.index import Match
from kvtrio.core.request import Request
from kvtrio.core.tiers import TieredCache
from kvtrio.core.types import Retain

SLACK = 4
"""Tokens before a prompt's end, which may be read otherwise when more follows."""
MAX_GRID = 16
"""Checkpoints in the long stretches of one prompt."""
WINDOWS_PER_KEPT = 4
"""Without checkpoints, one window in so many is wanted there."""
ROLLING_STEPS = 2
"""An answer's checkpoint goes along in steps of so many times the spacing."""


@define(eq=False)
class RequestStates:
    """The requests' side of ``Checkpoints``. Without recurrent layers nothing happens here, but for
    the wanted positions, which say what is kept of windows, too."""

    cache: TieredCache

    def stops(self, submit: Submit) -> list[int]:
        """Where the prompt's chunks may end, if the last checkpoint is far enough from there."""
        config, num = self.cache.config, len(submit.token_ids)
        has_states = self.cache.states is not None
        if submit.retain is Retain.AUXILIARY or not (has_states or config.window):
            return []
        least = config.checkpoint_grid
        if not has_states:
            least = max(least, WINDOWS_PER_KEPT * config.window)
        grid = least * -(-num // (least * MAX_GRID))
        wanted = {*submit.checkpoints, num - SLACK, *range(grid, num, grid)}
        ends = {position - position % config.block_size for position in wanted}
        return sorted(end for end in ends if 0 < end < num)

    def begin(self, request: Request, match: Match | None, now: float) -> None:
        """It starts, perhaps with a match."""
        states, config = self.cache.states, self.cache.config
        if states is not None:
            request.slot = states.take(now, match.checkpoint if match else None)
            request.note_tables()
            request.due = request.last_checkpoint = 0
        branch = match.num_same - match.num_same % config.block_size if match else 0
        # A checkpoint costs a step, a window none.
        is_far = match is not None and branch - match.num_tokens >= config.checkpoint_spacing
        is_new = branch > 0 and branch not in request.stops
        if request.stops and is_new and (is_far or states is None):
            # Others will part from it there, too.
            insort(request.stops, branch)

    def resume(self, request: Request, checkpoint: Checkpoint, position: int) -> None:
        states = self.cache.states
        assert states is not None
        assert request.slot is not None
        states.restore(checkpoint, request.slot)
        request.due, request.last_checkpoint = 0, position

    def cut(self, request: Request, end: int, now: float) -> int:
        """Where a chunk ends that could go on to ``end``. If the last one was cut for a checkpoint,
        that is kept now, before the request goes on."""
        start, size = request.num_computed_tokens, self.cache.config.block_size
        if start and start == request.due and request.blocks[start // size - 1].key is not None:
            self._keep(request, now)
        far_enough = request.last_checkpoint + self.cache.config.checkpoint_spacing
        at = bisect_right(request.stops, max(start, far_enough - 1))
        if at < len(request.stops) and request.stops[at] <= end:
            end = request.due = request.stops[at]
        return end

    def roll(self, request: Request, now: float) -> None:
        """An answer goes on at the end of a block."""
        start, size = request.num_computed_tokens, self.cache.config.block_size
        step = ROLLING_STEPS * self.cache.config.checkpoint_spacing
        if not request.is_decoding or start % step or start % size:
            return
        if start <= request.num_prompt_tokens or request.blocks[start // size - 1].key is None:
            return
        last = request.rolling
        request.rolling = self._keep(request, now)
        if last is not None and last.entry and request.rolling is not None:
            states = self.cache.states
            assert states is not None
            states.drop(last, now)

    def _keep(self, request: Request, now: float) -> Checkpoint | None:
        states, start = self.cache.states, request.num_computed_tokens
        assert states is not None
        assert request.slot is not None
        block = request.blocks[start // self.cache.config.block_size - 1]
        request.due, request.last_checkpoint = 0, start
        return states.keep(block, len(block.tags), request.slot, now)

    def leave(self, request: Request) -> None:
        """What it could publish is published: hand the state over."""
        states, slot, at = self.cache.states, request.slot, request.num_computed_tokens
        assert states is not None
        assert slot is not None
        request.slot = request.rolling = None
        block = self._holder(request, at) if at else None
        if block is None:
            states.free(slot)
        else:
            start = (at - 1) // self.cache.config.block_size * self.cache.config.block_size
            states.hand_over(block, at - start, slot)

    def give_up(self, request: Request) -> None:
        """Its state is not what its tokens left."""
        states, slot = self.cache.states, request.slot
        assert states is not None
        assert slot is not None
        request.slot = request.rolling = None
        request.note_tables()
        states.free(slot)

    def _holder(self, request: Request, at: int) -> Block | None:
        """The published block that holds the last of ``at`` tokens."""
        size = self.cache.config.block_size
        index = (at - 1) // size
        block = request.blocks[index]
        if block.key is not None:
            return block
        if request.submit.retain is Retain.AUXILIARY:
            return None
        # A longer block in the index has its tokens.
        parent = request.blocks[index - 1] if index else self.cache.index.root
        return self.cache.index.covering(parent, request.trail.tags[index * size : at])
