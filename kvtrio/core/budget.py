"""One step's time and tokens, spent share by share: what policies build their plans with."""

from collections.abc import Iterable, Mapping
from functools import cached_property

from attrs import define, evolve, field

from kvtrio.core.cost import Load
from kvtrio.core.policy import Plan, RequestView, Share, View
from kvtrio.core.starts import LEAST_TOKENS, RESERVE, Starts
from kvtrio.core.types import RequestId


@define(eq=False)
class Budget:
    """Throw-away. Everybody who decodes has a token from the start, and no bound is asked: streams
    go on. ``plan`` is what was decided so far.

    A plug-in that lets only some of those rows decode in a step is to count what runs itself: who
    may start goes by the rows of the fullest step that was measured, and such steps have fewer.
    """

    view: View
    takers: Mapping[RequestId, RequestView] = field(factory=dict)
    """Waiting requests, and the running one whose place each takes."""
    shares: list[Share] = field(init=False, factory=list)
    load: Load = field(init=False)
    num_tokens_left: int = field(init=False)
    num_places_left: int = field(init=False)
    limit_s: float = field(init=False)
    """Seconds that the step may take: the gap while anybody streams."""
    _adapters: set[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        view = self.view
        gone = [victim for victim in self.takers.values() if victim.is_decoding]
        load = view.streams.load()
        self.load = evolve(
            load,
            num_decode_rows=load.num_decode_rows - len(gone),
            decode_context=load.decode_context - sum(v.num_computed_tokens for v in gone),
        )
        self.num_tokens_left = view.max_batch_tokens - self.load.num_decode_rows
        self.num_places_left = view.num_free_places
        self.limit_s = RESERVE * (view.max_gap_s if view.streams.num_rows else view.max_step_s)
        self._adapters = set(view.streams.adapters)

    @property
    def plan(self) -> Plan:
        return Plan(self.shares, all_streams=True)

    def prefill(self, request: RequestView) -> int:
        """As much of the request as fits into the time that is left; returns how much. Up to the
        end of a block where that is not all of it, unless not even a block fits."""
        if not self.may_run(request):
            return 0
        start, most = request.num_computed_tokens, self._most(request)
        num = self.view.cost.most_tokens(self._with(request), start, most, self.limit_s)
        if num < request.num_missing:
            size = self.view.block_size
            whole = (start + num) // size * size - start
            num = whole if whole > 0 else num if num >= LEAST_TOKENS else 0
        if not num and not request.is_running and request.request_id == self._starts.overdue:
            num = self._least(request)
        if num:
            self._add(request, num)
        return num

    def force(self, requests: Iterable[RequestView]) -> None:
        """A little progress for the first that may run, whatever it costs: nothing starves, and a
        plan is never empty while something can run."""
        for request in requests:
            num = self._least(request)
            if num > 0 and self.may_run(request):
                self._add(request, num)
                return

    def may_run(self, request: RequestView) -> bool:
        """Whether it has a place, or may have one: see ``starts``."""
        if request.is_running or request.request_id in self.takers:
            return True
        is_free = request.place is None or request.place in self.view.free_places
        return is_free and self.num_places_left > 0 and self._starts.may_start(request)

    @cached_property
    def _starts(self) -> Starts:
        return Starts(self.view)

    def _add(self, request: RequestView, num_tokens: int) -> None:
        self.load = self._with(request).plus_chunk(request.num_computed_tokens, num_tokens)
        self._adapters.add(request.adapters)
        victim = self.takers.get(request.request_id)
        if not request.is_running and victim is None:
            self.num_places_left -= 1
            self._starts.note(request)
        self.num_tokens_left -= num_tokens
        taken = victim.request_id if victim else None
        self.shares.append(Share(request.request_id, num_tokens, taken))

    def _least(self, request: RequestView) -> int:
        to_end = self.view.block_size - request.num_computed_tokens % self.view.block_size
        return min(LEAST_TOKENS, to_end, self._most(request))

    def _most(self, request: RequestView) -> int:
        return min(request.num_missing, self.num_tokens_left)

    def _with(self, request: RequestView) -> Load:
        """The load with the request's adapters in it."""
        is_new = request.adapters and request.adapters not in self._adapters
        return self.load.plus_adapters(1) if is_new else self.load
