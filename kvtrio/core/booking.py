"""A finished step's account: tokens out, full blocks published, ended requests let go."""

from attrs import frozen

from kvtrio.core.batch import Batch, Chunk, Sampled, StepResult
from kvtrio.core.events import (
    Finished,
    Gap,
    OtherPrompt,
    Output,
    Piece,
    Progress,
    Started,
    TokenOut,
)
from kvtrio.core.request import Request
from kvtrio.core.state import State
from kvtrio.core.types import FinishReason, GapCause, RequestState


@frozen(kw_only=True)
class _Step:
    """What the account of each request needs to know of the whole step."""

    now: float
    num_prefill_tokens: int
    prompt: OtherPrompt | None
    """The one it read most of."""
    has_moves: bool
    outputs: list[Output]
    """What it causes, in order."""


def book_step(state: State, batch: Batch, result: StepResult, now: float) -> list[Output]:
    """What a step's answer causes, request by request."""
    has_moves = bool(batch.saves or batch.loads)
    if has_moves:
        state.exchange.book(batch, result)
    else:
        # What moves cost is in none of the model's features.
        state.cost.observe(state.load, now - state.launched_s)
    step = _Step(
        now=now,
        num_prefill_tokens=state.load.num_prefill_tokens,
        prompt=_largest_prompt(state, batch) if state.load.num_prefill_tokens else None,
        has_moves=has_moves or any(c.source_tier is not c.target_tier for c in batch.copies),
        outputs=[],
    )
    requests, rows = state.requests, state.streams.rows
    unplaced = frozenset(result.unplaced)
    for chunk, sampled in zip(batch.chunks, result.sampled, strict=True):
        request = requests[chunk.request_id]
        if unplaced and chunk.request_id in unplaced:
            step.outputs.append(_end_unplaced(state, request, now))
        elif chunk.request_id in rows:
            _book_row(state, request, sampled, step)
        else:
            _book_chunk(state, request, chunk, sampled, step)
    return step.outputs


def _end_unplaced(state: State, request: Request, now: float) -> Finished:
    """Nothing of its chunk counts, and its running state may be half of a step further."""
    request.in_flight = False
    if request.slot is not None:
        state.tables.states.give_up(request)
    reason = FinishReason.ABORT if request.is_aborted else FinishReason.NO_MEMORY
    return state.finish(request, reason, now)


def _largest_prompt(state: State, batch: Batch) -> OtherPrompt | None:
    rows = state.streams.rows
    read = [chunk for chunk in batch.chunks if chunk.request_id not in rows]
    if not read:
        return None
    chunk = max(read, key=lambda chunk: chunk.end - chunk.start)
    num_tokens = state.requests[chunk.request_id].num_prompt_tokens
    return OtherPrompt(chunk.request_id, num_tokens, chunk.start)


def _book_row(state: State, request: Request, sampled: Sampled | None, step: _Step) -> None:
    """One that decodes went on by a token. Hundreds do in a step: no more than they need."""
    request.in_flight = False
    request.num_computed_tokens += 1
    state.streams.decode_context += 1
    if request.num_computed_tokens > request.num_reached_tokens:
        request.num_reached_tokens = request.num_computed_tokens
    else:
        request.num_recomputed_tokens += 1
    if request.num_computed_tokens % state.config.block_size == 0:
        state.tables.publish_full(request, step.now)
    if request.is_aborted:
        step.outputs.append(state.finish(request, FinishReason.ABORT, step.now))
    elif sampled is not None:
        _append(state, request, sampled, step)
    else:  # a row always asks
        step.outputs.append(state.finish(request, FinishReason.ERROR, step.now))


def _book_chunk(
    state: State, request: Request, chunk: Chunk, sampled: Sampled | None, step: _Step
) -> None:
    _account_chunk(state, request, chunk)
    state.tables.let_go_of_source(request, step.now)
    state.tables.publish_full(request, step.now)
    if request.is_aborted:
        step.outputs.append(state.finish(request, FinishReason.ABORT, step.now))
        return
    step.outputs.extend(_announcements(request))
    if sampled is not None:
        _append(state, request, sampled, step)
    elif chunk.sample is not None:
        step.outputs.append(state.finish(request, FinishReason.ERROR, step.now))
    if request.is_decoding and request.state is RequestState.RUNNING:
        state.streams.enter(request)


def _account_chunk(state: State, request: Request, chunk: Chunk) -> None:
    """Each prompt token counts once, as computed or reused; what is computed again counts apart."""
    assert request.in_flight
    request.in_flight = False
    request.num_computed_tokens = chunk.end
    num_again = max(0, min(request.num_reached_tokens, chunk.end) - chunk.start)
    request.num_recomputed_tokens += num_again
    request.num_reached_tokens = max(request.num_reached_tokens, chunk.end)
    num_new = min(chunk.end, request.num_prompt_tokens) - request.num_accounted_tokens
    if num_new > 0:
        request.num_computed_here += num_new
        request.num_accounted_tokens += num_new
        state.service.charge_input(request.submit.tenant, num_new)


def _append(state: State, request: Request, sampled: Sampled, step: _Step) -> None:
    _note_time(state, request, step)
    submit, token_id, index = request.submit, sampled.token_id, request.num_generated_tokens
    request.token_ids.append(token_id)
    request.trail.append(token_id)
    state.service.charge_output(submit.tenant)
    is_end = token_id in submit.eos_ids
    piece = Piece() if is_end else submit.matcher.push(token_id)
    step.outputs.append(TokenOut(submit.request_id, index, sampled, piece.text))
    if is_end or piece.stopped:
        finished = state.finish(request, FinishReason.STOP, step.now, piece.stopped)
        step.outputs.append(finished)
    elif len(request.token_ids) >= request.max_tokens:
        step.outputs.append(state.finish(request, FinishReason.LENGTH, step.now))


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
        request.longest_gap = _gap(request, seconds, step)
    request.was_preempted = False


def _gap(request: Request, seconds: float, step: _Step) -> Gap:
    prompt = step.prompt
    is_own = prompt is not None and prompt.request_id == request.request_id
    return Gap(
        seconds,
        _cause(request, step),
        step.num_prefill_tokens,
        at=len(request.token_ids),
        prompt=None if is_own else prompt,
    )


def _cause(request: Request, step: _Step) -> GapCause:
    if request.was_preempted:
        return GapCause.PREEMPTED
    if step.has_moves:
        return GapCause.MOVE
    return GapCause.PREFILL if step.num_prefill_tokens else GapCause.STEP


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
