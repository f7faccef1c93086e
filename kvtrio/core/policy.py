"""What a scheduling plug-in sees and returns. It can be slow or unfair; it cannot corrupt state."""

from collections.abc import Container
from typing import Protocol

from attrs import frozen

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

    @property
    def num_missing(self) -> int:
        """Tokens still to compute before the next token can be sampled."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens > self.num_prompt_tokens and self.num_missing == 1


@frozen(kw_only=True)
class View:
    """Read-only snapshot for one decision. ``running`` and ``waiting`` are in arrival order;
    a waiting request appears only if a place is free for it."""

    now: float
    running: tuple[RequestView, ...]
    waiting: tuple[RequestView, ...]
    num_free_places: int
    max_batch_tokens: int
    block_size: int


@frozen
class Share:
    """Compute ``num_tokens`` of a request in this step; a waiting one is started by it."""

    request_id: RequestId
    num_tokens: int


class Policy(Protocol):
    """Names at most ``max_batch_tokens`` tokens in total, each request at most once, at least one
    token each and no more than it misses. The core applies what still fits, in order."""

    def plan(self, view: View) -> list[Share]: ...


class PolicyError(Exception):
    """A scheduling plug-in broke its contract; nothing was changed."""


def checked(shares: list[Share], known: Container[RequestId]) -> list[Share]:
    """The shares as they are, or ``PolicyError``."""
    seen: set[RequestId] = set()
    for share in shares:
        if share.request_id not in known or share.request_id in seen or share.num_tokens < 1:
            raise PolicyError("a share must name a live request once and at least one token")
        seen.add(share.request_id)
    return shares
