"""Steps that only decode, many at a time: for simulations, where no machine has to be waited for.

1. Exactly what as many ``schedule`` and ``update`` would do: same blocks in the same order, same
   times, same ends. What a step does for every row alike is done for a row when somebody can see
   it: at the ends of its blocks, when any row ends, and at the end of the stretch.
2. A stretch begins where everybody who runs decodes, nobody waits and the policy gives all of them
   their tokens. It ends before the first step that would begin when something comes, or when
   nobody runs.
3. The policy is not asked in between: it must not change its mind about rows because time goes by.
"""

from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from kvtrio.core.cost import Load
from kvtrio.core.events import Finished, Gap
from kvtrio.core.messages import message
from kvtrio.core.request import Request
from kvtrio.core.state import State
from kvtrio.core.storage import TierMoves
from kvtrio.core.types import FinishReason, GapCause, RequestId
from kvtrio.core.views import view_of

NO_MOVES = TierMoves()


@message(kw_only=True)
class StretchStep:
    """One of the steps."""

    step: int
    now: float
    """At its end."""
    load: Load
    duration_s: float
    predicted_s: float
    finished: Sequence[Finished]
    moves: TierMoves | None
    """None: nothing moved."""


@frozen(kw_only=True)
class Machine:
    """What stands in for the model."""

    seconds: Callable[[Load], float]
    """What a step takes."""
    tokens: Callable[[RequestId, int, int], list[int]]
    """(request, first index, number): tokens of its answer."""


@frozen(kw_only=True)
class Listener:
    """Who is told."""

    step: Callable[[StretchStep], None]
    tokens: Callable[[RequestId, Sequence[float]], None]
    """A request got tokens at these times; before its end is told."""


def can_stretch(state: State, now: float) -> bool:
    """Whether the next step decodes for all that run and does nothing else."""
    rows = state.streams.rows
    if not rows or len(rows) != len(state.running) or state.waiting or state.news:
        return False
    if any(request.is_aborted for request in rows.values()):
        return False
    plan = state.policy.plan(view_of(state, now))
    return plan.all_streams and not plan.shares


@define(eq=False)
class _Row:
    """One request in the stretch."""

    request: Request
    phase: int
    """Its first token's place within a block."""
    num_left: int
    """Steps until it ends, from the stretch's start."""
    num_done: int = 0
    """Steps that are in its account."""


