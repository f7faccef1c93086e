"""What the core holds: requests, blocks, places, and the moves a request makes between them.

Changed by the functions of ``planning`` and ``booking`` and by ``Core`` alone.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping

from attrs import define, field, frozen

from kvtrio.core.batch import Batch
from kvtrio.core.config import CoreConfig
from kvtrio.core.cost import CostModel, Load
from kvtrio.core.disk import DiskTier
from kvtrio.core.events import Conversation, Finished, Output, Submit
from kvtrio.core.exchange import Exchange
from kvtrio.core.explain import CacheReport, MissReason
from kvtrio.core.fetching import Fetches
from kvtrio.core.identity import Context, ContextTable, KeyMaker, TokenTrail
from kvtrio.core.keeping import Keeper
from kvtrio.core.places import Places, PlaceView
from kvtrio.core.policy import Policy
from kvtrio.core.queue import Queue
from kvtrio.core.request import Request
from kvtrio.core.reuse import BlockTables
from kvtrio.core.service import Service
from kvtrio.core.stays import Stays
from kvtrio.core.streams import StreamGroup
from kvtrio.core.tiers import TieredCache
from kvtrio.core.types import FinishReason, GapCause, RequestId, RequestState, Tier

MAX_SESSIONS = 16384
"""Conversations whose names are remembered."""

NOT_STARTED = CacheReport(reason=MissReason.NOT_STARTED)


@frozen(kw_only=True)
class CoreStatistics:
    """A snapshot for health, metrics and the slots view."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    is_draining: bool
    num_used_blocks: Mapping[Tier, int]
    """Held and cached."""
    max_blocks: Mapping[Tier, int]
    num_used_slots: Mapping[Tier, int] = field(factory=dict)
    """Of recurrent layers, those of running requests and of checkpoints; empty without such."""
    max_slots: Mapping[Tier, int] = field(factory=dict)
    num_used_parts: Mapping[Tier, int] = field(factory=dict)
    """Parts of blocks in groups with a sliding window; empty without such."""
    max_parts: Mapping[Tier, int] = field(factory=dict)
    num_ram_bytes: int = 0
    """What all kinds have in RAM, where they share it; beyond their shares on the device."""
    max_ram_bytes: int = 0
    """0: each kind has its share."""
    places: tuple[PlaceView, ...]
    num_disk_bytes: int = 0
    num_disk_entries: int = 0
    """Blocks and states."""
    num_disk_given_up: int = 0
    """Those that could not be written, or not soon enough, since the start."""
    max_disk_bytes: int = 0
    """0: there is no disk tier."""
    num_stalls: Mapping[GapCause, int] = field(factory=dict)
    """Gaps between two tokens of an answer above the bound, since the start."""


