"""How a running request gets its blocks: found, copied, taken, published.

1. A request holds a run of blocks from position 0; all but the last are full once computed.
2. Published blocks come first; they are never written.
3. The prompt's last token is never taken from the cache: its logits are needed.
"""

from collections.abc import Iterable

from attrs import define, field

from kvtrio.core.batch import NOWHERE
from kvtrio.core.blocks import Block
from kvtrio.core.index import Match
from kvtrio.core.request import Request
from kvtrio.core.resume import resumable
from kvtrio.core.states import RequestStates
from kvtrio.core.tiers import Position, TieredCache
from kvtrio.core.types import BlockId, Retain
from kvtrio.core.windows import RequestWindows


@define(eq=False)
class BlockTables:
    """The requests' side of the cache."""

    cache: TieredCache
    block_size: int
    states: RequestStates = field(init=False)
    windows: RequestWindows | None = field(init=False, default=None)
    """None: the model has none."""
    computing: set[bytes] = field(init=False, factory=set)
    """Keys of the full blocks that the step being planned will compute."""

    def __attrs_post_init__(self) -> None:
        self.states = RequestStates(self.cache)
        if self.cache.parts is not None:
            self.windows = RequestWindows(self.cache.parts)

    def new_tables(self) -> dict[int, list[BlockId]]:
        """Empty ones, by group; in the order of ``_ids``."""
        config = self.cache.config
        return {group: [] for group in (*config.token_groups, *config.window_groups)}

    def match(self, request: Request) -> Match | None:
        """What the cache has beyond the request's computed tokens; None if nothing. With recurrent
        layers or windows there may be tokens behind which nobody can resume: then it says so, and
        is not beyond."""
        submit, done, total = request.submit, request.num_computed_tokens, request.num_tokens
        if not submit.reuse or done >= total - 1:
            return None
        first = done // self.block_size
        if done and (first + 1) * self.block_size >= total:
            # Between chunks only whole blocks are looked for: no copy for a few tokens.
            return None
        if done and request.trail.key(first) not in self.cache.index.by_key:
            return None
        match = self.cache.match(request.trail, total - 1, request.known)
        if match.num_tokens <= done:
            return None
        has_states = self.cache.states is not None
        if not has_states and self.windows is None:
            return match
        return resumable(match, done, self.windows, has_states)

    def is_being_computed(self, request: Request, num_known: int) -> bool:
        """Whether another request of this step computes the block this one needs next."""
        index = num_known // self.block_size
        is_whole = (index + 1) * self.block_size < request.num_tokens
        return request.submit.reuse and is_whole and request.trail.key(index) in self.computing

    def hold(self, match: Match, now: float) -> None:
        """Nothing that the request resumes from is to go for what it needs besides, but for its
        checkpoint, which ``use`` copies from first; see ``RequestStates.begin``."""
        self.cache.hold(match, now)
        if self.windows is not None:
            self.windows.hold(match)

    def use(self, request: Request, match: Match, now: float) -> None:
        """Go on from the match, which is held: its blocks take the place of what the request
        had."""
        if match.checkpoint is not None:
            self.states.resume(request, match.checkpoint, match.num_tokens)
        self.cache.bring(match, now)
        for block in match.blocks:
            block.is_from_disk = False
        if match.partial is not None:
            match.partial.is_from_disk = False
        if self.windows is not None:
            self.windows.resume(request, match, now)
        self.cache.release(request.blocks, now)
        request.blocks = list(match.blocks)
        request.num_published = len(match.blocks)
        if match.partial is not None:
            request.source = match.partial
            request.blocks.append(self.cache.take(now))
            self.cache.copy(match.partial, request.blocks[-1], match.num_partial)
        request.num_computed_tokens = match.num_tokens
        columns = map(list, self._columns(request.blocks))
        request.tables = dict(zip(request.tables, columns, strict=True))
        request.note_tables()

    def _columns(self, blocks: list[Block]) -> Iterable[tuple[BlockId, ...]]:
        """Their places, by group as in ``tables``."""
        if self.windows is None:
            return zip(*[block.ids for block in blocks], strict=True)
        return zip(*map(self._ids, blocks), strict=True)

    def _ids(self, block: Block) -> tuple[BlockId, ...]:
        """Its places: of groups with all tokens, then of those with windows, where its part may be
        gone since the next token does not see it."""
        if self.windows is None:
            return block.ids
        if block.part is None:
            return block.ids + (NOWHERE,) * len(self.cache.config.window_groups)
        return block.ids + block.part.ids

    def grow(self, request: Request, end: int, now: float) -> None:
        """Blocks for the tokens before ``end``, which the step will compute."""
        if self.cache.states is not None:
            self.states.roll(request, now)
        num_more = -(-end // self.block_size) - len(request.blocks)
        if num_more > 0:
            blocks = [self.cache.take(now) for _ in range(num_more)]
            request.blocks += blocks
            for table, column in zip(request.tables.values(), self._columns(blocks), strict=True):
                table += column
            request.note_tables()
        first = request.num_computed_tokens // self.block_size
        past = end // self.block_size
        if past > first:
            self.computing.update(request.trail.keys_to(past)[first:past])

    def let_go_of_source(self, request: Request, now: float) -> None:
        """The step has run, so the copy is made."""
        if request.source is not None:
            if self.windows is not None:
                self.windows.let_go(request.source, now)
            self.cache.release([request.source], now)
            request.source = None

    def publish_full(self, request: Request, now: float) -> None:
        """Publish the blocks that the last step filled."""
        if request.submit.retain is not Retain.AUXILIARY:
            while (request.num_published + 1) * self.block_size <= request.num_computed_tokens:
                self._publish(request, self.block_size, now)
        if self.windows is not None:
            self.windows.advance(request, now)

    def _publish(self, request: Request, num_tokens: int, now: float) -> None:
        index = request.num_published
        parent = request.blocks[index - 1] if index else self.cache.index.root
        position = Position(parent, request.trail)
        own = request.blocks[index]
        block = self.cache.publish(own, position, num_tokens, now)
        request.num_published += 1
        if block is own:
            return
        request.blocks[index] = block
        for table, block_id in zip(request.tables.values(), self._ids(block), strict=True):
            table[index] = block_id
        request.note_tables()

    def leave(self, request: Request, now: float) -> None:
        """The request ended or lost its place: keep what it computed, hold nothing."""
        self.let_go_of_source(request, now)
        self.publish_full(request, now)
        rest = request.num_computed_tokens - request.num_published * self.block_size
        if rest > 0 and request.submit.retain is not Retain.AUXILIARY:
            self._publish(request, rest, now)
        if request.slot is not None:
            self.states.leave(request)
        if request.submit.retain is Retain.PIN:
            # The last one may not be in the index: a longer block there has its tokens.
            published = [block for block in request.blocks if block.key is not None]
            self.cache.pins.pin(published, now + request.submit.retain_s, now)
        if self.windows is not None:
            self.windows.leave(request, now)
        self.cache.release(request.blocks, now)
        request.blocks.clear()
        for table in request.tables.values():
            table.clear()
        request.note_tables()
        request.num_published = 0
