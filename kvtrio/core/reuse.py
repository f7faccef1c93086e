"""How a running request gets its blocks: found, copied, taken, published.

1. A request holds a run of blocks from position 0; all but the last are full once computed.
2. Published blocks come first; they are never written.
3. The prompt's last token is never taken from the cache: its logits are needed.
"""

from attrs import define, field

from kvtrio.core.checkpoints import resumable
from kvtrio.core.index import Match
from kvtrio.core.request import Request
from kvtrio.core.states import RequestStates
from kvtrio.core.tiers import Position, TieredCache
from kvtrio.core.types import Retain


@define(eq=False)
class BlockTables:
    """The requests' side of the cache."""

    cache: TieredCache
    block_size: int
    states: RequestStates = field(init=False)
    computing: set[bytes] = field(init=False, factory=set)
    """Keys of the full blocks that the step being planned will compute."""

    def __attrs_post_init__(self) -> None:
        self.states = RequestStates(self.cache)

    def match(self, request: Request) -> Match | None:
        """What the cache has beyond the request's computed tokens; None if nothing. With recurrent
        layers there may be tokens and no checkpoint: then it says so, and is not beyond."""
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
        return match if self.cache.states is None else resumable(match, done)

    def is_being_computed(self, request: Request, num_known: int) -> bool:
        """Whether another request of this step computes the block this one needs next."""
        index = num_known // self.block_size
        is_whole = (index + 1) * self.block_size < request.num_tokens
        return request.submit.reuse and is_whole and request.trail.key(index) in self.computing

    def use(self, request: Request, match: Match, now: float) -> None:
        """Go on from the match: its blocks take the place of what the request had."""
        self.cache.acquire(match, now)
        for block in match.blocks:
            block.is_from_disk = False
        if match.partial is not None:
            match.partial.is_from_disk = False
        self.cache.release(request.blocks, now)
        if match.checkpoint is not None:
            self.states.resume(request, match.checkpoint, match.num_tokens)
        request.blocks = list(match.blocks)
        request.num_published = len(match.blocks)
        if match.partial is not None:
            request.source = match.partial
            request.blocks.append(self.cache.take(now))
            self.cache.copy(match.partial, request.blocks[-1], match.num_partial)
        request.num_computed_tokens = match.num_tokens
        request.tables = tuple(
            map(list, zip(*(block.ids for block in request.blocks), strict=True))
        )
        request.note_tables()

    def grow(self, request: Request, end: int, now: float) -> None:
        """Blocks for the tokens before ``end``, which the step will compute."""
        if self.cache.states is not None:
            self.states.roll(request, now)
        for _ in range(-(-end // self.block_size) - len(request.blocks)):
            block = self.cache.take(now)
            request.blocks.append(block)
            for table, block_id in zip(request.tables, block.ids, strict=True):
                table.append(block_id)
            request.note_tables()
        first = request.num_computed_tokens // self.block_size
        past = end // self.block_size
        self.computing.update(request.trail.key(index) for index in range(first, past))

    def let_go_of_source(self, request: Request, now: float) -> None:
        """The step has run, so the copy is made."""
        if request.source is not None:
            self.cache.release([request.source], now)
            request.source = None

    def publish_full(self, request: Request, now: float) -> None:
        """Publish the blocks that the last step filled."""
        if request.submit.retain is Retain.AUXILIARY:
            return
        while (request.num_published + 1) * self.block_size <= request.num_computed_tokens:
            self._publish(request, self.block_size, now)

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
        for table, block_id in zip(request.tables, block.ids, strict=True):
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
        self.cache.release(request.blocks, now)
        request.blocks.clear()
        for table in request.tables:
            table.clear()
        request.note_tables()
        request.num_published = 0
