"""The only mutator of requests and blocks. Three methods; no clock, no I/O, no tensors.

There is no prefill phase and no decode phase. A request has tokens and a number of computed
tokens; a step computes some of the missing ones, and when none is missing a token is sampled.

Rules, recomputed from first principles by ``invariants.check``:

1. Every block is held, cached or gone; its reference count is the number of block tables naming it.
2. A block table only grows until the request ends; a block in it may be replaced by an equal one.
3. num_computed <= num_tokens; a block table covers what is computed and in flight, no more.
4. A request is waiting, running in one place, or gone, and its state says which.
5. A finished request holds nothing.
6. At most one batch is in flight; blocks it names are freed only after its ``update``.
7. A batch has at most ``max_batch_tokens`` tokens.
8. Every admitted request gets exactly one ``Finished``; every other one exactly one ``Rejected``.
9. A block is published after its tokens were computed, and not written after that.
"""

from collections.abc import Mapping

from attrs import define, field, frozen

from kvtrio.core.batch import Batch, Chunk, Sampled, SampleRow, StepResult
from kvtrio.core.config import CoreConfig
from kvtrio.core.events import (
    Abort,
    Cached,
    Drain,
    Finished,
    Input,
    Output,
    Piece,
    Progress,
    Rejected,
    Started,
    Submit,
    TokenOut,
)
from kvtrio.core.explain import CacheReport, count_host_tokens, explain
from kvtrio.core.identity import Context, ContextTable, KeyMaker, TokenTrail
from kvtrio.core.index import Match
from kvtrio.core.places import Places, PlaceView
from kvtrio.core.policy import Policy, RequestView, Share, View, checked
from kvtrio.core.request import Request
from kvtrio.core.reuse import BlockTables
from kvtrio.core.sampling import draw
from kvtrio.core.tiers import TieredCache
from kvtrio.core.types import FinishReason, RejectReason, RequestId, RequestState, Tier

MAX_STARTABLE = 8
"""How many waiting requests a policy is shown at a time, in order of arrival."""


@frozen(kw_only=True)
class CoreStatistics:
    """A snapshot for health, metrics and the slots view."""

    num_running: int
    num_waiting: int
    is_draining: bool
    num_used_blocks: Mapping[Tier, int]
    """Held and cached."""
    max_blocks: Mapping[Tier, int]
    places: tuple[PlaceView, ...]


