"""GET /metrics: kvtrio's own names, which are the truth, and the peers' names made of the same.

Text format 0.0.4. No global registry: what is shown is made of the arguments.
"""

from collections.abc import Iterator

from attrs import define, field, frozen
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from kvtrio.core.types import FinishReason, GapCause, RejectReason, Tier
from kvtrio.engine.records import BreachReason, CostRecord
from kvtrio.obs.families import Snapshot, Values, counter, gauge, histogram, one
from kvtrio.obs.metrics_compat import Scrapes, llamacpp_families, vllm_families
from kvtrio.obs.tally import Requests, Tally

MIME_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@define(eq=False)
class Metrics:
    """Renders snapshots; remembers the last one for the rates."""

    scrapes: Scrapes = field(factory=Scrapes)

    def render(self, snapshot: Snapshot) -> bytes:
        families = [*own_families(snapshot), *llamacpp_families(snapshot, self.scrapes)]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected([*families, *vllm_families(snapshot)]))
        return generate_latest(registry)


@frozen(eq=False)
class _Collected:
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families

    def describe(self) -> list[Metric]:
        """Nothing: the registry would otherwise look for names that are there twice."""
        return []


# --- our own ---


def own_families(snapshot: Snapshot) -> Iterator[Metric]:
    requests = snapshot.tally.requests
    yield from _tokens(requests)
    yield from _requests(requests)
    yield from _times(requests)
    yield from _cache(snapshot)
    yield from _steps(snapshot.tally)
    yield from _bounds(snapshot)
    yield from _costs(snapshot.cost)
    yield from _adapters(snapshot)


def _tokens(requests: Requests) -> Iterator[Metric]:
    sources = {
        "computed": requests.num_computed_tokens,
        "device": requests.num_device_tokens,
        "ram": requests.num_host_tokens,
        "disk": requests.num_disk_tokens,
    }
    by_source: Values = [({"source": name}, number) for name, number in sources.items()]
    yield counter("kvtrio_prompt_tokens", "Prompt tokens of ended requests, by source", by_source)
    copied: Values = [
        ({"source": "computed"}, requests.num_copied_computed_tokens),
        ({"source": "reused"}, requests.num_copied_reused_tokens),
    ]
    yield counter(
        "kvtrio_copied_prompt_tokens", "The same for answers to a prompt after its first", copied
    )
    recalled, generated = requests.num_recalled_tokens, requests.num_generated_tokens
    yield counter(
        "kvtrio_recalled_tokens", "Prompt tokens that kept their generated ids", one(recalled)
    )
    yield counter("kvtrio_generated_tokens", "Tokens generated", one(generated))
    yield gauge(
        "kvtrio_longest_request_tokens", "Longest so far", one(float(requests.longest_tokens))
    )


def _requests(requests: Requests) -> Iterator[Metric]:
    reasons: Values = [
        ({"reason": reason.value}, requests.by_reason[reason]) for reason in FinishReason
    ]
    yield counter("kvtrio_requests", "Ended requests, by why they ended", reasons)
    matches: Values = [
        ({"reason": reason.value, "turn": turn.value}, number)
        for (reason, turn), number in requests.by_miss.items()
    ]
    preemptions, again = requests.num_preemptions, requests.num_recomputed_tokens
    yield counter("kvtrio_preemptions", "Of ended requests", one(preemptions))
    yield counter("kvtrio_recomputed_tokens", "Computed again after a preemption", one(again))
    yield counter(
        "kvtrio_cache_lookups", "Started requests, by why not more was reused and turn", matches
    )


def _times(requests: Requests) -> Iterator[Metric]:
    spreads = {
        "queue": ("Waiting", requests.queue),
        "prefill": ("From the start to the first token", requests.prefill),
        "decode": ("From the first token to the end", requests.decode),
        "gap": ("Between two tokens of an answer", requests.gaps),
        "longest_gap": ("Longest gap of an answer", requests.longest_gap),
    }
    for name, (help_text, spread) in spreads.items():
        yield histogram(f"kvtrio_{name}_seconds", help_text, spread)


