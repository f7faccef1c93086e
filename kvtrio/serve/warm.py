"""POST /v1/cache/warm: a prompt is read in idle time and nothing is written.

One prompt at a time, when nobody is served, as a request of the lowest class. Whoever comes ends it
with the step under way; what was computed stays cached, and the next attempt, when it is quiet
again, goes on from there.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import trio
from attrs import define, evolve, field, frozen

from kvtrio.core.events import Finished, Output, Progress, Started
from kvtrio.core.types import FinishReason
from kvtrio.engine import Engine, EngineStopped, Handle, Refused
from kvtrio.serve.errors import CONTEXT_SIZE, QUEUE_FULL, STOPPED, ApiError
from kvtrio.serve.generation import FAILED, refusal_error, submit_of
from kvtrio.serve.idle import IdleTime
from kvtrio.serve.job import Job
from kvtrio.serve.schema import MAX_PRIORITY

OnStart = Callable[[int, Job], None]
"""Told the place in which the job runs."""

MAX_WAITING = 16
"""Prompts that may wait for idle time."""


@define(eq=False)
class Warmed:
    """What became of a prompt so far, over all attempts. Counts are of its tokens."""

    num_tokens: int
    is_complete: bool = False
    num_interruptions: int = 0
    _num_computed: int = 0
    """In attempts that have ended."""
    _num_known: int = 0
    """Cached or computed in the last attempt, as far as it told."""
    _num_computed_now: int = 0

    def note(self, output: Output) -> None:
        match output:
            case Progress():
                self._num_known = output.num_computed_tokens
                self._num_computed_now = output.num_computed_tokens - output.num_cached_tokens
            case Finished():
                self._num_known = output.num_cached_tokens + output.num_computed_tokens
                self._num_computed += output.num_computed_tokens
                self._num_computed_now = 0
                self.is_complete = output.reason not in (FinishReason.ABORT, *FAILED)

    @property
    def num_computed(self) -> int:
        return self._num_computed + self._num_computed_now

    def body(self, model_name: str) -> dict[str, Any]:
        """``computed_tokens`` are those that this request was computed for; what was there without
        it, or came to be there meanwhile, is cached."""
        return {
            "object": "cache.warm",
            "model": model_name,
            "is_complete": self.is_complete,
            "prompt_tokens": self.num_tokens,
            "cached_tokens": max(0, self._num_known - self.num_computed),
            "computed_tokens": self.num_computed,
            "interruptions": self.num_interruptions,
        }


@frozen(eq=False)
class Warmer:
    """Reads prompts in idle time, in the order in which they came."""

    engine: Engine
    idle: IdleTime
    n_ctx: int
    _turn: trio.StrictFIFOLock = field(factory=trio.StrictFIFOLock)

    async def warm(self, job: Job, on_start: OnStart) -> Warmed:
        """Return when the state is there, or at the job's deadline. Raises ``ApiError``."""
        (prompt,) = job.prompts
        if len(prompt) >= self.n_ctx:
            raise ApiError(
                CONTEXT_SIZE, job.prompt_field, n_prompt_tokens=len(prompt), n_ctx=self.n_ctx
            )
        if self._turn.statistics().tasks_waiting >= MAX_WAITING:
            raise ApiError(QUEUE_FULL, limit=MAX_WAITING)
        warmed, deadline_s = Warmed(len(prompt)), job.queueing.deadline_s
        with trio.move_on_at(inf if deadline_s is None else deadline_s):
            async with self._turn:
                await self._warm(job, warmed, on_start)
        return warmed

    async def _warm(self, job: Job, warmed: Warmed, on_start: OnStart) -> None:
        while not warmed.is_complete:
            await self.idle.wait()
            handle = self._submitted(job)
            # Not closed when it is to give way: its account comes with its last output.
            with handle, self.idle.used(partial(self.engine.abort, handle.request_id)):
                await _read(handle, job, warmed, on_start)
            warmed.num_interruptions += not warmed.is_complete

    def _submitted(self, job: Job) -> Handle:
        submit = submit_of(self.engine.new_id(), job, 0, self.n_ctx)
        # Its deadline is this task's: the engine knows only of one by which to start.
        last = evolve(submit, priority=-MAX_PRIORITY, deadline_s=None)
        try:
            return self.engine.submit(last)
        except Refused as refused:
            raise refusal_error(refused.rejected, job, None) from None
        except EngineStopped:
            raise ApiError(STOPPED) from None


async def _read(handle: Handle, job: Job, warmed: Warmed, on_start: OnStart) -> None:
    try:
        async for outputs in handle:
            for output in outputs:
                warmed.note(output)
                if isinstance(output, Finished) and output.reason in FAILED:
                    raise ApiError(FAILED[output.reason])
                if isinstance(output, Started):
                    on_start(output.place, job)
    except EngineStopped:
        raise ApiError(STOPPED) from None
