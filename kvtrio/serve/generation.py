"""A job under way: requests in the engine, and what they say, choice by choice.

The one source of every answer; the dialects turn its deltas into frames, or its end into a body.
"""

from collections.abc import Awaitable, Callable, Sequence

import trio
from attrs import define, field, frozen

from kvtrio.core.events import Finished, Output, Progress, Rejected, Started, Submit, TokenOut
from kvtrio.core.types import FinishReason, RejectReason, RequestId
from kvtrio.engine import Engine, EngineStopped, HandleGroup, Refused
from kvtrio.serve.choice import Choice, Delta, End, Prefill, Tokens
from kvtrio.serve.errors import (
    CONTEXT_SIZE,
    DEADLINE,
    DRAINING,
    EMPTY_PROMPT,
    NO_MEMORY,
    NOT_FINITE,
    QUEUE_FULL,
    QUEUE_TOKENS,
    STOPPED,
    ApiError,
)
from kvtrio.serve.job import Job

MAX_TOGETHER = 64
"""Tokens in one delta."""
NOT_NOW = {
    RejectReason.QUEUE_FULL: QUEUE_FULL,
    RejectReason.QUEUE_TOKENS: QUEUE_TOKENS,
    RejectReason.DEADLINE: DEADLINE,
}
"""Refusals of the moment: the same request may be taken later."""
FAILED = {FinishReason.ERROR: NOT_FINITE, FinishReason.NO_MEMORY: NO_MEMORY}
"""Requests that the model could not go on with."""


@frozen(kw_only=True)
class Listener:
    """Who is told what becomes of a generation's choices."""

    on_start: Callable[[int, Job], None]
    """A request entered this place."""
    on_end: Callable[[Choice], Awaitable[None]]
    """The choice is complete; what it tells waits for this."""
    on_leave: Callable[[Choice], None]
    """The reader is done with it, complete or not."""


