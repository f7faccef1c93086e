"""Strict classes, with ageing: a higher class goes first, and takes a place if none is free.

A request rises by one class for every ``AGEING_S`` that it waits, for its place in the order only:
nobody is preempted for a class that was waited for. A victim is the newest request of the lowest
class below; it comes back before fresh ones and is preempted ``MAX_PREEMPTIONS`` times at most.
"""

from math import inf

from kvtrio.core.budget import Budget
from kvtrio.core.policy import Plan, RequestView, View
from kvtrio.core.types import RequestId

AGEING_S = 30.0
MAX_PREEMPTIONS = 3


class Priority:
    """Stateless; see the module."""

    def plan(self, view: View) -> Plan:
        takers = _takers(view)
        budget = Budget(view, takers)
        for request in view.waiting + view.blocked if takers else ():
            # A place that was taken from somebody goes to whom it was taken for.
            if request.request_id in takers and not budget.prefill(request):
                budget.force([request])
        victims = {victim.request_id for victim in takers.values()}
        reading = [request for request in view.reading if request.request_id not in victims]
        if view.free_places:
            reading += [r for r in view.waiting if r.request_id not in takers]
        reading.sort(key=lambda request: _order(view, request))
        for request in reading:
            budget.prefill(request)
        if not budget.shares:
            budget.force(reading)
        return budget.plan


def _order(view: View, request: RequestView) -> tuple[float, bool, float, int]:
    rank = request.priority + (view.now - request.arrival_s) // AGEING_S
    return -rank, request.num_preemptions == 0, request.arrival_s, request.request_id


def _takers(view: View) -> dict[RequestId, RequestView]:
    """Waiting requests of a higher class that find no place, and whose place each takes: anybody's
    of a lower class, or, if it waits for one place, the holder's."""
    places, takers = view.num_free_places, dict[RequestId, RequestView]()
    if view.highest_waiting is None or view.highest_waiting <= _lowest(view):
        return takers
    wanting = sorted(view.waiting + view.blocked, key=lambda request: -request.priority)
    running = [r for r in view.running if r.num_preemptions < MAX_PREEMPTIONS]
    running.sort(key=lambda request: (request.priority, -request.arrival_s))
    blocked = {request.request_id for request in view.blocked}
    for request in wanting:
        if places > 0 and request.request_id not in blocked:
            places -= 1
            continue
        lower = (
            other
            for other in running
            if other.priority < request.priority and request.place in (None, other.place)
        )
        if victim := next(lower, None):
            running.remove(victim)
            takers[request.request_id] = victim
    return takers


def _lowest(view: View) -> float:
    """Lowest class that runs."""
    classes = [request.priority for request in view.reading]
    if view.streams.lowest_priority is not None:
        classes.append(view.streams.lowest_priority)
    return min(classes, default=inf)
