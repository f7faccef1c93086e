"""Waiting requests: in order of arrival, preempted ones first, and how many tokens they bring.

1. Every waiting request is ``fresh`` or ``preempted``, and counted in ``held``.
2. One that waits for a certain place is in ``pinned``, too; a fresh one that does not, in
   ``anywhere`` and ``heads``.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, MutableMapping
from itertools import islice
from math import inf
from typing import TypeVar

from attrs import define, field

from kvtrio.core.request import Request
from kvtrio.core.types import RequestId

K = TypeVar("K")
G = TypeVar("G", bound=MutableMapping[RequestId, Request])

NUM_SHOWN = 32
"""How many a policy is shown from the head of the queue, and at most of others' heads."""


@define
class Held:
    """What some of the queue amounts to."""

    num_requests: int = 0
    num_tokens: int = 0

    def add(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        assert self.num_requests >= 0
        assert self.num_tokens >= 0


@define(eq=False)
class Queue:
    """add / remove; the core decides who."""

    fresh: dict[RequestId, Request] = field(init=False, factory=dict)
    preempted: dict[RequestId, Request] = field(init=False, factory=dict)
    held: dict[tuple[bytes, int], Held] = field(init=False, factory=dict)
    """Per tenant and class, all requests and the tokens that they are to read: a preempted one's
    with those that it wrote."""
    num_tokens: int = field(init=False, default=0)
    anywhere: dict[RequestId, Request] = field(init=False, factory=dict)
    """The fresh ones that take any place."""
    heads: dict[tuple[bytes, int], dict[RequestId, Request]] = field(init=False, factory=dict)
    """Those per tenant and class, in order of arrival."""
    pinned: dict[tuple[int, int], OrderedDict[RequestId, Request]] = field(init=False, factory=dict)
    """Per place and class those, preempted ones first, that wait for it and no other."""
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
        self._count(request, +1)
        if submit.place is not None:
            mine = self.pinned.setdefault((submit.place, submit.priority), OrderedDict())
            mine[request_id] = request
            if request.num_preemptions:
                mine.move_to_end(request_id, last=False)
        if request.num_preemptions:
            self.preempted[request_id] = request
            return
        self.fresh[request_id] = request
        if submit.place is None:
            self.anywhere[request_id] = request
            self.heads.setdefault((submit.tenant, submit.priority), {})[request_id] = request
        if submit.deadline_s is not None:
            self.timed[request_id] = request
            self.soonest_s = min(self.soonest_s, submit.deadline_s)

    def _count(self, request: Request, sign: int) -> None:
        key = (request.submit.tenant, request.submit.priority)
        held = self.held.setdefault(key, Held())
        held.add(sign, sign * request.num_tokens)
        self.num_tokens += sign * request.num_tokens
        if not held.num_requests:
            del self.held[key]

    def held_by(self, tenant: bytes) -> Held:
        return _sum(held for (owner, _), held in self.held.items() if owner == tenant)

    def held_in(self, priority: int) -> Held:
        """All in one class."""
        return _sum(held for (_, each), held in self.held.items() if each == priority)

    @property
    def highest_priority(self) -> int | None:
        return max((priority for _, priority in self.held), default=None)

    @property
    def tenants(self) -> set[bytes]:
        """Those with a request that takes any place and never had one."""
        return {tenant for tenant, _ in self.heads}

    def late(self, now: float) -> list[Request]:
        """Those whose deadline has passed."""
        if now < self.soonest_s:
            return []
        deadlines = [(r.submit.deadline_s or 0.0, r) for r in self.timed.values()]
        self.soonest_s = min((each for each, _ in deadlines if each > now), default=inf)
        return [request for each, request in deadlines if each <= now]

    def remove(self, request: Request) -> None:
        request_id, submit = request.request_id, request.submit
        self._count(request, -1)
        if submit.place is not None:
            _take_out(self.pinned, (submit.place, submit.priority), request_id)
        if self.preempted.pop(request_id, None) is not None:
            return
        del self.fresh[request_id]
        if self.anywhere.pop(request_id, None) is not None:
            _take_out(self.heads, (submit.tenant, submit.priority), request_id)
        self.timed.pop(request_id, None)

    def shown(self) -> list[Request]:
        """Whom a policy sees of those that take any place: the preempted, the head of the queue,
        and the first of every tenant and class, so that no order of arrival hides anybody."""
        back = {i: r for i, r in self.preempted.items() if r.submit.place is None}
        chosen = dict(islice(back.items(), NUM_SHOWN))
        ready = (item for item in self.anywhere.items() if not item[1].is_fetching)
        chosen |= islice(ready, NUM_SHOWN)
        if len(self.anywhere) > NUM_SHOWN:
            firsts = (next(iter(mine.items())) for mine in self.heads.values())
            chosen |= islice((item for item in firsts if not item[1].is_fetching), NUM_SHOWN)
        return list(chosen.values())

    def pinned_heads(self, places: Container[int]) -> list[Request]:
        """Of those that wait for one of ``places``, the first of every class, if it may start."""
        firsts = (
            next(iter(mine.values())) for (place, _), mine in self.pinned.items() if place in places
        )
        return [request for request in firsts if not request.is_fetching]

    def num_pinned(self, place: int) -> int:
        """How many wait for it alone."""
        return sum(len(mine) for (wanted, _), mine in self.pinned.items() if wanted == place)

    @property
    def claimed(self) -> set[int]:
        """Places that somebody waits for."""
        return {place for place, _ in self.pinned}


def _sum(parts: Iterable[Held]) -> Held:
    total = Held()
    for held in parts:
        total.add(held.num_requests, held.num_tokens)
    return total


def _take_out(groups: dict[K, G], key: K, request_id: RequestId) -> None:
    del groups[key][request_id]
    if not groups[key]:
        del groups[key]
