"""Waiting requests: in order of arrival, preempted ones first, and how many tokens they bring."""

from collections.abc import Iterator
from itertools import islice
from math import inf

from attrs import define, field

from kvtrio.core.request import Request
from kvtrio.core.types import RequestId

NUM_SHOWN = 32
"""How many a policy is shown from the head of the queue, and at most of others' heads."""


@define(eq=False)
class Queue:
    """add / remove; the core decides who."""

    fresh: dict[RequestId, Request] = field(init=False, factory=dict)
    preempted: dict[RequestId, Request] = field(init=False, factory=dict)
    num_tokens: int = field(init=False, default=0)
    """Prompt tokens of the fresh ones."""
    anywhere: dict[RequestId, Request] = field(init=False, factory=dict)
    """The fresh ones that take any place."""
    heads: dict[tuple[bytes, int], dict[RequestId, Request]] = field(init=False, factory=dict)
    """Those per tenant and class, in order of arrival."""
    pinned: dict[RequestId, Request] = field(init=False, factory=dict)
    """Those, preempted ones too, that wait for a certain place."""
    timed: dict[RequestId, Request] = field(init=False, factory=dict)
    """Those with a deadline."""
    soonest_s: float = field(init=False, default=inf)
    """No deadline is earlier; asked before each step, so that all are looked at only when one may
    have passed."""

    def __len__(self) -> int:
        return len(self.fresh) + len(self.preempted)

    def __iter__(self) -> Iterator[Request]:
        yield from self.preempted.values()
        yield from self.fresh.values()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.fresh or request_id in self.preempted

    def add(self, request: Request) -> None:
        request_id, submit = request.request_id, request.submit
        if submit.place is not None:
            self.pinned[request_id] = request
        if request.num_preemptions:
            self.preempted[request_id] = request
            return
        self.fresh[request_id] = request
        self.num_tokens += request.num_prompt_tokens
        if submit.place is None:
            self.anywhere[request_id] = request
            self.heads.setdefault((submit.tenant, submit.priority), {})[request_id] = request
        if submit.deadline_s is not None:
            self.timed[request_id] = request
            self.soonest_s = min(self.soonest_s, submit.deadline_s)

    def late(self, now: float) -> list[Request]:
        """Those whose deadline has passed."""
        if now < self.soonest_s:
            return []
        deadlines = [(r.submit.deadline_s or 0.0, r) for r in self.timed.values()]
        self.soonest_s = min((each for each, _ in deadlines if each > now), default=inf)
        return [request for each, request in deadlines if each <= now]

    def remove(self, request: Request) -> None:
        request_id, submit = request.request_id, request.submit
        self.pinned.pop(request_id, None)
        if self.preempted.pop(request_id, None) is not None:
            return
        del self.fresh[request_id]
        self.num_tokens -= request.num_prompt_tokens
        if self.anywhere.pop(request_id, None) is not None:
            key = (submit.tenant, submit.priority)
            del self.heads[key][request_id]
            if not self.heads[key]:
                del self.heads[key]
        self.timed.pop(request_id, None)

    def shown(self) -> list[Request]:
        """What a policy gets to see: the preempted, the head of the queue, and the first of every
        tenant, class and place, so that no order of arrival hides anybody."""
        chosen = dict(islice(self.preempted.items(), NUM_SHOWN))
        chosen |= islice(self.anywhere.items(), NUM_SHOWN)
        if len(self.anywhere) > NUM_SHOWN:
            firsts = (next(iter(mine.items())) for mine in self.heads.values())
            chosen |= islice(firsts, NUM_SHOWN)
        places: dict[int | None, Request] = {}
        for request in self.pinned.values():
            places.setdefault(request.submit.place, request)
        chosen |= {request.request_id: request for request in places.values()}
        return list(chosen.values())
