"""The requests that decode: kept as a group, so that a step costs what changes in it.

A request enters when a step leaves its last token, which it wrote itself, as all that is missing,
and stays until it ends or loses its place: each share of it computes that token and samples the
next.
"""

from collections import Counter

from attrs import define, field

from kvtrio.core.cost import Load
from kvtrio.core.policy import Streams
from kvtrio.core.request import Request
from kvtrio.core.types import RequestId


@define(eq=False)
class StreamGroup:
    """enter / leave; whoever computes a row's token counts it in ``decode_context``."""

    rows: dict[RequestId, Request] = field(init=False, factory=dict)
    decode_context: int = field(init=False, default=0)
    """Computed tokens of the rows, all together."""
    _adapters: Counter[int] = field(init=False, factory=Counter)
    _priorities: Counter[int] = field(init=False, factory=Counter)

    def enter(self, request: Request) -> None:
        assert request.is_decoding
        self.rows[request.request_id] = request
        self.decode_context += request.num_computed_tokens
        self._adapters[request.adapter_set] += 1
        self._priorities[request.submit.priority] += 1

    def leave(self, request: Request) -> None:
        """Unless it is not there."""
        if self.rows.pop(request.request_id, None) is None:
            return
        self.decode_context -= request.num_computed_tokens
        _lower(self._adapters, request.adapter_set)
        _lower(self._priorities, request.submit.priority)

    def load(self) -> Load:
        """As ``summary``'s."""
        return Load(
            num_decode_rows=len(self.rows),
            decode_context=self.decode_context,
            num_adapters=len(self._adapters) - (0 in self._adapters),
        )

    def summary(self) -> Streams:
        return Streams(
            num_rows=len(self.rows),
            decode_context=self.decode_context,
            adapters=frozenset(self._adapters),
            lowest_priority=min(self._priorities, default=None),
        )


def _lower(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