@define(eq=False)
class Generation:
    """For one reader; ``close`` is synchronous and always right."""

    job: Job
    choices: dict[RequestId, Choice]
    _group: HandleGroup
    _listener: Listener
    _engine: Engine
    predicted_s: float | None = None
    """Until the first token, as expected at the start; None: nobody asked."""
    _is_closed: bool = field(init=False, default=False)
    _failure: Exception | None = field(init=False, default=None)
    """Of whom tokens were handed to at once."""

    @classmethod
    def start(cls, engine: Engine, job: Job, n_ctx: int, listener: Listener) -> "Generation":
        """Hand the job's requests to the engine; raises ``ApiError`` if it refuses any."""
        submits = [
            submit_of(engine.new_id(), job, index, n_ctx) for index in range(job.num_answers)
        ]
        asks = job.queueing.predict
        predicted_s = engine.predicted_first_token_s(submits[0]) if asks else None
        try:
            group = engine.submit_all(submits)
        except Refused as refused:
            raise refusal_error(refused.rejected, job, predicted_s) from None
        except EngineStopped:
            raise ApiError(STOPPED) from None
        choices = {
            submit.request_id: Choice(
                index=index,
                job=job,
                matcher=job.matchers[index],
                num_prompt_tokens=len(submit.token_ids),
                encoded=None if job.is_forced else job.encoded[index // job.n],
                predicted_s=predicted_s,
            )
            for index, submit in enumerate(submits)
        }
        return cls(job, choices, group, listener, engine, predicted_s)

    @property
    def in_order(self) -> tuple[Choice, ...]:
        return tuple(self.choices.values())

    @property
    def is_over(self) -> bool:
        return all(choice.finished is not None for choice in self.choices.values())

    def tell_at_once(self, tell: Callable[[Tokens], None], is_free: Callable[[], bool]) -> None:
        """While ``read`` waits, hand each token to ``tell`` where it comes from, in any thread, if
        ``is_free()``; so the reader need not wake. Not where tokens have much to tell."""

        def take(output: TokenOut, now: float) -> bool:
            if self._failure is not None or not is_free():
                return False
            choice = self.choices[output.request_id]
            choice.now_s = now
            try:
                for delta in _tokens(choice, [output]):
                    tell(delta)
            except Exception as error:  # it is the reader's, and not of who brings the token
                self._failure = error
            return self._failure is None

        if not self.job.is_silent and self.job.sampling.num_logprobs is None:
            self._group.outlet = take

    async def read(self, deadline_s: float) -> list[Delta]:
        """Wait for news; empty at the deadline. Raises ``ApiError`` if the engine has gone."""
        deltas: list[Delta] = []
        with trio.move_on_at(deadline_s):
            try:
                deltas = self._advance(await anext(self._group), trio.current_time())
            except EngineStopped:
                raise ApiError(STOPPED) from None
        if self._failure is not None:
            raise self._failure
        for delta in deltas:
            if isinstance(delta, End):
                await self._listener.on_end(delta.choice)
        return deltas

    def close(self) -> None:
        """Forget the answers; what still runs is aborted. Idempotent."""
        self._group.close()
        if not self._is_closed:
            self._is_closed = True
            for choice in self.choices.values():
                self._listener.on_leave(choice)

    def _advance(self, outputs: tuple[Output, ...], now: float) -> list[Delta]:
        if len(self.choices) == 1:
            return self._advance_choice(self.choices[outputs[0].request_id], outputs, now)
        by_request: dict[RequestId, list[Output]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
        deltas: list[Delta] = []
        for request_id, mine in by_request.items():
            deltas += self._advance_choice(self.choices[request_id], mine, now)
        return deltas

    def _advance_choice(self, choice: Choice, outputs: Sequence[Output], now: float) -> list[Delta]:
        choice.now_s = now
        deltas: list[Delta] = []
        for output in outputs:
            if isinstance(output, Started):
                choice.place, choice.started_s = output.place, output.started_s
                self._listener.on_start(output.place, self.job)
            elif isinstance(output, Progress):
                deltas += _prefill(choice, output)
        tokens = [output for output in outputs if isinstance(output, TokenOut)]
        if not choice.is_silent:
            deltas += _tokens(choice, tokens)
        if isinstance(outputs[-1], Finished):
            deltas.append(self._end(choice, outputs[-1]))
        return deltas

    def _end(self, choice: Choice, finished: Finished) -> End:
        if finished.reason is FinishReason.DEADLINE:
            retry_after_s = self._engine.predicted_start_s()
            raise ApiError(DEADLINE, retry_after_s=retry_after_s, predicted_s=self.predicted_s)
        if finished.reason in FAILED:
            raise ApiError(FAILED[finished.reason])
        if finished.reason is FinishReason.ABORT:
            raise ApiError(STOPPED)
        text = "" if choice.is_silent else finished.text
        choice.finished = finished
        choice.num_cached_tokens = finished.num_cached_tokens
        choice.num_processed_tokens = choice.num_prompt_tokens
        return End(choice, text, choice.add((), text))


def submit_of(request_id: RequestId, job: Job, index: int, n_ctx: int) -> Submit:
    """What the engine is asked for answer ``index``."""
    wanted, keeping, prompt_index = job.max_new_tokens, job.keeping, index // job.n
    queueing = job.queueing
    return Submit(
        request_id=request_id,
        token_ids=job.prompts[prompt_index],
        max_new_tokens=None if wanted is None else max(1, min(wanted, n_ctx)),
        sampling=job.sampling_of(index),
        matcher=job.matchers[index],
        eos_ids=job.eos_ids,
        place=job.place,
        namespace=keeping.namespace,
        segments=job.segments[prompt_index],
        reuse=keeping.reuse,
        retain=keeping.retain,
        retain_s=keeping.retain_s,
        session=keeping.session,
        purpose=keeping.purpose,
        num_recalled_tokens=job.num_recalled_of(index),
        is_copy=index % job.n > 0,
        checkpoints=job.message_ends,
        is_silent=job.is_silent,
        tenant=queueing.tenant,
        priority=queueing.priority,
        deadline_s=queueing.deadline_s,
    )


def refusal_error(rejected: Rejected, job: Job, predicted_s: float | None) -> ApiError:
    """What the caller is told of a request that the engine refused."""
    retry_after_s, limit = rejected.retry_after_s, rejected.limit
    match rejected.reason:
        case RejectReason.TOO_LONG:
            return ApiError(
                CONTEXT_SIZE,
                job.prompt_field,
                n_prompt_tokens=rejected.num_prompt_tokens,
                n_ctx=limit,
            )
        case RejectReason.EMPTY:
            return ApiError(EMPTY_PROMPT, job.prompt_field)
        case RejectReason.QUEUE_FULL | RejectReason.QUEUE_TOKENS | RejectReason.DEADLINE as reason:
            spec = NOT_NOW[reason]
            return ApiError(spec, retry_after_s=retry_after_s, predicted_s=predicted_s, limit=limit)
        case RejectReason.DRAINING:
            return ApiError(DRAINING)


def _prefill(choice: Choice, progress: Progress) -> list[Delta]:
    """The first report is preceded by one of what was there already."""
    assert choice.started_s is not None
    is_first = choice.num_processed_tokens == 0
    choice.num_cached_tokens = progress.num_cached_tokens
    # After a preemption less may be there than before; what was told is not taken back.
    processed = max(choice.num_processed_tokens, progress.num_computed_tokens)
    choice.num_processed_tokens = processed
    report = Prefill(choice, processed, choice.now_s - choice.started_s)
    return [Prefill(choice, progress.num_cached_tokens, 0.0), report] if is_first else [report]


def _tokens(choice: Choice, outputs: list[TokenOut]) -> list[Tokens]:
    """Mostly one delta; several for a reader that fell far behind, so that none takes long."""
    if outputs and choice.first_token_s is None:
        choice.first_token_s = choice.now_s
    deltas: list[Tokens] = []
    for start in range(0, len(outputs), MAX_TOGETHER):
        part = outputs[start : start + MAX_TOGETHER]
        sampled = tuple(output.sampled for output in part)
        text = "".join(output.text for output in part)
        deltas.append(Tokens(choice, sampled, text, choice.add(sampled, text)))
    return deltas