@define(eq=False)
class Stretch:
    """``run`` it once."""

    state: State
    machine: Machine
    listener: Listener
    now: float
    _rows: list[_Row] = field(init=False)
    _phases: list[list[_Row]] = field(init=False)
    """Rows by their place within a block."""
    _ends: set[int] = field(init=False)
    """Steps with which rows end."""
    _times: list[float] = field(init=False, factory=list)
    _gaps: list[float] = field(init=False, factory=list)
    """Between two steps' ends; of the first step nothing is known."""
    _moved: set[int] = field(init=False, factory=set)
    """Steps that waited for moves between memories."""

    def __attrs_post_init__(self) -> None:
        size = self.state.config.block_size
        self._rows = [
            _Row(
                request, request.num_computed_tokens % size, request.max_tokens - request.num_tokens
            )
            for request in self.state.streams.rows.values()
        ]
        self._phases = [[] for _ in range(size)]
        for row in self._rows:
            self._phases[row.phase].append(row)
        self._ends = {row.num_left - 1 for row in self._rows}

    def run(self, until: Callable[[], float]) -> float:
        """Steps up to ``until``, which is asked again after each end; returns the time at the end
        of the last one."""
        until_s = until()
        while self.now < until_s and self.state.streams.rows:
            if self._step():
                until_s = until()
        self._settle_all()
        return self.now

    def _step(self) -> bool:
        """Whether a row ended with it."""
        state, number, begun_s = self.state, len(self._times), self.now
        for row in self._phases[-number % state.config.block_size]:  # their next begins a block
            self._settle(row, number)
            state.tables.grow(row.request, row.request.num_computed_tokens + 1, begun_s)
        has_loads = False
        if state.cache.copies or state.cache.loads:
            has_loads = self._note_moves(number)
        load = state.load = state.streams.load()
        predicted_s = state.cost.predict(load)
        state.next_step += 1
        state.launched_s = begun_s
        self.now = now = begun_s + self.machine.seconds(load)
        if not has_loads:
            state.cost.observe(load, now - begun_s)
        if self._times:
            self._gaps.append(now - self._times[-1])
        self._times.append(now)
        state.streams.decode_context += len(state.streams.rows)
        finished = self._close(number)
        step = StretchStep(
            step=state.next_step - 1,
            now=now,
            load=load,
            duration_s=now - begun_s,
            predicted_s=predicted_s,
            finished=finished,
            moves=state.cache.take_moves() if state.cache.moves != NO_MOVES else None,
        )
        self.listener.step(step)
        return bool(finished)

    def _note_moves(self, number: int) -> bool:
        """Whether there is more than copies."""
        cache = self.state.cache
        loads, copies = cache.take_loads(), cache.take_copies()
        if loads or any(copy.source_tier is not copy.target_tier for copy in copies):
            self._moved.add(number)
        return bool(loads)

    def _close(self, number: int) -> list[Finished]:
        """Publish the blocks that the step filled, and end the rows that it completed."""
        state, phase = self.state, (-number - 1) % self.state.config.block_size
        if number not in self._ends:
            for row in self._phases[phase]:
                self._settle(row, number + 1)
                state.tables.publish_full(row.request, self.now)
            return []
        for row in self._rows:
            self._settle(row, number)
        finished: list[Finished] = []
        for row in self._rows:  # one after the other: an end looks at the others' accounts
            self._settle(row, number + 1)
            if row.phase == phase:
                state.tables.publish_full(row.request, self.now)
            if row.num_left == number + 1:
                finished.append(state.finish(row.request, FinishReason.LENGTH, self.now))
                self._phases[row.phase].remove(row)
        self._rows = [row for row in self._rows if row.num_left > number + 1]
        return finished

    # --- accounts ---

    def _settle_all(self) -> None:
        for row in self._rows:
            self._settle(row, len(self._times))

    def _settle(self, row: _Row, number: int) -> None:
        """Bring a row's account up to the first ``number`` steps."""
        num_new = number - row.num_done
        if num_new <= 0:
            return
        request, state = row.request, self.state
        ids = self.machine.tokens(request.request_id, request.num_generated_tokens, num_new)
        num_before = request.num_tokens
        request.token_ids += ids
        request.trail.extend(ids)
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_new
        again = max(0, min(request.num_reached_tokens, end) - start)
        request.num_recomputed_tokens += again
        request.num_computed_tokens = end
        request.num_reached_tokens = max(request.num_reached_tokens, end)
        state.service.charge_output(request.submit.tenant, num_new)
        self._note_times(request, row.num_done, number, num_before)
        row.num_done = number

    def _note_times(self, request: Request, first: int, end: int, num_before: int) -> None:
        times = self._times[first:end]
        self.listener.tokens(request.request_id, times)
        assert request.last_token_s is not None, "who decodes has a token"
        gaps = [times[0] - request.last_token_s, *self._gaps[first : end - 1]]
        request.last_token_s = times[-1]
        longest, limit = max(gaps), self.state.config.max_gap_s
        if longest > limit:
            for number, seconds in enumerate(gaps, first):
                if seconds > limit:
                    self.state.num_stalls[self._cause(request, number, first)] += 1
        if request.longest_gap is None or longest > request.longest_gap.seconds:
            index = gaps.index(longest)
            cause = self._cause(request, first + index, first)
            request.longest_gap = Gap(longest, cause, 0, at=num_before + index)
        request.was_preempted = False

    def _cause(self, request: Request, number: int, first: int) -> GapCause:
        if request.was_preempted and number == first:
            return GapCause.PREEMPTED
        return GapCause.MOVE if number in self._moved else GapCause.STEP
