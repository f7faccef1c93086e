"""One step's time and tokens, spent share by share: what policies build their plans with."""

from collections.abc import Iterable

from attrs import define, field

from kvtrio.core.cost import Load
from kvtrio.core.policy import RequestView, Share, View

LEAST_TOKENS = 8
"""What a prompt progresses by where not even that much fits: half a block or less, since late in a
long prompt a block alone can cost more than the bound."""
RESERVE = 0.93
"""Share of a bound that is planned; the rest is for what happens between two steps, and for what
the model of the machine does not know yet."""


@define(eq=False)
class Budget:
    """Throw-away; ``shares`` is the plan so far."""

    view: View
    shares: list[Share] = field(init=False, factory=list)
    load: Load = field(init=False, factory=Load)
    num_tokens_left: int = field(init=False)
    num_places_left: int = field(init=False)
    limit_s: float = field(init=False)
    """Seconds that the step may take: the gap while anybody streams."""
    _adapters: set[int] = field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        view = self.view
        self.num_tokens_left = view.max_batch_tokens
        self.num_places_left = view.num_free_places
        is_streaming = any(request.is_decoding for request in view.running)
        self.limit_s = RESERVE * (view.max_gap_s if is_streaming else view.max_step_s)

    def decode(self, requests: list[RequestView]) -> None:
        """Each one's next token. No bound is asked: streams go on."""
        self._adapters.update(request.adapters for request in requests)
        self.load = Load(
            num_decode_rows=len(requests),
            decode_context=sum(request.num_computed_tokens for request in requests),
            num_adapters=len(self._adapters - {0}),
        )
        self.num_tokens_left -= len(requests)
        self.shares = [Share(request.request_id, 1) for request in requests]

    def prefill(self, request: RequestView) -> int:
        """As much of the request as fits into the time that is left; returns how much. Up to the
        end of a block where that is not all of it, unless not even a block fits."""
        if not self.has_place(request):
            return 0
        start, most = request.num_computed_tokens, self._most(request)
        num = self.view.cost.most_tokens(self._with(request), start, most, self.limit_s)
        if num < request.num_missing:
            size = self.view.block_size
            whole = (start + num) // size * size - start
            num = whole if whole > 0 else num if num >= LEAST_TOKENS else 0
        if num:
            self._add(request, num)
        return num

    def force(self, requests: Iterable[RequestView]) -> None:
        """A little progress for the first that has a place, whatever it costs: nothing starves,
        and a plan is never empty while something can run."""
        size = self.view.block_size
        for request in requests:
            to_end = size - request.num_computed_tokens % size
            num = min(LEAST_TOKENS, to_end, self._most(request))
            if num > 0 and self.has_place(request):
                self._add(request, num)
                return

    def _add(self, request: RequestView, num_tokens: int) -> None:
        self.load = self._with(request).plus_chunk(request.num_computed_tokens, num_tokens)
        self._adapters.add(request.adapters)
        self.num_places_left -= not request.is_running
        self.num_tokens_left -= num_tokens
        self.shares.append(Share(request.request_id, num_tokens))

    def _most(self, request: RequestView) -> int:
        return min(request.num_missing, self.num_tokens_left)

    def has_place(self, request: RequestView) -> bool:
        return request.is_running or self.num_places_left > 0

    def _with(self, request: RequestView) -> Load:
        """The load with the request's adapters in it."""
        is_new = request.adapters and request.adapters not in self._adapters
        return self.load.plus_adapters(1) if is_new else self.load
