"""What a scheduling plug-in sees and returns. It can be slow or unfair; it cannot corrupt state."""

from collections.abc import Container, Mapping
from typing import Protocol

from attrs import field, frozen

from kvtrio.core.cost import CostModel
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


@frozen(kw_only=True)
class View:
    """Read-only snapshot for one decision. ``running`` and ``waiting`` are in arrival order,
    preempted requests first; ``waiting`` may be a part of the queue: its head, and every tenant's
    and class's head."""

    now: float
    running: tuple[RequestView, ...]
    waiting: tuple[RequestView, ...]
    num_free_places: int
    max_batch_tokens: int
    block_size: int
    max_gap_s: float = 0.1
    """Longest step while somebody's answer streams."""
    max_step_s: float = 0.25
    """Longest step otherwise, so that joining and leaving stay quick."""
    cost: CostModel = field(factory=CostModel)
    service: Mapping[bytes, float] = field(factory=dict)
    """Per tenant: prefill tokens + 2 x generated tokens it got, while it was there (virtual token
    counters: Sheng et al., OSDI 2024)."""


@frozen
class Share:
    """Compute ``num_tokens`` of a request in this step; a waiting one is started by it."""

    request_id: RequestId
    num_tokens: int


@frozen
class Plan:
    """Victims first lose their places, then shares are applied in order."""

    shares: list[Share]
    victims: tuple[RequestId, ...] = ()
    """Running requests that go back to the queue; what they computed stays cached as long as it
    may."""


class Policy(Protocol):
    """Names at most ``max_batch_tokens`` tokens in total, each request at most once, at least one
    token each and no more than it misses; starts no more than there are places. The core applies
    what still fits."""

    def plan(self, view: View) -> Plan: ...


class PolicyError(Exception):
    """A scheduling plug-in broke its contract; nothing was changed."""


def checked(plan: Plan, known: Container[RequestId], running: Container[RequestId]) -> Plan:
    """The plan as it is, or ``PolicyError``."""
    seen: set[RequestId] = set()
    for victim in plan.victims:
        if victim not in running or victim in seen:
            raise PolicyError("a victim must be a running request, named once")
        seen.add(victim)
    for share in plan.shares:
        if share.request_id not in known or share.request_id in seen or share.num_tokens < 1:
            raise PolicyError("a share must name a live request once and at least one token")
        seen.add(share.request_id)
    return plan
