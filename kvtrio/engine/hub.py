"""Core, open handles and observers: the one place where the engine meets the core.

1. Everything here is synchronous but the two waits, so a task sees the core only between events.
2. Outputs are handed out by the call that made them; records follow.
3. ``_has_input`` is set whenever the core was told something since the loop last waited.
4. ``_is_idle`` is set exactly while the core has no work, and after the end.
"""

from collections.abc import Callable

import trio
from attrs import define, field, frozen

from kvtrio.core.admission import predicted_first_token_s, predicted_start_s
from kvtrio.core.batch import Batch, Chunk, StepResult
from kvtrio.core.events import (
    Abort,
    Cached,
    Drain,
    Finished,
    Gap,
    Output,
    Rejected,
    Submit,
    Tick,
    TokenOut,
)
from kvtrio.core.identity import effective
from kvtrio.core.machine import Core, CoreStatistics
from kvtrio.core.storage import TierMoves
from kvtrio.core.types import GapCause, RequestId
from kvtrio.engine.handle import EngineStopped, Handle, Refused
from kvtrio.engine.records import (
    CostRecord,
    Gaps,
    Observer,
    RequestRecord,
    StepRecord,
    breach_of,
)

COST_EVERY = 1000
"""Steps between two reports of what they cost."""


@frozen(eq=False)
class _Live:
    """What the engine keeps of an admitted request until it is finished."""

    handle: Handle
    submit: Submit
    gaps: Gaps = field(factory=Gaps)


