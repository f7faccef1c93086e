"""Nobody waits for somebody else's prompt: the default.

Every decoding request gets its token in every step. Prompts get the time that is left under the
bound on the gap between streamed tokens, as predicted by the cost model (stall-free batching:
Agrawal et al., OSDI 2024, with milliseconds in place of tokens). The shortest remaining prompt goes
first, and waiting counts as much as being short, so that none starves. If not even a
few tokens fit, a few are read all the same.
"""

from kvtrio.core.budget import Budget
from kvtrio.core.cost import Load
from kvtrio.core.policy import Plan, RequestView, View


class StallFree:
    """Stateless; see the module."""

    def plan(self, view: View) -> Plan:
        reading = list(view.reading)
        if view.free_places:
            reading += view.waiting
        if not reading:
            return Plan([], all_streams=True)
        budget = Budget(view)
        reading.sort(key=lambda request: urgency(view, request))
        is_reading = [budget.prefill(request) > 0 for request in reading]
        if not any(is_reading):
            budget.force(reading)
        return budget.plan


def urgency(view: View, request: RequestView) -> tuple[bool, float, int]:
    """Seconds of reading left less seconds waited, preempted requests first."""
    load = Load().plus_chunk(request.num_computed_tokens, request.num_missing)
    waited_s = view.now - request.arrival_s
    left_s = view.cost.predict(load) - waited_s
    return request.num_preemptions == 0, left_s, request.request_id
