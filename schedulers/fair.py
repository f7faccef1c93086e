"""Tenants share alike: who got least goes first.

Service is counted per tenant in tokens, input once and output twice (virtual token counters: Sheng
et al., OSDI 2024); the core counts, and lifts a tenant that was away to the least of those present,
so that nobody saves up. Streams are kept as by ``stall_free``; places and reading time go to the
tenant with the least service, and among its requests to the oldest.
"""

from kvtrio.core.budget import Budget
from kvtrio.core.policy import Plan, RequestView, View


class Fair:
    """Stateless; see the module."""

    def plan(self, view: View) -> Plan:
        budget = Budget(view)
        budget.decode([request for request in view.running if request.is_decoding])
        reading = [request for request in view.running if not request.is_decoding]
        if view.num_free_places:
            reading += view.waiting
        self._read(budget, reading, dict(view.service))
        return Plan(budget.shares)

    def _read(self, budget: Budget, reading: list[RequestView], served: dict[bytes, float]) -> None:
        """Share the time that is left; each share is service, so choose anew each time."""
        num_shares = 0
        while reading := [request for request in reading if budget.has_place(request)]:
            request = min(reading, key=lambda request: _turn(served, request))
            reading.remove(request)
            num_tokens = budget.prefill(request)
            if not num_tokens:
                if not num_shares:
                    budget.force([request])
                return
            num_shares += 1
            served[request.tenant] = served.get(request.tenant, 0.0) + num_tokens


def _turn(served: dict[bytes, float], request: RequestView) -> tuple[bool, float, float, int]:
    service = served.get(request.tenant, 0.0)
    return request.num_preemptions == 0, service, request.arrival_s, request.request_id
