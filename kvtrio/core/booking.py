"""A finished step's account: tokens out, full blocks published, ended requests let go."""

from kvtrio.core.batch import Batch, Chunk, Sampled, StepResult
from kvtrio.core.events import Output, Piece, Progress, Started, TokenOut
from kvtrio.core.request import Request
from kvtrio.core.state import State
from kvtrio.core.types import FinishReason


def book_step(state: State, batch: Batch, result: StepResult, now: float) -> list[Output]:
    """What a step's answer causes, request by request."""
    outputs: list[Output] = []
    for chunk, sampled in zip(batch.chunks, result.sampled, strict=True):
        outputs += _book(state, state.requests[chunk.request_id], chunk, sampled, now)
    return outputs


def _book(
    state: State, request: Request, chunk: Chunk, sampled: Sampled | None, now: float
) -> list[Output]:
    request.in_flight = False
    request.num_computed_tokens = chunk.end
    request.num_computed_here += min(chunk.end, request.num_prompt_tokens) - min(
        chunk.start, request.num_prompt_tokens
    )
    state.tables.let_go_of_source(request, now)
    state.tables.publish_full(request, now)
    if request.is_aborted:
        return [state.finish(request, FinishReason.ABORT, now)]
    outputs = _announcements(request)
    assert (sampled is None) == (chunk.sample is None)
    if sampled is not None:
        outputs += _append(state, request, sampled, now)
    return outputs


def _append(state: State, request: Request, sampled: Sampled, now: float) -> list[Output]:
    if request.first_token_s is None:
        request.first_token_s = now
    request.token_ids.append(sampled.token_id)
    request.trail.extend((sampled.token_id,))
    is_end = sampled.token_id in request.submit.eos_ids
    piece = Piece() if is_end else request.submit.matcher.push(sampled.token_id)
    index = request.num_generated_tokens - 1
    outputs: list[Output] = [TokenOut(request.request_id, index, sampled, piece.text)]
    if is_end or piece.stopped:
        outputs.append(state.finish(request, FinishReason.STOP, now, piece.stopped))
    elif _is_full(state, request):
        outputs.append(state.finish(request, FinishReason.LENGTH, now))
    return outputs


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