@define(eq=False)
class Hub:
    """See the module's rules. ``clock`` gives seconds; ``check`` runs after every change."""

    _core: Core
    _observer: Observer
    _clock: Callable[[], float]
    _check: Callable[[Core], None]
    _live: dict[RequestId, _Live] = field(init=False, factory=dict)
    _has_input: trio.Event = field(init=False, factory=trio.Event)
    _is_idle: trio.Event = field(init=False, factory=trio.Event)
    _has_stopped: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        assert not self._core.has_work
        self._is_idle.set()

    # --- callers ---

    def submit(self, submit: Submit) -> Handle:
        """Admit a request; raises ``Refused``, or ``EngineStopped`` after the end."""
        if self._has_stopped:
            raise EngineStopped
        outputs = self._core.handle(submit, self._clock())
        self._check(self._core)
        match outputs:
            case [Rejected() as rejected]:
                self._observer.rejected(rejected)
                raise Refused(rejected)
        longest = self._longest_answer(submit)
        handle = Handle(submit.request_id, longest, self._abort, self._clock)
        self._live[submit.request_id] = _Live(handle, submit)
        if self._is_idle.is_set():
            self._is_idle = trio.Event()
        self._hand_out(outputs)
        self._has_input.set()
        return handle

    def _longest_answer(self, submit: Submit) -> int:
        room = self._core.config.max_context - len(submit.token_ids)
        return room if submit.max_new_tokens is None else min(room, submit.max_new_tokens)

    def _abort(self, request_id: RequestId) -> None:
        self._tell(Abort(request_id))

    def drain(self) -> None:
        self._tell(Drain())

    def abort_all(self) -> None:
        """Abort what waits and runs. Its readers learn it at once, not when a step has ended."""
        for request_id, live in list(self._live.items()):
            live.handle.stop()
            self._abort(request_id)

    def _tell(self, event: Abort | Drain) -> None:
        outputs = self._core.handle(event, self._clock())
        self._check(self._core)
        self._hand_out(outputs)
        self._has_input.set()

    def statistics(self) -> CoreStatistics:
        return self._core.statistics()

    @property
    def is_idle(self) -> bool:
        return self._is_idle.is_set()

    def cost(self) -> CostRecord:
        return CostRecord.of(self._core.cost)

    def predicted_start_s(self) -> float:
        return predicted_start_s(self._core)

    def predicted_first_token_s(self, num_prompt_tokens: int) -> float:
        return predicted_first_token_s(self._core, num_prompt_tokens)

    async def wait_idle(self) -> None:
        """Return when no request is waiting or running; at once after the engine's end."""
        await self._is_idle.wait()
        while self._core.has_work and not self._has_stopped:
            await self._is_idle.wait()  # somebody submitted before this task had its turn

    # --- the loop ---

    def schedule(self) -> Batch | None:
        self._hand_out(self._core.handle(Tick(), self._clock()))
        batch = self._core.schedule(self._clock())
        self._check(self._core)
        return batch

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run."""
        return self._core.has_work

    async def wait_for_input(self) -> None:
        """Wait until the core is told something; what it was told since ``schedule`` counts."""
        await self._has_input.wait()
        self._has_input = trio.Event()

    def update(self, batch: Batch, result: StepResult, duration_s: float) -> None:
        """Book a finished step, hand out what it brought, then report."""
        num_decode_rows = sum(map(self._is_decode, batch.chunks))
        outputs = self._core.update(batch, result, self._clock())
        self._check(self._core)
        self._hand_out(outputs)
        self._report_step(batch, num_decode_rows, duration_s)

    def _report_step(self, batch: Batch, num_decode_rows: int, duration_s: float) -> None:
        core, num_prefill_tokens = self._core, batch.num_tokens - num_decode_rows
        record = StepRecord(
            step=batch.step,
            num_chunks=len(batch.chunks),
            num_prefill_tokens=num_prefill_tokens,
            num_decode_rows=num_decode_rows,
            num_waiting=len(core.waiting),
            num_running=len(core.running),
            duration_s=duration_s,
            predicted_s=batch.predicted_s,
            limit_s=batch.limit_s,
            breach=breach_of(batch, num_prefill_tokens, core.config.block_size, duration_s),
        )
        self._observer.step(record)
        if (batch.step + 1) % COST_EVERY == 0:
            self._observer.cost(self.cost())

    def stop(self) -> None:
        """The loop has ended: wake all that wait, so that nobody waits for ever."""
        self._has_stopped = True
        for live in self._live.values():
            live.handle.stop()
        self._is_idle.set()
        if self._core.cost.num_observed:
            self._observer.cost(self.cost())

    def _is_decode(self, chunk: Chunk) -> bool:
        return chunk.start >= len(self._live[chunk.request_id].submit.token_ids)

    # --- out ---

    def _hand_out(self, outputs: list[Output]) -> None:
        now = self._clock()
        records: list[RequestRecord] = []
        for output in outputs:
            live = self._live[output.request_id]
            if isinstance(output, Cached):
                # Its numbers reach the reader with the next Progress.
                self._observer.cached(output)
                continue
            live.handle.push(output)
            if isinstance(output, TokenOut):
                live.gaps.add(now)
            elif isinstance(output, Finished):
                del self._live[output.request_id]
                records.append(_record(output, live))
        if not self._core.has_work:
            self._is_idle.set()
        for record in records:
            self._observer.request(record)
        if (moves := self._core.cache.take_moves()) != TierMoves():
            self._observer.moved(moves)


def _record(finished: Finished, live: _Live) -> RequestRecord:
    submit = live.submit
    p50, p99, longest = live.gaps.percentiles(0.5, 0.99, 1.0)
    return RequestRecord(
        request_id=finished.request_id,
        reason=finished.reason,
        stopped_by_text=finished.stopped_by_text,
        place=finished.place,
        num_prompt_tokens=finished.num_prompt_tokens,
        num_cached_tokens=finished.num_cached_tokens,
        num_computed_tokens=finished.num_computed_tokens,
        num_generated_tokens=0 if submit.is_silent else finished.num_generated_tokens,
        queue_s=finished.queue_s,
        prefill_s=finished.prefill_s,
        decode_s=finished.decode_s,
        gap_p50_s=p50,
        gap_p99_s=p99,
        gap_max_s=longest,
        gaps_s=live.gaps.ascending(),
        cache=finished.cache,
        retain=submit.retain,
        adapters=effective(submit.segments[-1].adapters),
        session=submit.session,
        purpose=submit.purpose,
        num_recalled_tokens=submit.num_recalled_tokens,
        is_copy=submit.is_copy,
        num_recomputed_tokens=finished.num_recomputed_tokens,
        num_preemptions=finished.num_preemptions,
        longest_gap=_longest_gap(finished, live.handle),
    )


def _longest_gap(finished: Finished, handle: Handle) -> Gap | None:
    """Between two tokens as the reader saw them: a reader that does not read is a cause, too."""
    gap = finished.longest_gap
    handle.note_unread()
    if gap is not None and handle.longest_unread_s > gap.seconds:
        return Gap(handle.longest_unread_s, GapCause.READER, 0)
    return gap