@define(eq=False)
class Core:
    """Requests, blocks and places; see the module's rules."""

    config: CoreConfig
    policy: Policy
    keys: KeyMaker
    cache: TieredCache = field(init=False)
    tables: BlockTables = field(init=False)
    contexts: ContextTable = field(init=False, factory=ContextTable)
    places: Places = field(init=False)
    requests: dict[RequestId, Request] = field(init=False, factory=dict)
    """Waiting and running, in order of arrival."""
    waiting: dict[RequestId, Request] = field(init=False, factory=dict)
    in_flight: Batch | None = field(init=False, default=None)
    is_draining: bool = field(init=False, default=False)
    news: list[Output] = field(init=False, factory=list)
    """What ``schedule`` found, told by ``update``."""
    next_step: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        config = self.config
        assert config.max_batch_tokens >= config.num_places
        self.cache = TieredCache(config)
        self.tables = BlockTables(self.cache, config.block_size)
        self.places = Places(config.num_places)

    # --- events in ---

    def handle(self, event: Input, now: float) -> list[Output]:
        """Take in one event; what it causes at once is returned. ``now`` in seconds."""
        match event:
            case Submit():
                return self._submit(event, now)
            case Abort(request_id):
                return self._abort(request_id, now)
            case Drain():
                self.is_draining = True
                return []

    def _submit(self, submit: Submit, now: float) -> list[Output]:
        assert submit.request_id not in self.requests
        assert submit.max_new_tokens is None or submit.max_new_tokens >= 1
        assert submit.place is None or 0 <= submit.place < self.config.num_places
        if rejected := self._refusal(submit):
            return [rejected]
        trail = self._trail(submit)
        request = Request(submit, now, list(submit.token_ids), trail)
        self.requests[request.request_id] = self.waiting[request.request_id] = request
        return []

    def _trail(self, submit: Submit) -> TokenTrail:
        contexts: list[tuple[int, Context]] = []
        for segment in submit.segments:
            context = self.contexts.intern(submit.namespace, segment.adapters)
            if not contexts or contexts[-1][1].number != context.number:
                contexts.append((segment.start, context))
        trail = TokenTrail(self.keys, self.config.block_size, tuple(contexts))
        trail.extend_prompt(submit.token_ids)
        return trail

    def _refusal(self, submit: Submit) -> Rejected | None:
        num_tokens, config = len(submit.token_ids), self.config
        capacity = config.num_places + config.max_waiting
        checks = (
            (self.is_draining, RejectReason.DRAINING, 0),
            (num_tokens == 0, RejectReason.EMPTY, 1),
            (num_tokens >= config.max_context, RejectReason.TOO_LONG, config.max_context),
            (len(self.requests) >= capacity, RejectReason.QUEUE_FULL, config.max_waiting),
        )
        for is_met, reason, limit in checks:
            if is_met:
                return Rejected(submit.request_id, reason, num_tokens, limit)
        return None

    def _abort(self, request_id: RequestId, now: float) -> list[Output]:
        request = self.requests.get(request_id)
        if request is None or request.is_aborted:
            return []
        request.is_aborted = True
        # A launched step still reads and writes the blocks: ``update`` will drop the request.
        return [] if request.in_flight else [self._finish(request, FinishReason.ABORT, now)]

    # --- the next step ---

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def schedule(self, now: float) -> Batch | None:
        """Decide the next step and hold its blocks; None if there is nothing to compute."""
        assert self.in_flight is None
        if not self.requests:
            return None
        shares = checked(self.policy.plan(self._view(now)), self.requests)
        chunks: list[Chunk] = []
        self.tables.computing.clear()
        budget = self.config.max_batch_tokens
        for share in shares:
            if chunk := self._apply(share, budget, now):
                chunks.append(chunk)
                budget -= len(chunk.token_ids)
        if not chunks:
            return None
        self.in_flight = Batch(self.next_step, tuple(chunks), self.cache.take_copies())
        self.next_step += 1
        return self.in_flight

    def _view(self, now: float) -> View:
        num_free = self.places.num_free
        waiting = self._startable()[:MAX_STARTABLE] if num_free else ()
        running = [r for r in self.requests.values() if r.state is RequestState.RUNNING]
        return View(
            now=now,
            running=tuple(_request_view(request) for request in running),
            waiting=tuple(_request_view(r, self._num_known(r)) for r in waiting),
            num_free_places=num_free,
            max_batch_tokens=self.config.max_batch_tokens,
            block_size=self.config.block_size,
        )

    def _num_known(self, request: Request) -> int:
        match = self.tables.match(request)
        return match.num_tokens if match else 0

    def _startable(self) -> tuple[Request, ...]:
        is_free = [request is None for request in self.places.running]
        return tuple(
            request
            for request in self.waiting.values()
            if request.submit.place is None or is_free[request.submit.place]
        )

    def _apply(self, share: Share, budget: int, now: float) -> Chunk | None:
        request = self.requests[share.request_id]
        if budget < 1 or not self._make_ready(request, now):
            return None
        start = request.num_computed_tokens
        end = start + min(share.num_tokens, budget, request.num_missing_tokens)
        if border := request.trail.next_border(start):
            end = min(end, border)
        self.tables.grow(request, end, now)
        request.in_flight = True
        return _chunk(request, end)

    def _make_ready(self, request: Request, now: float) -> bool:
        """Let the request run with all that is cached for it; False if it is to wait."""
        match = self.tables.match(request)
        num_known = match.num_tokens if match else request.num_computed_tokens
        if self.tables.is_being_computed(request, num_known):
            return False
        is_new = request.state is RequestState.WAITING
        if is_new and not self._start(request, now):
            return False
        if is_new:
            request.report = self._explain(request, match, now)
        if match:
            self._use(request, match, now)
        return True

    def _explain(self, request: Request, match: Match | None, now: float) -> CacheReport:
        if not request.submit.reuse:
            return CacheReport()
        others = self.contexts.others(request.trail.contexts[0][1])
        found = match or self.cache.match(request.trail, 0)
        return explain(self.cache, request.trail, found, others, now)

    def _use(self, request: Request, match: Match, now: float) -> None:
        num_more = match.num_tokens - request.num_computed_tokens
        num_host = min(count_host_tokens(match), num_more)
        self.tables.use(request, match, now)
        request.report = request.report.plus(num_more - num_host, num_host)
        self.news.append(Cached(request.request_id, num_more, num_host, request.report))

    def _start(self, request: Request, now: float) -> bool:
        claimed = frozenset(
            other.submit.place for other in self.waiting.values() if other.submit.place is not None
        )
        place = self.places.find(request.submit.place, claimed)
        if place is None:
            return False
        request.move(RequestState.RUNNING)
        del self.waiting[request.request_id]
        self.places.enter(place, request)
        request.started_s = now
        return True

    # --- a step's answer ---

    def update(self, batch: Batch, result: StepResult, now: float) -> list[Output]:
        """Book a finished step: tokens out, ended requests freed."""
        assert batch is self.in_flight
        self.in_flight = None
        outputs, self.news = self.news, []
        for chunk, sampled in zip(batch.chunks, result.sampled, strict=True):
            outputs += self._book(self.requests[chunk.request_id], chunk, sampled, now)
        return outputs

    def _book(
        self, request: Request, chunk: Chunk, sampled: Sampled | None, now: float
    ) -> list[Output]:
        request.in_flight = False
        request.num_computed_tokens = chunk.end
        request.num_computed_here += min(chunk.end, request.num_prompt_tokens) - min(
            chunk.start, request.num_prompt_tokens
        )
        self.tables.let_go_of_source(request, now)
        self.tables.publish_full(request, now)
        if request.is_aborted:
            return [self._finish(request, FinishReason.ABORT, now)]
        outputs = _announcements(request)
        assert (sampled is None) == (chunk.sample is None)
        if sampled is not None:
            outputs += self._append(request, sampled, now)
        return outputs

    def _append(self, request: Request, sampled: Sampled, now: float) -> list[Output]:
        if request.first_token_s is None:
            request.first_token_s = now
        request.token_ids.append(sampled.token_id)
        request.trail.extend((sampled.token_id,))
        is_end = sampled.token_id in request.submit.eos_ids
        piece = Piece() if is_end else request.submit.matcher.push(sampled.token_id)
        index = request.num_generated_tokens - 1
        outputs: list[Output] = [TokenOut(request.request_id, index, sampled, piece.text)]
        if is_end or piece.stopped:
            outputs.append(self._finish(request, FinishReason.STOP, now, piece.stopped))
        elif self._is_full(request):
            outputs.append(self._finish(request, FinishReason.LENGTH, now))
        return outputs

    def _is_full(self, request: Request) -> bool:
        limit = request.submit.max_new_tokens
        if limit is not None and request.num_generated_tokens >= limit:
            return True
        return request.num_tokens >= self.config.max_context

    def _finish(
        self, request: Request, reason: FinishReason, now: float, stopped_by_text: bool = False
    ) -> Finished:
        assert not request.in_flight
        if request.state is RequestState.RUNNING:
            self.places.leave(request)
        else:
            del self.waiting[request.request_id]
        request.move(RequestState.FINISHED)
        del self.requests[request.request_id]
        self.tables.leave(request, now)
        text = "" if stopped_by_text else request.submit.matcher.flush()
        return _account(request, reason, now, text, stopped_by_text)

    # --- looking in ---

    def statistics(self) -> CoreStatistics:
        return CoreStatistics(
            num_running=len(self.requests) - len(self.waiting),
            num_waiting=len(self.waiting),
            is_draining=self.is_draining,
            num_used_blocks={tier: self.cache.num_used[tier] for tier in Tier},
            max_blocks={tier: self.cache.limits[tier] for tier in Tier},
            places=self.places.views(),
        )


