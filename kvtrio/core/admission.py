"""Who is taken in, and what those who are not are told."""

from kvtrio.core.cost import Load
from kvtrio.core.events import Rejected, Submit
from kvtrio.core.request import Request
from kvtrio.core.state import State
from kvtrio.core.types import RejectReason

MAX_LOOKED_AT = 64
"""Waiting requests whose lengths enter a prediction one by one; the rest by their tokens."""


def refusal(state: State, submit: Submit, now: float) -> Rejected | None:
    """Why a request is not admitted, the lasting reasons first; None if it is."""
    num_tokens, config = len(submit.token_ids), state.config
    if state.is_draining:
        return Rejected(submit.request_id, RejectReason.DRAINING, num_tokens, 0)
    if num_tokens == 0:
        return Rejected(submit.request_id, RejectReason.EMPTY, 0, 1)
    if num_tokens >= config.max_context:
        return Rejected(submit.request_id, RejectReason.TOO_LONG, num_tokens, config.max_context)
    return _queue_refusal(state, submit) or _deadline_refusal(state, submit, now)


def _queue_refusal(state: State, submit: Submit) -> Rejected | None:
    num_tokens, config = len(submit.token_ids), state.config
    waiting = state.waiting
    retry_s = state.mean_stay_s / config.num_places
    if len(state.requests) >= config.num_places + config.max_waiting:
        reason, limit = RejectReason.QUEUE_FULL, config.max_waiting
        return Rejected(submit.request_id, reason, num_tokens, limit, retry_s)
    limit_tokens = config.max_waiting_tokens
    is_over = limit_tokens is not None and waiting.num_tokens + num_tokens > limit_tokens
    # A prompt longer than the limit is taken when nothing else waits: it would never fit.
    if is_over and len(waiting) and limit_tokens is not None:
        reason = RejectReason.QUEUE_TOKENS
        return Rejected(submit.request_id, reason, num_tokens, limit_tokens, retry_s)
    return None


def _deadline_refusal(state: State, submit: Submit, now: float) -> Rejected | None:
    if submit.deadline_s is None:
        return None
    late_s = now + predicted_start_s(state) - submit.deadline_s
    if late_s <= 0.0:
        return None
    num_tokens = len(submit.token_ids)
    return Rejected(submit.request_id, RejectReason.DEADLINE, num_tokens, 0, late_s)


def predicted_start_s(state: State) -> float:
    """Seconds until a request that came now would get a place: waiting ones ahead of it take
    places as they become free, one after a mean stay divided by the number of places."""
    num_ahead = len(state.waiting) + 1 - state.places.num_free
    if num_ahead <= 0:
        return 0.0
    return num_ahead * state.mean_stay_s / state.config.num_places


def predicted_first_token_s(state: State, num_prompt_tokens: int) -> float:
    """Seconds until a request of that size would get its first token: its start, the reading of
    what is being read, and its own."""
    reading = [r for r in state.running.values() if not _is_decoding(r)]
    ahead = sum(request.num_missing_tokens for request in reading[:MAX_LOOKED_AT])
    own = state.cost.predict(Load().plus_chunk(0, num_prompt_tokens))
    others = state.cost.predict(Load().plus_chunk(0, ahead)) if ahead else 0.0
    return predicted_start_s(state) + others + own


def _is_decoding(request: Request) -> bool:
    return request.num_generated_tokens > 0 and request.num_missing_tokens == 1
