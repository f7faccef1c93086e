"""Who may start, now that all that run will stream one day: rows and adapters cost each of them.

1. A request starts if, with it and all that run decoding and a few tokens of somebody's prompt
   beside them, a step keeps the bound on gaps.
2. Others that keep it may pass one that does not, until that one has waited ``AGEING_S``. After as
   long without any start one starts all the same, so nobody waits for ever for the bound's sake.
3. Nobody is held while nothing runs, nor where not even it alone would keep the bound.
4. More rows and adapters than any step had are approached by quarters: a fit says little beyond
   what it was made from, and who has started is not sent back.
"""

from math import inf

from attrs import define, field

from kvtrio.core.cost import Load
from kvtrio.core.policy import RequestView, View
from kvtrio.core.types import RequestId

LEAST_TOKENS = 8
"""A prompt that is read is to progress by as much in each step: half a block or less, since late in
a long prompt a block alone can cost more than the bound."""
RESERVE = 0.93
"""Share of a bound that is planned; the rest is for what happens between two steps, and for what
the model of the machine does not know yet."""
AGEING_S = 30.0
NUM_UNTRIED = 4
GROWTH = 1.25
"""So many, and this times the most that was measured, are near enough to what is known."""


@define(eq=False)
class Starts:
    """``may_start`` in the order of turns, ``note`` those that do."""

    view: View
    _crowd: Load = field(init=False)
    """One token for all that run, and for those that were noted."""
    _adapters: set[int] = field(init=False)
    overdue: RequestId | None = field(init=False, default=None)
    """One that starts though the bound is lost by it: then it is also to read."""
    _num_noted: int = field(init=False, default=0)
    _is_barred: bool = field(init=False, default=False)
    """One that has waited long is next, whoever fits meanwhile."""

    def __attrs_post_init__(self) -> None:
        streams, reading = self.view.streams, self.view.reading
        self._adapters = {*streams.adapters, *(request.adapters for request in reading)} - {0}
        self._crowd = Load(
            num_decode_rows=streams.num_rows + len(reading),
            decode_context=streams.decode_context + sum(r.num_tokens for r in reading),
        )

    def may_start(self, request: RequestView) -> bool:
        if self._is_barred or self.overdue is not None:
            return self.overdue == request.request_id
        if self._crowd.num_decode_rows == 0 or self.view.max_gap_s == inf:
            return True
        if not self._is_near(request):
            return False
        if self._keeps_bound(request):
            return True
        now, arrival_s = self.view.now, request.arrival_s
        if not self._num_noted and now - max(arrival_s, self.view.last_start_s) >= AGEING_S:
            self.overdue = request.request_id
            return True
        self._is_barred = now - arrival_s >= AGEING_S
        return False

    def note(self, request: RequestView) -> None:
        """It starts."""
        self._num_noted += 1
        self._adapters = self._with(request)
        self._crowd = self._crowd.plus_row(request.num_tokens)

    def _is_near(self, request: RequestView) -> bool:
        """To what was measured."""
        cost, num_rows = self.view.cost, self._crowd.num_decode_rows + 1
        num_adapters = len(self._with(request))
        return (
            num_rows <= GROWTH * cost.most_rows + NUM_UNTRIED
            and num_adapters <= GROWTH * cost.most_adapters + NUM_UNTRIED
        )

    def _with(self, request: RequestView) -> set[int]:
        return self._adapters | {request.adapters} - {0}

    def _keeps_bound(self, request: RequestView) -> bool:
        limit_s = RESERVE * self.view.max_gap_s
        if self._step_s(self._crowd, request, len(self._with(request))) <= limit_s:
            return True
        return self._step_s(Load(), request, int(request.adapters != 0)) > limit_s

    def _step_s(self, rows: Load, request: RequestView, num_adapters: int) -> float:
        load = rows.plus_row(request.num_tokens).plus_adapters(num_adapters)
        return self.view.cost.predict(load.plus_chunk(0, LEAST_TOKENS))