@define(eq=False)
class State:
    """See the module, and the rules in ``machine``."""

    config: CoreConfig
    policy: Policy
    keys: KeyMaker
    cache: TieredCache = field(init=False)
    tables: BlockTables = field(init=False)
    exchange: Exchange = field(init=False)
    fetches: Fetches | None = field(init=False, default=None)
    """None: there is no disk tier."""
    contexts: ContextTable = field(init=False, factory=ContextTable)
    cost: CostModel = field(factory=CostModel)
    service: Service = field(init=False, factory=Service)
    places: Places = field(init=False)
    requests: dict[RequestId, Request] = field(init=False, factory=dict)
    """Waiting and running, in order of arrival."""
    waiting: Queue = field(init=False, factory=Queue)
    running: dict[RequestId, Request] = field(init=False, factory=dict)
    streams: StreamGroup = field(init=False, factory=StreamGroup)
    """Those of the running that decode."""
    in_flight: Batch | None = field(init=False, default=None)
    load: Load = field(init=False, factory=Load)
    """What the launched step does, or the last one did."""
    launched_s: float = field(init=False, default=0.0)
    last_start_s: float = field(init=False, default=0.0)
    """When a request was last given a place."""
    is_draining: bool = field(init=False, default=False)
    news: list[Output] = field(init=False, factory=list)
    """What ``schedule`` found, told by ``update``."""
    next_step: int = field(init=False, default=0)
    sessions: OrderedDict[tuple[bytes, bytes], float] = field(init=False, factory=OrderedDict)
    """Conversations by name, and when they last began a turn."""
    stays: Stays = field(init=False, factory=Stays)
    num_stalls: Counter[GapCause] = field(init=False, factory=Counter)

    def __attrs_post_init__(self) -> None:
        config = self.config
        assert config.max_batch_tokens >= config.num_places
        keeper = None
        if config.disk_bytes:
            keeper = Keeper(config, self.keys, DiskTier(config.disk_bytes))
        self.cache = TieredCache(config, keeper)
        self.tables = BlockTables(self.cache, config.block_size)
        self.exchange = Exchange(self.cache, self.keys)
        if keeper is not None:
            self.fetches = Fetches(keeper, self.exchange)
        self.places = Places(config.num_places)

    def add(self, submit: Submit, now: float) -> None:
        """Take in a request that may wait."""
        request = self.new_request(submit, now)
        assert request.num_prompt_tokens < request.max_tokens, "there is room for a token"
        self.requests[request.request_id] = request
        self.service.come(submit.tenant, self.waiting.tenants)
        self.waiting.add(request)
        if self.fetches is not None:
            self.fetches.begin(request)

    def new_request(self, submit: Submit, now: float) -> Request:
        """As it would be taken in."""
        most = self.config.max_context
        if submit.max_new_tokens is not None:
            most = min(most, len(submit.token_ids) + submit.max_new_tokens)
        request = Request(submit, now, list(submit.token_ids), self._trail(submit), most)
        request.tables = self.tables.new_tables()
        request.stops = self.tables.states.stops(submit)
        return request

    def _trail(self, submit: Submit) -> TokenTrail:
        return self.trail(submit)

    def trail(self, submit: Submit | Conversation) -> TokenTrail:
        """Its tokens under their contexts."""
        contexts: list[tuple[int, Context]] = []
        for segment in submit.segments:
            context = self.contexts.intern(submit.namespace, segment.adapters)
            if not contexts or contexts[-1][1].number != context.number:
                contexts.append((segment.start, context))
        trail = TokenTrail(self.keys, self.config.block_size, tuple(contexts))
        trail.extend_prompt(submit.token_ids)
        return trail

    def note_session(self, submit: Submit, now: float) -> bool | None:
        """Whether the conversation was here before; None if it has no name."""
        if submit.session is None:
            return None
        name = (submit.namespace, submit.session)
        is_known = self.sessions.pop(name, None) is not None
        self.sessions[name] = now
        if len(self.sessions) > MAX_SESSIONS:
            self.sessions.popitem(last=False)
        return is_known

    def start(self, request: Request, now: float) -> bool:
        """Give a waiting request a place; False if the one it wants, or every one, is taken."""
        place = self.places.find(request.submit.place, self.waiting.claimed)
        if place is None:
            return False
        request.move(RequestState.RUNNING)
        self.waiting.remove(request)
        self.running[request.request_id] = request
        self.places.enter(place, request)
        request.entered_s = self.last_start_s = now
        if request.started_s is None:
            request.started_s = now
        return True

    def preempt(self, request: Request, now: float) -> None:
        """Send a running request back to the queue; what it computed stays in the cache."""
        assert not request.in_flight
        self._leave_place(request)
        request.move(RequestState.WAITING)
        self.tables.leave(request, now)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.was_preempted = True
        request.place = None
        self.waiting.add(request)

    def _leave_place(self, request: Request) -> None:
        self.places.leave(request)
        self.streams.leave(request)
        del self.running[request.request_id]

    def mean_stay_s(self, now: float) -> float:
        """How long requests keep their places."""
        entered = [r.entered_s for r in self.running.values() if r.entered_s is not None]
        return self.stays.mean_s([now - entered_s for entered_s in entered])

    def finish(
        self, request: Request, reason: FinishReason, now: float, stopped_by_text: bool = False
    ) -> Finished:
        """End a request that is not in flight, and free all it holds."""
        assert not request.in_flight
        if request.state is RequestState.RUNNING:
            self._leave_place(request)
            assert request.entered_s is not None
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.stays.end(now - request.entered_s)
        else:
            self.waiting.remove(request)
        if self.fetches is not None:
            self.fetches.forget(request)
        request.move(RequestState.FINISHED)
        del self.requests[request.request_id]
        self.service.go(request.submit.tenant)
        self.tables.leave(request, now)
        text = "" if stopped_by_text else request.submit.matcher.flush()
        return _account(request, reason, now, text, stopped_by_text)

    def statistics(self) -> CoreStatistics:
        states, parts, keeper = self.cache.states, self.cache.parts, self.cache.keeper
        ram = self.cache.ram
        return CoreStatistics(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_waiting_tokens=self.waiting.num_tokens,
            is_draining=self.is_draining,
            num_used_blocks={tier: self.cache.num_used[tier] for tier in Tier},
            max_blocks={tier: self.cache.limits[tier] for tier in Tier},
            num_used_slots=dict(states.num_used) if states else {},
            max_slots=dict(states.limits) if states else {},
            num_used_parts=dict(parts.num_used) if parts else {},
            max_parts=dict(parts.limits) if parts else {},
            num_ram_bytes=ram.room.num_bytes if ram else 0,
            max_ram_bytes=ram.budget.num_bytes if ram else 0,
            places=self.places.views(),
            num_stalls=dict(self.num_stalls),
            num_disk_bytes=keeper.disk.num_bytes if keeper else 0,
            num_disk_entries=len(keeper.disk.entries) if keeper else 0,
            num_disk_given_up=keeper.num_given_up if keeper else 0,
            max_disk_bytes=keeper.disk.limit if keeper else 0,
        )


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
        cache=request.report if request.started_s is not None else NOT_STARTED,
        num_recomputed_tokens=request.num_recomputed_tokens,
        num_preemptions=request.num_preemptions,
        longest_gap=request.longest_gap,
        num_ready_tokens=max(request.num_computed_tokens, request.num_reached_tokens),
    )
