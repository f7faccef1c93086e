"""What a scheduling plug-in sees and returns. It can be slow or unfair; it cannot corrupt state."""

from collections.abc import Callable, Container, Mapping
from functools import cached_property
from typing import Protocol

from attrs import field, frozen

from kvtrio.core.cost import CostModel, Load
from kvtrio.core.messages import message
from kvtrio.core.types import RequestId


@frozen(kw_only=True)
class RequestView:
    """One request as a policy sees it."""

    request_id: RequestId
    num_tokens: int
    """Prompt and generated."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """For a waiting request: what the cache has of it now."""
    arrival_s: float
    is_running: bool
    priority: int = 0
    """Classes; a higher number goes first."""
    tenant: bytes = b""
    adapters: int = 0
    """Number of its adapter set; equal sets, equal numbers."""
    num_preemptions: int = 0
    place: int | None = None
    """Where it runs, or the one place that it waits for."""

    @property
    def num_missing(self) -> int:
        """Tokens still to compute before the next token can be sampled."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens > self.num_prompt_tokens and self.num_missing == 1


@message(kw_only=True)
class Streams:
    """The requests that decode, taken together: hundreds of rows are alike to most policies."""

    num_rows: int = 0
    decode_context: int = 0
    """Positions that they attend to, all together."""
    adapters: frozenset[int] = frozenset()
    """Their adapter sets, 0 included where a row has none."""
    lowest_priority: int | None = None
    """Lowest class among them; None: nobody decodes."""

    def load(self) -> Load:
        """One token for each."""
        return Load(
            num_decode_rows=self.num_rows,
            decode_context=self.decode_context,
            num_adapters=len(self.adapters - {0}),
        )


@message(kw_only=True)
class View:
    """Read-only, for one decision. Requests are in arrival order, preempted ones first.

    Views of single requests are made when they are first asked for: what a policy does not look
    at costs nothing.
    """

    now: float
    streams: Streams
    """Those that decode, one by one in ``decoding``."""
    reading: tuple[RequestView, ...]
    """Those that run and do not decode: they read their prompts."""
    free_places: frozenset[int]
    blocked: tuple[RequestView, ...] = ()
    """The first for every place that is taken and wanted by somebody who waits for it alone."""
    highest_waiting: int | None = None
    """Highest class of those that wait, blocked or not; None: nobody does."""
    max_batch_tokens: int
    block_size: int
    max_gap_s: float = 0.1
    """Longest step while somebody's answer streams."""
    max_step_s: float = 0.25
    """Longest step otherwise, so that joining and leaving stay quick."""
    last_start_s: float = 0.0
    """When a request was last given a place."""
    cost: CostModel = field(factory=CostModel)
    service: Mapping[bytes, float] = field(factory=dict)
    """Per tenant: prefill tokens + 2 x generated tokens it got, while it was there (virtual token
    counters: Sheng et al., OSDI 2024)."""
    _decoding: Callable[[], tuple[RequestView, ...]] = field(default=tuple, eq=False)
    _waiting: Callable[[], tuple[RequestView, ...]] = field(default=tuple, eq=False)

    @cached_property
    def decoding(self) -> tuple[RequestView, ...]:
        """The rows of ``streams``."""
        return self._decoding()

    @cached_property
    def waiting(self) -> tuple[RequestView, ...]:
        """Those that any free place suits, or a certain one that is free. It may be a part of the
        queue: its head, and every tenant's and class's head."""
        return self._waiting()

    @property
    def running(self) -> tuple[RequestView, ...]:
        return self.decoding + self.reading

    @property
    def num_free_places(self) -> int:
        return len(self.free_places)


@frozen
class Share:
    """Compute ``num_tokens`` of a request in this step; a waiting one is started by it."""

    request_id: RequestId
    num_tokens: int
    victim: RequestId | None = None
    """A running request that goes back to the queue, and gives its place to this waiting one if it
    starts in this step; else it goes on. What it computed stays cached as long as it may."""


@message
class Plan:
    """Those that decode get their tokens, shares are applied in order."""

    shares: list[Share]
    all_streams: bool = False
    """Everybody who decodes gets a token; ``shares`` name none of them. Else only those do that
    ``shares`` name."""

    @property
    def victims(self) -> tuple[RequestId, ...]:
        """Of all shares."""
        return tuple(share.victim for share in self.shares if share.victim is not None)


class Policy(Protocol):
    """Names at most ``max_batch_tokens`` tokens in total, each request at most once, at least one
    token each and no more than it misses; starts no more than there are places. The core applies
    what still fits.

    ``plan`` depends on the view alone: the core also asks about views that might come to be, to
    tell who would be started before whom.
    """

    def plan(self, view: View) -> Plan: ...


class PolicyError(Exception):
    """A scheduling plug-in broke its contract; nothing was changed."""


def checked(
    plan: Plan,
    known: Container[RequestId],
    running: Container[RequestId],
    decoding: Container[RequestId] = (),
) -> Plan:
    """The plan as it is, or ``PolicyError``."""
    seen: set[RequestId] = set()
    for victim in plan.victims:
        if victim not in running or victim in seen:
            raise PolicyError("a victim must be a running request, named once")
        seen.add(victim)
    for share in plan.shares:
        if share.request_id not in known or share.request_id in seen or share.num_tokens < 1:
            raise PolicyError("a share must name a live request once and at least one token")
        if share.victim is not None and share.request_id in running:
            raise PolicyError("who runs has a place already")
        if plan.all_streams and share.request_id in decoding:
            raise PolicyError("who decodes has a share already")
        seen.add(share.request_id)
    return plan
