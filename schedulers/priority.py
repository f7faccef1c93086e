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
        victims = _victims(view)
        budget = Budget(view)
        budget.num_places_left += len(victims)
        running = [request for request in view.running if request.request_id not in victims]
        budget.decode([request for request in running if request.is_decoding])
        reading = [request for request in running if not request.is_decoding]
        reading += view.waiting
        reading.sort(key=lambda request: _order(view, request))
        is_reading = [budget.prefill(request) > 0 for request in reading]
        if reading and not any(is_reading):
            budget.force(reading[0])
        return Plan(budget.shares, tuple(victims))


def _order(view: View, request: RequestView) -> tuple[float, bool, float, int]:
    rank = request.priority + (view.now - request.arrival_s) // AGEING_S
    return -rank, request.num_preemptions == 0, request.arrival_s, request.request_id


def _victims(view: View) -> list[RequestId]:
    """One running request for each waiting one of a higher class that finds no place."""
    places = view.num_free_places
    running = sorted(view.running, key=lambda request: (request.priority, -request.arrival_s))
    running = [request for request in running if request.num_preemptions < MAX_PREEMPTIONS]
    victims: list[RequestId] = []
    for request in sorted(view.waiting, key=lambda request: -request.priority):
        if places > 0:
            places -= 1
        elif running and running[0].priority < request.priority:
            victims.append(running.pop(0).request_id)
    return victims
