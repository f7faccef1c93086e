"""What a policy is shown of the core's state."""

from collections.abc import Iterable, Mapping

from attrs import evolve

from kvtrio.core.policy import RequestView, View
from kvtrio.core.request import Request
from kvtrio.core.state import State
from kvtrio.core.types import RequestState


def view_of(state: State, now: float) -> View:
    """The state as it is; good until the state changes, since parts are made when looked at."""
    config, waiting = state.config, state.waiting
    free = frozenset(state.places.free)
    return View(
        now=now,
        streams=state.streams.summary(),
        reading=_views(_reading(state)),
        free_places=free,
        blocked=_views(waiting.pinned_heads(waiting.claimed - free)) if waiting.pinned else (),
        max_batch_tokens=config.max_batch_tokens,
        block_size=config.block_size,
        max_gap_s=config.max_gap_s,
        max_step_s=config.max_step_s,
        highest_waiting=waiting.highest_priority,
        last_start_s=state.last_start_s,
        cost=state.cost,
        service=state.service.shown,
        decoding=lambda: _views(state.streams.rows.values()),
        waiting=lambda: _waiting(state, free),
    )


def beside(view: View, newcomer: RequestView, service: Mapping[bytes, float]) -> View:
    """The view that there would be if ``newcomer`` waited, too."""
    place, highest = newcomer.place, view.highest_waiting
    is_blocked = place is not None and place not in view.free_places
    more = () if is_blocked else (newcomer,)
    return evolve(
        view,
        blocked=(*view.blocked, newcomer) if is_blocked else view.blocked,
        highest_waiting=max(newcomer.priority, newcomer.priority if highest is None else highest),
        service=service,
        decoding=lambda: view.decoding,
        waiting=lambda: (*view.waiting, *more),
    )


def _reading(state: State) -> list[Request]:
    rows = state.streams.rows
    if len(rows) == len(state.running):
        return []
    return [request for request_id, request in state.running.items() if request_id not in rows]


def _waiting(state: State, free: frozenset[int]) -> tuple[RequestView, ...]:
    """What the cache has of them matters only where one can start."""
    if not state.waiting:
        return ()
    waiting = state.waiting.shown() + state.waiting.pinned_heads(free)
    if not free:
        return _views(waiting)
    return tuple(request_view(request, _num_known(state, request)) for request in waiting)


def _num_known(state: State, request: Request) -> int:
    match = state.tables.match(request)
    return match.num_tokens if match else 0


def _views(requests: Iterable[Request]) -> tuple[RequestView, ...]:
    return tuple(map(request_view, requests))


def request_view(request: Request, num_known: int = 0) -> RequestView:
    """``num_known``: tokens that the cache has of one that waits."""
    submit = request.submit
    return RequestView(
        request_id=submit.request_id,
        num_tokens=len(request.token_ids),
        num_prompt_tokens=len(submit.token_ids),
        num_computed_tokens=max(request.num_computed_tokens, num_known),
        arrival_s=request.arrival_s,
        is_running=request.state is RequestState.RUNNING,
        priority=submit.priority,
        tenant=submit.tenant,
        adapters=request.adapter_set,
        num_preemptions=request.num_preemptions,
        place=submit.place if request.place is None else request.place,
    )
