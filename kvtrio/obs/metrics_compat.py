"""The peers' metric names, as far as they can be filled with the truth.

Names and meanings are facts of llama-server (b11434) and vLLM; scrapers, dashboards and routers
read them.
"""

from collections.abc import Iterator

from attrs import define
from prometheus_client.core import Metric

from kvtrio.core.types import FinishReason, Tier
from kvtrio.obs.families import Labels, Snapshot, counter, gauge, histogram, one

# --- llama-server's ---


@define(eq=False)
class Scrapes:
    """What llama-server averages since the last look: (tokens, seconds) then."""

    prompt: tuple[float, float] = (0.0, 0.0)
    answer: tuple[float, float] = (0.0, 0.0)


def llamacpp_families(snapshot: Snapshot, scrapes: Scrapes) -> Iterator[Metric]:
    """Prompt counters are of requests that have ended; llama-server's grow during a prompt."""
    requests, tally = snapshot.tally.requests, snapshot.tally
    counters = {
        "prompt_tokens": ("Prompt tokens computed", requests.num_computed_tokens),
        "prompt_tokens_cached": ("Prompt tokens reused", requests.num_cached_tokens),
        "prompt_seconds": ("Time of prompts", requests.prefill_total_s),
        "tokens_predicted": ("Tokens generated", requests.num_generated_tokens),
        "tokens_predicted_seconds": ("Time of generation", requests.decode_total_s),
        "n_decode": ("Forward passes", tally.num_steps),
    }
    for name, (help_text, value) in counters.items():
        yield counter(f"llamacpp:{name}", help_text, one(value))
    for name, (help_text, value) in _llamacpp_gauges(snapshot, scrapes).items():
        yield gauge(f"llamacpp:{name}", help_text, one(value))


def _llamacpp_gauges(snapshot: Snapshot, scrapes: Scrapes) -> dict[str, tuple[str, float]]:
    requests, statistics, tally = (
        snapshot.tally.requests,
        snapshot.statistics,
        snapshot.tally,
    )
    num_steps_after_first = requests.num_generated_tokens - requests.answer_tokens.count
    prompt = (float(requests.num_computed_tokens), requests.prefill_total_s)
    answer = (float(num_steps_after_first), requests.decode_total_s)
    gauges = {
        "n_tokens_max": ("Longest request", float(requests.longest_tokens)),
        "prompt_tokens_seconds": ("Since the last look", _rate(scrapes.prompt, prompt)),
        "predicted_tokens_seconds": ("Since the last look", _rate(scrapes.answer, answer)),
        "requests_processing": ("Running", float(statistics.num_running)),
        "requests_deferred": ("Waiting", float(statistics.num_waiting)),
        "n_busy_slots_per_decode": ("Mean", tally.num_chunks / max(tally.num_steps, 1)),
    }
    scrapes.prompt, scrapes.answer = prompt, answer
    return gauges


def _rate(before: tuple[float, float], now: tuple[float, float]) -> float:
    seconds = now[1] - before[1]
    return (now[0] - before[0]) / seconds if seconds > 0 else 0.0


# --- vLLM's ---


def vllm_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Left out: what is not known here, such as each block's life time."""
    labels = {"model_name": snapshot.model, "engine": "0"}
    yield from _vllm_gauges(snapshot, labels)
    yield from _vllm_counters(snapshot, labels)
    yield from _vllm_histograms(snapshot, labels)
    yield _lora_info(snapshot)


def _vllm_gauges(snapshot: Snapshot, labels: Labels) -> Iterator[Metric]:
    statistics, max_blocks = snapshot.statistics, snapshot.statistics.max_blocks[Tier.DEVICE]
    gauges = {
        "num_requests_running": ("Running", float(statistics.num_running)),
        "num_requests_waiting": ("Waiting", float(statistics.num_waiting)),
        "kv_cache_usage_perc": ("Share of device blocks that requests hold", _usage(snapshot)),
    }
    for name, (help_text, value) in gauges.items():
        yield gauge(f"vllm:{name}", help_text, [(labels, value)])
    sizes = {"block_size": str(snapshot.block_size), "num_gpu_blocks": str(max_blocks)}
    yield gauge("vllm:cache_config_info", "Sizes", [({**labels, **sizes}, 1.0)])


def _usage(snapshot: Snapshot) -> float:
    """What is merely cached counts as free, as in vLLM; blocks that two share count twice."""
    held = sum(
        -(-view.num_computed_tokens // snapshot.block_size)
        for view in snapshot.statistics.places
        if view.is_processing
    )
    return min(1.0, held / snapshot.statistics.max_blocks[Tier.DEVICE])


def _vllm_counters(snapshot: Snapshot, labels: Labels) -> Iterator[Metric]:
    requests = snapshot.tally.requests
    counters = {
        "prefix_cache_queries": ("Prompt tokens", requests.num_prompt_tokens),
        "prefix_cache_hits": ("Prompt tokens reused", requests.num_cached_tokens),
        "num_preemptions": ("Lost places, of ended requests", requests.num_preemptions),
        "prompt_tokens": ("Prompt tokens, reused ones included", requests.num_prompt_tokens),
        "generation_tokens": ("Tokens generated", requests.num_generated_tokens),
    }
    for name, (help_text, value) in counters.items():
        yield counter(f"vllm:{name}", help_text, [(labels, value)])
    reasons = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
    yield counter(
        "vllm:request_success",
        "Ended requests",
        [({**labels, "finished_reason": each.value}, requests.by_reason[each]) for each in reasons],
    )


def _vllm_histograms(snapshot: Snapshot, labels: Labels) -> Iterator[Metric]:
    requests = snapshot.tally.requests
    spreads = {
        "time_to_first_token_seconds": requests.first_token,
        "inter_token_latency_seconds": requests.gaps,
        "time_per_output_token_seconds": requests.gaps,
        "e2e_request_latency_seconds": requests.whole,
        "request_queue_time_seconds": requests.queue,
        "request_prefill_time_seconds": requests.prefill,
        "request_decode_time_seconds": requests.decode,
        "request_prompt_tokens": requests.prompt_tokens,
        "request_generation_tokens": requests.answer_tokens,
        "iteration_tokens_total": snapshot.tally.step_tokens,
    }
    for name, spread in spreads.items():
        yield histogram(f"vllm:{name}", "As kvtrio's own, for vLLM's readers", spread, labels)


def _lora_info(snapshot: Snapshot) -> Metric:
    """Its value is a time; the names are the point. Read by the Gateway API's endpoint picker."""
    running = [each.name for each in snapshot.adapters if each.num_running]
    waiting = [each.name for each in snapshot.adapters if each.num_waiting]
    labels = {
        "max_lora": str(snapshot.max_adapters),
        "running_lora_adapters": ",".join(running),
        "waiting_lora_adapters": ",".join(waiting),
    }
    return gauge("vllm:lora_requests_info", "Who uses which", [(labels, snapshot.now_s)])