def _request_view(request: Request, num_known: int = 0) -> RequestView:
    return RequestView(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=max(request.num_computed_tokens, num_known),
        arrival_s=request.arrival_s,
        is_running=request.state is RequestState.RUNNING,
    )


def _sample_row(request: Request) -> SampleRow:
    params = request.submit.sampling
    recent = request.token_ids[-params.repeat_last_n :] if params.has_penalties else ()
    return SampleRow(params, draw(params.seed, request.num_generated_tokens), tuple(recent))


def _chunk(request: Request, end: int) -> Chunk:
    start = request.num_computed_tokens
    return Chunk(
        request.request_id,
        start,
        tuple(request.token_ids[start:end]),
        tuple(zip(*(block.ids for block in request.blocks), strict=True)),
        _sample_row(request) if end == request.num_tokens else None,
        request.trail.context_at(start).adapters,
    )


def _announcements(request: Request) -> list[Output]:
    outputs: list[Output] = []
    if not request.is_announced:
        assert request.place is not None
        assert request.started_s is not None
        request.is_announced = True
        outputs.append(Started(request.request_id, request.place, request.started_s))
    if request.num_computed_tokens <= request.num_prompt_tokens:
        outputs.append(
            Progress(
                request.request_id,
                request.num_prompt_tokens,
                request.num_cached_tokens,
                request.num_computed_tokens,
            )
        )
    return outputs


def _account(
    request: Request, reason: FinishReason, now: float, text: str, stopped_by_text: bool
) -> Finished:
    started = now if request.started_s is None else request.started_s
    first = now if request.first_token_s is None else request.first_token_s
    return Finished(
        request_id=request.request_id,
        reason=reason,
        text=text,
        stopped_by_text=stopped_by_text,
        place=request.place,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_computed_tokens=request.num_computed_here,
        num_generated_tokens=request.num_generated_tokens,
        queue_s=started - request.arrival_s,
        prefill_s=first - started,
        decode_s=now - first,
        cache=request.report,
    )
