"""First come, first served, under a token budget: the baseline.

Decoding requests get their one token first, so that prefill never stops a stream; what is left of
the budget goes to prompts in order of arrival.
"""

from kvtrio.core.policy import Plan, RequestView, Share, View


class FCFS:
    """Stateless; see the module."""

    def plan(self, view: View) -> Plan:
        reading = list(view.reading)
        if view.free_places:
            reading += view.waiting[: view.num_free_places]
        reading.sort(key=_arrival)
        return Plan(_fill(reading, view.max_batch_tokens - view.streams.num_rows), all_streams=True)


def _arrival(request: RequestView) -> tuple[float, int]:
    return request.arrival_s, request.request_id


def _fill(requests: list[RequestView], budget: int) -> list[Share]:
    shares: list[Share] = []
    for request in requests:
        if budget <= 0:
            break
        shares.append(Share(request.request_id, min(budget, request.num_missing)))
        budget -= shares[-1].num_tokens
    return shares
