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
        reading = list(view.reading)
        if view.free_places:
            reading += view.waiting
        if not reading:
            return Plan([], all_streams=True)
        budget = Budget(view)
        self._read(budget, reading, dict(view.service))
        return budget.plan

    def _read(self, budget: Budget, reading: list[RequestView], served: dict[bytes, float]) -> None:
        """Share the time that is left; each share is service, so choose anew each time."""
        queues: dict[bytes, list[RequestView]] = {}
        for request in sorted(reading, key=_order, reverse=True):
            queues.setdefault(request.tenant, []).append(request)
        while queues:
            tenant = min(queues, key=lambda each: _turn(served, queues[each][-1]))
            request = queues[tenant].pop()
            if not queues[tenant]:
                del queues[tenant]
            if not budget.may_run(request):
                continue
            num_tokens = budget.prefill(request)
            if not num_tokens:
                if not budget.shares:
                    budget.force([request])
                return
            served[tenant] = served.get(tenant, 0.0) + num_tokens


def _order(request: RequestView) -> tuple[bool, float, int]:
    """Within a tenant."""
    return request.num_preemptions == 0, request.arrival_s, request.request_id


def _turn(served: dict[bytes, float], request: RequestView) -> tuple[bool, float, float, int]:
    is_fresh, arrival_s, request_id = _order(request)
    return is_fresh, served.get(request.tenant, 0.0), arrival_s, request_id
