"""Who is taken in, and what those who are not are told.

A queue that somebody floods is to have room for others all the same. So a tenant may hold a few
times the room that is left, and no more (a dynamic threshold: Choudhury and Hahne, 1998), whatever
classes it asks for; and every class leaves a little for the others.
"""

from kvtrio.core.events import Rejected, Submit
from kvtrio.core.outlook import Outlook, turn_s
from kvtrio.core.queue import Held
from kvtrio.core.state import State
from kvtrio.core.types import RejectReason

TENANT_TIMES_ROOM = 4
"""Alone, a tenant may fill four fifths of the queue; each of two, four ninths."""
CLASS_TIMES_ROOM = 16


def refusal(state: State, submit: Submit, now: float) -> Rejected | None:
    """Why a request is not admitted, the lasting reasons first; None if it is."""
    num_tokens, config = len(submit.token_ids), state.config
    if state.is_draining:
        return Rejected(submit.request_id, RejectReason.DRAINING, num_tokens, 0)
    if num_tokens == 0:
        return Rejected(submit.request_id, RejectReason.EMPTY, 0, 1)
    if num_tokens >= config.max_context:
        return Rejected(submit.request_id, RejectReason.TOO_LONG, num_tokens, config.max_context)
    return _queue_refusal(state, submit, now) or _deadline_refusal(state, submit, now)


def _queue_refusal(state: State, submit: Submit, now: float) -> Rejected | None:
    config, waiting = state.config, state.waiting
    mine, ours = waiting.held_by(submit.tenant), waiting.held_in(submit.priority)
    if not _has_room(state, mine, ours):
        reason, limit = RejectReason.QUEUE_FULL, config.max_waiting
    elif config.max_waiting_tokens is not None and not _has_token_room(state, submit, mine, ours):
        reason, limit = RejectReason.QUEUE_TOKENS, config.max_waiting_tokens
    else:
        return None
    num_tokens, retry_s = len(submit.token_ids), state.mean_stay_s(now) / config.num_places
    return Rejected(submit.request_id, reason, num_tokens, limit, retry_s)


def _has_room(state: State, mine: Held, ours: Held) -> bool:
    """For one request more. Those that the free places are for do not count as waiting."""
    num_free = state.places.num_free
    room = state.config.num_places + state.config.max_waiting - len(state.requests)
    return (
        room > max(0, mine.num_requests - num_free) / TENANT_TIMES_ROOM
        and room > max(0, ours.num_requests - num_free) / CLASS_TIMES_ROOM
    )


def _has_token_room(state: State, submit: Submit, mine: Held, ours: Held) -> bool:
    """For its tokens. A prompt longer than the limit is taken when nothing else waits: it would
    never fit; and a tenant's only one may take what room there is."""
    waiting, limit, num = state.waiting, state.config.max_waiting_tokens, len(submit.token_ids)
    assert limit is not None
    room = limit - waiting.num_tokens - num
    is_mine = not mine.num_requests or mine.num_tokens + num <= TENANT_TIMES_ROOM * room
    is_ours = not ours.num_requests or ours.num_tokens + num <= CLASS_TIMES_ROOM * room
    return not len(waiting) or (room >= 0 and is_mine and is_ours)


def _deadline_refusal(state: State, submit: Submit, now: float) -> Rejected | None:
    """Only those count that the policy would put ahead; but where everybody may go ahead and it is
    in time, nobody has to be asked."""
    if submit.deadline_s is None:
        return None
    left_s, is_full = submit.deadline_s - now, not state.places.free
    if submit.place is None and is_full and turn_s(state, len(state.waiting), now) <= left_s:
        return None
    late_s = Outlook(state, state.new_request(submit, now), now).start_s - left_s
    if late_s <= 0.0:
        return None
    num_tokens = len(submit.token_ids)
    return Rejected(submit.request_id, RejectReason.DEADLINE, num_tokens, 0, late_s)


def predicted_start_s(state: State, now: float) -> float:
    """Seconds until a request gets a place that comes now and that everybody goes before."""
    return turn_s(state, len(state.waiting), now)


def predicted_first_token_s(state: State, submit: Submit, now: float) -> float:
    """Seconds until a request would get its first token if it came now. Changes nothing."""
    return Outlook(state, state.new_request(submit, now), now).first_token_s