def _cache(snapshot: Snapshot) -> Iterator[Metric]:
    moves, statistics = snapshot.tally.moves, snapshot.statistics
    numbers = {
        "promoted": moves.num_promoted,
        "demoted": moves.num_demoted,
        "dropped": moves.num_dropped,
        "from_disk": moves.num_from_disk,
    }
    by_move: Values = [({"move": name}, number) for name, number in numbers.items()]
    yield counter("kvtrio_cache_blocks_moved", "Blocks that changed tier or were lost", by_move)
    yield counter(
        "kvtrio_cache_dropped_tokens", "Tokens in lost blocks", one(moves.num_dropped_tokens)
    )
    if statistics.max_disk_bytes:
        yield from _disk(snapshot)
    if statistics.max_ram_bytes:
        yield gauge(
            "kvtrio_ram_bytes_used", "Of what state shares in RAM", one(statistics.num_ram_bytes)
        )
        yield gauge(
            "kvtrio_ram_bytes_limit", "That it may have there", one(statistics.max_ram_bytes)
        )
    for name, help_text, table in (
        ("blocks_used", "Blocks held or cached", statistics.num_used_blocks),
        ("blocks_limit", "Blocks that there are", statistics.max_blocks),
        ("window_blocks_used", "Of layers that see a window", statistics.num_used_parts),
        ("window_blocks_limit", "Blocks of such layers that there are", statistics.max_parts),
        ("state_slots_used", "Recurrent states, running or kept", statistics.num_used_slots),
        ("state_slots_limit", "Recurrent states that there is room for", statistics.max_slots),
    ):
        values: Values = [({"tier": tier.value}, table[tier]) for tier in Tier if tier in table]
        if values:
            yield gauge(f"kvtrio_{name}", help_text, values)
    yield gauge("kvtrio_requests_running", "In a place", one(statistics.num_running))
    yield gauge("kvtrio_requests_waiting", "In the queue", one(statistics.num_waiting))
    yield gauge("kvtrio_tokens_waiting", "Prompts there", one(statistics.num_waiting_tokens))


def _disk(snapshot: Snapshot) -> Iterator[Metric]:
    statistics = snapshot.statistics
    yield gauge(
        "kvtrio_disk_bytes_used", "Of the disk tier's files", one(statistics.num_disk_bytes)
    )
    yield gauge("kvtrio_disk_bytes_limit", "At most", one(statistics.max_disk_bytes))
    yield gauge("kvtrio_disk_entries", "Blocks and states there", one(statistics.num_disk_entries))
    yield counter(
        "kvtrio_disk_given_up",
        "Blocks and states that could not be written, or not soon enough",
        one(statistics.num_disk_given_up),
    )
    lost: Values = [
        ({"reason": fault.value}, number) for fault, number in snapshot.tally.by_fault.items()
    ]
    if lost:
        yield counter("kvtrio_disk_lost", "Blocks and states that could not be used", lost)


def _steps(tally: Tally) -> Iterator[Metric]:
    kinds: Values = [
        ({"kind": "prefill"}, tally.num_prefill_tokens),
        ({"kind": "decode"}, tally.num_decode_rows),
    ]
    yield counter("kvtrio_steps", "Forward passes", one(tally.num_steps))
    yield counter("kvtrio_step_tokens", "Tokens computed in them", kinds)
    yield histogram("kvtrio_step_seconds", "Duration of a forward pass", tally.step_time)
    yield histogram(
        "kvtrio_step_accuracy_ratio", "Measured over predicted duration", tally.accuracy
    )


def _bounds(snapshot: Snapshot) -> Iterator[Metric]:
    """What was to stay within a bound and did not, by why."""
    tally, stalls = snapshot.tally, snapshot.statistics.num_stalls
    causes = [cause for cause in GapCause if cause is not GapCause.READER]
    by_cause: Values = [({"cause": cause.value}, stalls.get(cause, 0)) for cause in causes]
    yield counter("kvtrio_stalls", "Gaps between two tokens above the bound", by_cause)
    slow = tally.requests.num_slow_readers
    yield counter("kvtrio_slow_readers", "Answers whose reader made the longest gap", one(slow))
    by_breach: Values = [({"reason": why.value}, tally.by_breach[why]) for why in BreachReason]
    yield counter("kvtrio_step_breaches", "Steps that took longer than they may", by_breach)
    rejections = tally.by_rejection
    by_reason: Values = [({"reason": why.value}, rejections[why]) for why in RejectReason]
    yield counter("kvtrio_rejections", "Requests that were not admitted", by_reason)


def _costs(cost: CostRecord) -> Iterator[Metric]:
    per_unit = {
        "base": cost.base_s,
        "prefill_token": cost.prefill_token_s,
        "prefill_context": cost.prefill_context_s,
        "decode_row": cost.decode_row_s,
        "decode_context": cost.decode_context_s,
        "adapter": cost.adapter_s,
        "prefill_chunk": cost.prefill_chunk_s,
    }
    values: Values = [({"of": name}, seconds) for name, seconds in per_unit.items()]
    yield gauge("kvtrio_step_cost_seconds", "Learned, per unit of what a step does", values)
    yield gauge("kvtrio_step_cost_margin", "Predictions are multiplied by it", one(cost.margin))


def _adapters(snapshot: Snapshot) -> Iterator[Metric]:
    yield gauge(
        "kvtrio_adapter_info",
        "Adapters that requests may name",
        [({"name": each.name, "digest": each.digest}, 1.0) for each in snapshot.adapters],
    )
    yield gauge(
        "kvtrio_adapter_requests",
        "Admitted requests that use an adapter",
        [
            ({"name": each.name, "state": state}, float(number))
            for each in snapshot.adapters
            for state, number in (("running", each.num_running), ("waiting", each.num_waiting))
        ],
    )
