"""Strict classes, with ageing: a higher class goes first, and takes a place if none is free.

A request rises by one class for every ``AGEING_S`` that it waits, for its place in the order only:
nobody is preempted for a class that was waited for. A victim is the newest request of the lowest
class below; it comes back before fresh ones and is preempted ``MAX_PREEMPTIONS`` times at most.
"""

from kvtrio.core.budget import Budget
from kvtrio.core.policy import Plan, RequestView, View
from kvtrio.core.types import RequestId

AGEING_S = 30.0
MAX_PREEMPTIONS = 3


class Priority:
    """Stateless; see the module."""

    def plan(self, view: View) -> Plan:
        takers = _takers(view)
        victims = tuple(takers.values())
        budget = Budget(view)
        budget.num_places_left += len(victims)
        running = [request for request in view.running if request.request_id not in victims]
        budget.decode([request for request in running if request.is_decoding])
        reading = [request for request in running if not request.is_decoding]
        reading += view.waiting
        # A place that was taken from somebody goes to whom it was taken for.
        reading.sort(key=lambda r: (r.request_id not in takers, _order(view, r)))
        is_reading = [budget.prefill(request) > 0 for request in reading]
        if not any(is_reading):
            budget.force(reading)
        return Plan(budget.shares, victims)


def _order(view: View, request: RequestView) -> tuple[float, bool, float, int]:
    rank = request.priority + (view.now - request.arrival_s) // AGEING_S
    return -rank, request.num_preemptions == 0, request.arrival_s, request.request_id


def _takers(view: View) -> dict[RequestId, RequestId]:
    """Waiting requests of a higher class that find no place, and whose place each takes: anybody's
    of a lower class, or, if it waits for one place, the holder's."""
    places, takers = view.num_free_places, dict[RequestId, RequestId]()
    running = [r for r in view.running if r.num_preemptions < MAX_PREEMPTIONS]
    running.sort(key=lambda request: (request.priority, -request.arrival_s))
    for request in sorted(view.waiting, key=lambda request: -request.priority):
        if places > 0:
            places -= 1
            continue
        lower = (
            other
            for other in running
            if other.priority < request.priority and request.place in (None, other.place)
        )
        if victim := next(lower, None):
            running.remove(victim)
            takers[request.request_id] = victim.request_id
    return takers
