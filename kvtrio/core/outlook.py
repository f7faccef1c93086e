"""When a request that came now would start, and when its first token would come.

Who goes before whom is the policy's business, so the policy is asked: with places and time for
everybody, in which order would it start them?
"""

from functools import cached_property
from itertools import islice
from math import inf

from attrs import define, evolve, frozen

from kvtrio.core.cost import Load
from kvtrio.core.policy import RequestView, Streams, View
from kvtrio.core.request import Request
from kvtrio.core.starts import LEAST_TOKENS, RESERVE, Starts
from kvtrio.core.state import State
from kvtrio.core.views import beside, request_view, view_of

MAX_LOOKED_AT = 1024
"""Waiting requests that the policy is asked about; those behind share the last one's lot."""


def turn_s(state: State, num_ahead: int, now: float) -> float:
    """Seconds until a request gets a place that so many go before: places become free one after a
    mean stay divided by the number of places."""
    num_waits = max(0, num_ahead + 1 - state.places.num_free)
    return num_waits * state.mean_stay_s(now) / state.config.num_places


@frozen
class _Ahead:
    """Those whose turn is before a newcomer's."""

    requests: tuple[RequestView, ...]
    """Who read, and who wait and were looked at."""
    num_waiting: int
    """All who wait."""


@define(eq=False)
class Outlook:
    """Of a request that is not in the state yet; good until the state changes."""

    state: State
    request: Request
    now: float

    def __attrs_post_init__(self) -> None:
        assert self.request.request_id not in self.state.requests

    @cached_property
    def _newcomer(self) -> RequestView:
        return request_view(self.request)

    @cached_property
    def _view(self) -> View:
        return view_of(self.state, self.now)

    @cached_property
    def start_s(self) -> float:
        """Seconds until it gets a place."""
        state, place = self.state, self._newcomer.place
        plan = state.policy.plan(beside(self._view, self._newcomer, self._service))
        if any(share.request_id == self._newcomer.request_id for share in plan.shares):
            return 0.0
        if place is not None:
            num_waits = state.waiting.num_pinned(place) + (place not in state.places.free)
            return num_waits * state.mean_stay_s(self.now)
        if self._is_held:
            num_waits = self._ahead.num_waiting + 1
            return num_waits * state.mean_stay_s(self.now) / len(state.running)
        return turn_s(state, self._ahead.num_waiting, self.now)

    @property
    def _is_held(self) -> bool:
        """Whether it is not a place that it lacks, but the bound on gaps that it would break."""
        return self._view.num_free_places > 0 and not Starts(self._view).may_start(self._newcomer)

    @cached_property
    def _service(self) -> dict[bytes, float]:
        state, tenant = self.state, self.request.submit.tenant
        start = state.service.start(tenant, state.waiting.tenants)
        return {**state.service.counters, tenant: start}

    @cached_property
    def _ahead(self) -> _Ahead:
        waiting = [request for request in self.state.waiting if request.submit.place is None]
        shown = tuple(map(request_view, islice(waiting, MAX_LOOKED_AT)))
        newcomer = evolve(self._newcomer, place=None)
        everybody = (*self._view.reading, *shown, newcomer)
        wide = evolve(
            self._view,
            streams=Streams(),
            free_places=frozenset(range(len(everybody))),
            blocked=(),
            max_batch_tokens=sum(request.num_missing for request in everybody),
            max_gap_s=inf,
            max_step_s=inf,
            service=self._service,
            decoding=tuple,
            waiting=lambda: (*shown, newcomer),
        )
        order = [share.request_id for share in self.state.policy.plan(wide).shares]
        if newcomer.request_id in order:
            del order[order.index(newcomer.request_id) :]
        before = set(order)
        num_waiting = sum(request.request_id in before for request in shown)
        if shown and shown[-1].request_id in before:
            num_waiting += len(waiting) - len(shown)
        return _Ahead(tuple(r for r in everybody if r.request_id in before), num_waiting)

    @property
    def first_token_s(self) -> float:
        """Seconds until its first token: its start, or until those ahead have read their prompts,
        and then its own prompt, beside everybody who will stream by then."""
        streams, ahead = self._view.streams, self._ahead.requests
        others_s = _reading_s(self._view, streams.load(), ahead)
        num_more = min(len(ahead), self.state.config.num_places - 1 - streams.num_rows)
        rows = streams.load()
        for request in ahead[: max(0, num_more)]:
            rows = rows.plus_row(request.num_tokens)
        match = self.state.tables.match(self.request)
        newcomer = request_view(self.request, match.num_tokens if match else 0)
        return max(self.start_s, others_s) + _reading_s(self._view, rows, (newcomer,))


def _reading_s(view: View, rows: Load, requests: tuple[RequestView, ...]) -> float:
    """Seconds that it takes to read prompts beside decoding ``rows``: in each step, the rows' part
    of the bound is not left for reading."""
    if not requests:
        return 0.0
    limit_s = RESERVE * (view.max_gap_s if rows.num_decode_rows else view.max_step_s)
    work_s = sum(_work_s(view, r.num_computed_tokens, r.num_missing) for r in requests)
    num_tokens = sum(request.num_missing for request in requests)
    least_s = _work_s(view, requests[-1].num_computed_tokens, LEAST_TOKENS)
    # Steps are planned with a margin, and take what they take.
    left_s = max(limit_s / view.cost.margin - view.cost.expect(rows), least_s)
    num_steps = max(1.0, work_s / left_s, num_tokens / view.max_batch_tokens)
    return work_s + num_steps * view.cost.expect(rows)


def _work_s(view: View, start: int, num_tokens: int) -> float:
    """What reading adds to a step."""
    return view.cost.expect(Load().plus_chunk(start, num_tokens)) - view.cost.expect(Load())
