"""A finished step's account: tokens out, full blocks published, ended requests let go."""

from attrs import frozen

from kvtrio.core.batch import Batch, Chunk, Sampled, StepResult
from kvtrio.core.cost import load_of
from kvtrio.core.events import Gap, Output, Piece, Progress, Started, TokenOut
from kvtrio.core.request import Request
from kvtrio.core.state import State
from kvtrio.core.types import FinishReason, GapCause


@frozen(kw_only=True)
class _Step:
    """What the account of each request needs to know of the whole step."""

    now: float
    num_prefill_tokens: int
    has_moves: bool


def book_step(state: State, batch: Batch, result: StepResult, now: float) -> list[Output]:
    """What a step's answer causes, request by request."""
    load = load_of(batch)
    state.cost.observe(load, now - state.launched_s)
    step = _Step(
        now=now,
        num_prefill_tokens=load.num_prefill_tokens,
        has_moves=any(copy.source_tier is not copy.target_tier for copy in batch.copies),
    )
    outputs: list[Output] = []
    for chunk, sampled in zip(batch.chunks, result.sampled, strict=True):
        request = state.requests[chunk.request_id]
        _account_chunk(state, request, chunk)
        state.tables.let_go_of_source(request, now)
        state.tables.publish_full(request, now)
        outputs += _book(state, request, sampled, step)
    return outputs


def _account_chunk(state: State, request: Request, chunk: Chunk) -> None:
    """Each prompt token counts once, as computed or reused; what is computed again counts apart."""
    request.in_flight = False
    request.num_computed_tokens = chunk.end
    num_again = max(0, min(request.num_reached_tokens, chunk.end) - chunk.start)
    request.num_recomputed_tokens += num_again
    request.num_reached_tokens = max(request.num_reached_tokens, chunk.end)
    num_new = min(chunk.end, request.num_prompt_tokens) - request.num_accounted_tokens
    if num_new > 0:
        request.num_computed_here += num_new
        request.num_accounted_tokens += num_new
        state.service.charge(request.submit.tenant, num_new, 0)


def _book(state: State, request: Request, sampled: Sampled | None, step: _Step) -> list[Output]:
    if request.is_aborted:
        return [state.finish(request, FinishReason.ABORT, step.now)]
    outputs = _announcements(request)
    if sampled is not None:
        outputs += _append(state, request, sampled, step)
    return outputs


def _append(state: State, request: Request, sampled: Sampled, step: _Step) -> list[Output]:
    _note_time(state, request, step)
    request.token_ids.append(sampled.token_id)
    request.trail.extend((sampled.token_id,))
    state.service.charge(request.submit.tenant, 0, 1)
    is_end = sampled.token_id in request.submit.eos_ids
    piece = Piece() if is_end else request.submit.matcher.push(sampled.token_id)
    index = request.num_generated_tokens - 1
    outputs: list[Output] = [TokenOut(request.request_id, index, sampled, piece.text)]
    if is_end or piece.stopped:
        outputs.append(state.finish(request, FinishReason.STOP, step.now, piece.stopped))
    elif _is_full(state, request):
        outputs.append(state.finish(request, FinishReason.LENGTH, step.now))
    return outputs


def _note_time(state: State, request: Request, step: _Step) -> None:
    last_s, request.last_token_s = request.last_token_s, step.now
    if last_s is None:
        request.first_token_s = step.now
        return
    seconds = step.now - last_s
    assert seconds >= 0.0, "time goes on"
    if seconds > state.config.max_gap_s:
        state.num_stalls[_cause(request, step)] += 1
    if request.longest_gap is None or seconds > request.longest_gap.seconds:
        request.longest_gap = Gap(seconds, _cause(request, step), step.num_prefill_tokens)
    request.was_preempted = False


def _cause(request: Request, step: _Step) -> GapCause:
    if request.was_preempted:
        return GapCause.PREEMPTED
    if step.has_moves:
        return GapCause.MOVE
    return GapCause.PREFILL if step.num_prefill_tokens else GapCause.STEP


def _is_full(state: State, request: Request) -> bool:
    limit = request.submit.max_new_tokens
    if limit is not None and request.num_generated_tokens >= limit:
        return True
    return request.num_tokens >= state.config.max_context


def _announcements(request: Request) -> list[Output]:
    outputs: list[Output] = []
    if not request.is_announced:
        assert request.place is not None
        assert request.started_s is not None
        request.is_announced = True
        outputs.append(Started(request.request_id, request.place, request.started_s))
    # What a preempted request reads again after its first token is nobody's progress.
    is_reading = request.first_token_s is None
    if is_reading and request.num_computed_tokens <= request.num_prompt_tokens:
        outputs.append(
            Progress(
                request.request_id,
                request.num_prompt_tokens,
                request.num_cached_tokens,
                request.num_computed_tokens,
            )
        )
    return outputs
