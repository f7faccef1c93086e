"""GET /metrics: readable by the official parser, and equal to the sum of what was answered."""

import io
import json
from typing import Any

import pytest
import trio
from attrs import evolve
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from harness.core_fakes import shared_ram
from harness.serving import EOS, Serving, serving
from harness.virtual import SimSettings
from kvtrio.backends.sim import HashTokens
from kvtrio.core.config import Group
from kvtrio.core.explain import CacheReport, MissReason, TurnClass
from kvtrio.core.types import FinishReason, RequestId, StateClass
from kvtrio.engine.records import BreachReason, RequestRecord
from kvtrio.obs.logging import Clock, Log
from kvtrio.obs.observer import FanOut, JsonObserver
from kvtrio.obs.tally import Tally
from kvtrio.schedulers.priority import Priority

NATIVE = "/completion"
SMALL = SimSettings(
    num_places=2, max_context=96, num_host_blocks=40, token_function=HashTokens(256)
)
ODD = 'odd "name"\n\\with {all}, of=it\u00e9'
NAMES = """
kvtrio_prompt_tokens_total kvtrio_copied_prompt_tokens_total kvtrio_recalled_tokens_total
kvtrio_generated_tokens_total
kvtrio_longest_request_tokens kvtrio_requests_total kvtrio_cache_lookups_total
kvtrio_queue_seconds kvtrio_prefill_seconds kvtrio_decode_seconds kvtrio_gap_seconds
kvtrio_longest_gap_seconds kvtrio_cache_blocks_moved_total kvtrio_cache_dropped_tokens_total
kvtrio_blocks_used kvtrio_blocks_limit kvtrio_window_blocks_used kvtrio_window_blocks_limit
kvtrio_requests_running kvtrio_requests_waiting
kvtrio_steps_total kvtrio_step_tokens_total kvtrio_step_seconds kvtrio_adapter_info
kvtrio_adapter_requests kvtrio_preemptions_total kvtrio_recomputed_tokens_total
kvtrio_tokens_waiting kvtrio_stalls_total kvtrio_slow_readers_total kvtrio_step_breaches_total
kvtrio_rejections_total kvtrio_step_cost_seconds kvtrio_step_cost_margin
kvtrio_step_accuracy_ratio
llamacpp:prompt_tokens_total llamacpp:prompt_tokens_cached_total llamacpp:prompt_seconds_total
llamacpp:tokens_predicted_total llamacpp:tokens_predicted_seconds_total llamacpp:n_decode_total
llamacpp:n_tokens_max llamacpp:prompt_tokens_seconds llamacpp:predicted_tokens_seconds
llamacpp:requests_processing llamacpp:requests_deferred llamacpp:n_busy_slots_per_decode
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
vllm:cache_config_info vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
vllm:num_preemptions_total vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:request_success_total vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds
vllm:time_per_output_token_seconds vllm:e2e_request_latency_seconds
vllm:request_queue_time_seconds vllm:request_prefill_time_seconds
vllm:request_decode_time_seconds vllm:request_prompt_tokens vllm:request_generation_tokens
vllm:iteration_tokens_total vllm:lora_requests_info
"""
"""Frozen: dashboards and routers read them."""


async def scrape(server: Serving) -> dict[str, list[Sample]]:
    """Samples by their names."""
    reply = await server.get("/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(reply.raw.body.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def value(samples: dict[str, list[Sample]], name: str, /, **labels: str) -> float:
    """Sum of the samples of that name with those labels."""
    chosen = [each for each in samples[name] if labels.items() <= each.labels.items()]
    return sum(each.value for each in chosen)


async def mixed_load(server: Serving) -> list[Any]:
    """Conversations, repeats, adapters, streams, a hang-up: all answers' accounts."""
    await server.add_adapter(ODD)
    accounts: list[Any] = []

    async def ask(delay_s: float, text: str, **more: Any) -> None:
        await trio.sleep(delay_s)
        body = {"prompt": text, "n_predict": 5, "temperature": 0, **more}
        reply = await server.post(NATIVE, body)
        last = reply.events[-1] if more.get("stream") else reply.json
        accounts.extend(last if isinstance(last, list) else [last])

    async with trio.open_nursery() as nursery:
        for number in range(24):
            text = f"conversation {number % 7} " * 3 + "x" * (number % 5)
            more: dict[str, Any] = {"stream": number % 3 == 0}
            if number % 4 == 0:
                more["model"] = ODD
            if number % 9 == 0:
                more["cache_prompt"] = False
            nursery.start_soon(lambda n=number, t=text, m=more: ask(n * 0.02, t, **m))
    await ask(0, "several answers to this", n=2)
    return accounts


async def test_the_sum_over_requests_equals_the_metrics(autojump_clock: Any) -> None:
    """Tokens by tier, computed, generated, and the requests themselves, in all three dialects."""
    async with serving(sim=SMALL) as server:
        accounts = await mixed_load(server)
        samples = await scrape(server)
        caches = [each["kvtrio"]["cache"] for each in accounts]
        prompts = [each for each in accounts if each["index"] == 0]
        firsts = [each["kvtrio"]["cache"] for each in prompts]
        computed = sum(each["computed"] for each in firsts)
        device = sum(each["reused_device"] for each in firsts)
        host = sum(each["reused_ram"] for each in firsts)
        assert device > 0
        assert host > 0
        tokens = "kvtrio_prompt_tokens_total"
        assert value(samples, tokens, source="computed") == computed
        assert value(samples, tokens, source="device") == device
        assert value(samples, tokens, source="ram") == host
        assert computed + device + host == sum(each["tokens_evaluated"] for each in prompts)
        generated = sum(each["tokens_predicted"] for each in accounts)
        assert value(samples, "kvtrio_generated_tokens_total") == generated
        assert value(samples, "llamacpp:prompt_tokens_total") == computed
        assert value(samples, "llamacpp:prompt_tokens_cached_total") == device + host
        assert value(samples, "llamacpp:tokens_predicted_total") == generated
        assert value(samples, "vllm:prefix_cache_queries_total") == computed + device + host
        assert value(samples, "vllm:prefix_cache_hits_total") == device + host
        assert value(samples, "vllm:generation_tokens_total") == generated
        assert value(samples, "kvtrio_requests_total") == len(accounts)
        assert value(samples, "vllm:request_success_total") == len(accounts)
        for told in caches:
            labels = {"reason": told["reason"], "turn": told["turn"]}
            assert value(samples, "kvtrio_cache_lookups_total", **labels) > 0
        assert value(samples, "kvtrio_cache_lookups_total") == len(accounts)


COUNTERS = {
    "prompt_tokens": (
        "kvtrio_prompt_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:request_prompt_tokens_sum",
    ),
    "cached_tokens": ("llamacpp:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"),
    "completion_tokens": (
        "kvtrio_generated_tokens_total",
        "llamacpp:tokens_predicted_total",
        "vllm:generation_tokens_total",
        "vllm:request_generation_tokens_sum",
    ),
}
"""What ``usage`` says, and the metrics that say the same."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
async def test_usage_is_what_the_metrics_add(
    autojump_clock: Any, path: str, stream: bool, number: int
) -> None:
    """However many answers a prompt gets, it counts once; what its copies took counts apart."""
    text = "a prompt of eighty tokens or so, which all of its answers share among them " * 2
    body: dict[str, Any] = {"n": number, "max_tokens": 3, "stream": stream}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with serving() as server:
        before = await scrape(server)
        reply = await server.post(path, body)
        after = await scrape(server)
        usage = (reply.events[-1] if stream else reply.json)["usage"]
        told = {**usage, **usage["prompt_tokens_details"]}
        for field, names in COUNTERS.items():
            deltas = {name: value(after, name) - value(before, name) for name in names}
            assert deltas == dict.fromkeys(names, told[field])
        copies = value(after, "kvtrio_copied_prompt_tokens_total")
        assert copies == (number - 1) * usage["prompt_tokens"]
        reused = value(after, "kvtrio_copied_prompt_tokens_total", source="reused")
        assert reused >= (copies * 0.7 if number > 1 else 0)
        assert value(after, "kvtrio_requests_total") == number
        records = server.stack.records.requests
        assert sorted(record.is_copy for record in records) == [False] + [True] * (number - 1)
        firsts = [record.num_prompt_tokens for record in records if not record.is_copy]
        assert sum(firsts) == usage["prompt_tokens"]


@pytest.mark.parametrize("path", [NATIVE, "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first_token", [ord("a"), EOS])
async def test_a_prompt_that_was_only_read_has_no_answer(
    autojump_clock: Any, path: str, stream: bool, first_token: int
) -> None:
    """Zero tokens wanted: whatever came with the prompt, answer, record and metrics say zero, and
    that the limit was met."""
    body: dict[str, Any] = {"max_tokens": 0, "stream": stream, "stop": ["a"]}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "read this"}]
    else:
        body["prompt"] = "read this"
    async with serving((first_token,)) as server:
        reply = await server.post(path, body)
        last = reply.events[-1] if stream else reply.json
        (record,) = server.stack.records.requests
        samples = await scrape(server)
        assert last["timings"]["predicted_n"] == record.num_generated_tokens == 0
        for name in COUNTERS["completion_tokens"]:
            assert value(samples, name) == 0
        for name in COUNTERS["prompt_tokens"]:
            assert value(samples, name) == last["timings"]["prompt_n"]
        prompt_s = last["timings"]["prompt_ms"] / 1e3
        assert value(samples, "llamacpp:prompt_seconds_total") == pytest.approx(prompt_s)
        told = last if path == NATIVE else last["choices"][0]
        assert told.get("stop_type", "limit") == "limit"
        assert told.get("stopping_word", "") == ""
        assert told.get("finish_reason", "length") == "length"
        assert (record.reason, record.stopped_by_text) == (FinishReason.LENGTH, False)
        assert value(samples, "kvtrio_requests_total", reason="length") == 1


async def test_prompts_of_a_batch_are_no_copies(autojump_clock: Any) -> None:
    """Each counts, with its first answer."""
    async with serving() as server:
        body = {"prompt": ["one", "three", "five"], "n": 2, "max_tokens": 2}
        usage = (await server.post("/v1/completions", body)).json["usage"]
        samples = await scrape(server)
        assert usage["prompt_tokens"] == 4 + 6 + 5
        assert value(samples, "kvtrio_prompt_tokens_total") == usage["prompt_tokens"]
        assert value(samples, "kvtrio_copied_prompt_tokens_total") == usage["prompt_tokens"]


async def test_steps_moves_and_times_add_up(autojump_clock: Any) -> None:
    """What the engine reported and what the histograms hold."""
    async with serving(sim=SMALL) as server:
        accounts = await mixed_load(server)
        samples, records = await scrape(server), server.stack.records
        assert value(samples, "kvtrio_steps_total") == len(records.steps)
        assert value(samples, "llamacpp:n_decode_total") == len(records.steps)
        prefill = sum(step.num_prefill_tokens for step in records.steps)
        assert value(samples, "kvtrio_step_tokens_total", kind="prefill") == prefill
        assert value(samples, "kvtrio_step_seconds_count") == len(records.steps)
        moves = "kvtrio_cache_blocks_moved_total"
        promoted = sum(move.num_promoted for move in records.moves)
        dropped = sum(move.num_dropped for move in records.moves)
        assert value(samples, moves, move="promoted") == promoted > 0
        assert value(samples, moves, move="dropped") == dropped > 0
        gaps = sum(each["tokens_predicted"] - 1 for each in accounts)
        assert value(samples, "kvtrio_gap_seconds_count") == gaps
        assert value(samples, "kvtrio_gap_seconds_bucket", le="+Inf") == gaps
        decode_s = sum(each["timings"]["predicted_ms"] for each in accounts) / 1e3
        assert value(samples, "kvtrio_gap_seconds_sum") == pytest.approx(decode_s)
        assert value(samples, "llamacpp:tokens_predicted_seconds_total") == pytest.approx(decode_s)
        buckets = [each.value for each in samples["kvtrio_queue_seconds_bucket"]]
        assert buckets == sorted(buckets)
        assert buckets[-1] == len(accounts)


async def test_the_names_are_a_contract(autojump_clock: Any) -> None:
    """Idle and loaded: the same families, each with its help and type; counters only grow."""
    async with serving(sim=SMALL) as server:
        idle = (await server.get("/metrics")).raw.body.decode()
        typed = {line.split()[2] for line in idle.splitlines() if line.startswith("# TYPE")}
        helped = {line.split()[2] for line in idle.splitlines() if line.startswith("# HELP")}
        assert typed == helped == set(NAMES.split())
        before = await scrape(server)
        await mixed_load(server)
        after = await scrape(server)
        assert before.keys() <= after.keys()
        for name, samples in before.items():
            if name.endswith(("_total", "_bucket", "_count", "_sum")):
                for sample in samples:
                    assert value(after, name, **sample.labels) >= sample.value
        assert (await server.get("/v1/metrics")).status == 200


async def test_odd_adapter_names_are_escaped(autojump_clock: Any) -> None:
    """The parser gives them back as they are."""
    async with serving() as server:
        await server.add_adapter(ODD)
        samples = await scrape(server)
        assert {each.labels["name"] for each in samples["kvtrio_adapter_info"]} == {ODD}


async def test_gauges_show_the_present(autojump_clock: Any) -> None:
    """Who runs, waits and holds blocks now, and under which adapters."""
    sim = SimSettings(num_places=1)
    async with serving(sim=sim) as server:
        await server.add_adapter("a")
        await server.add_adapter("b")
        async with trio.open_nursery() as nursery:
            for name in ("a", "b"):
                body = {"prompt": "x" * 20, "n_predict": 30, "model": name}
                nursery.start_soon(server.post, NATIVE, body)
                await trio.sleep(0.05)
            samples = await scrape(server)
            assert value(samples, "kvtrio_requests_running") == 1
            assert value(samples, "kvtrio_requests_waiting") == 1
            assert value(samples, "vllm:num_requests_waiting") == 1
            (info,) = samples["vllm:lora_requests_info"]
            assert info.labels["running_lora_adapters"] == "a"
            assert info.labels["waiting_lora_adapters"] == "b"
            assert value(samples, "kvtrio_adapter_requests", name="b", state="waiting") == 1
            assert 0 < value(samples, "vllm:kv_cache_usage_perc") < 1
        samples = await scrape(server)
        assert value(samples, "kvtrio_requests_running") == 0
        assert value(samples, "vllm:kv_cache_usage_perc") == 0
        used = value(samples, "kvtrio_blocks_used", tier="device")
        assert 0 < used <= value(samples, "kvtrio_blocks_limit", tier="device")
        assert value(samples, "kvtrio_blocks_limit", tier="ram") == 32


async def test_bounds_that_were_not_kept_are_counted(autojump_clock: Any) -> None:
    """Stalls by cause, breaches by reason, refusals, preemptions, what steps cost."""
    sim = SimSettings(
        num_places=1, max_waiting=1, policy=Priority(), cost=lambda batch: 0.2, num_host_blocks=0
    )
    async with serving(sim=sim) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.post, NATIVE, {"prompt": "x" * 20, "n_predict": 30})
            await trio.sleep(1.5)
            high = {"prompt": "y", "n_predict": 5, "kvtrio": {"priority": 1}}
            nursery.start_soon(server.post, NATIVE, high)
            await trio.sleep(0.3)
            refused = await server.post(NATIVE, {"prompt": "z"})
            assert refused.status == 429
            samples = await scrape(server)
            (preempted,) = server.stack.core.waiting
            num_tokens = preempted.num_prompt_tokens + preempted.num_generated_tokens
            assert value(samples, "kvtrio_tokens_waiting") == num_tokens > 20
        samples, records = await scrape(server), server.stack.records
        assert value(samples, "kvtrio_preemptions_total") == 1
        assert value(samples, "vllm:num_preemptions_total") == 1
        again = sum(record.num_recomputed_tokens for record in records.requests)
        assert value(samples, "kvtrio_recomputed_tokens_total") == again
        assert value(samples, "kvtrio_rejections_total", reason="queue_full") == 1
        assert value(samples, "kvtrio_stalls_total", cause="preempted") == 1
        assert value(samples, "kvtrio_stalls_total", cause="step") == 29 - 1 + 4
        breaches = [step.breach for step in records.steps if step.breach is not None]
        assert value(samples, "kvtrio_step_breaches_total") == len(breaches) > 30
        rows = breaches.count(BreachReason.ROWS)
        assert value(samples, "kvtrio_step_breaches_total", reason="rows") == rows > 0
        assert value(samples, "kvtrio_step_accuracy_ratio_count") > 0
        assert value(samples, "kvtrio_step_cost_seconds", of="base") > 0
        assert value(samples, "kvtrio_step_cost_margin") >= 1
        assert value(samples, "kvtrio_slow_readers_total") == 0


async def test_rates_are_since_the_last_look(autojump_clock: Any) -> None:
    """As llama-server's: tokens per second of work between two scrapes, 0 if there was none."""
    async with serving() as server:
        await server.post(NATIVE, {"prompt": "x" * 50, "n_predict": 11})
        first = await scrape(server)
        assert value(first, "llamacpp:predicted_tokens_seconds") == pytest.approx(1000 / 5.7)
        second = await scrape(server)
        assert value(second, "llamacpp:predicted_tokens_seconds") == 0


async def test_what_was_left_counts_as_aborted(autojump_clock: Any) -> None:
    """A hang-up is a request too, with what it computed."""
    async with serving() as server:
        body = {"prompt": "x", "n_predict": 99, "stream": True}
        await server.post(NATIVE, body, hang_up_after=2)
        await server.stack.engine.wait_idle()
        samples = await scrape(server)
        assert value(samples, "kvtrio_requests_total", reason="abort") == 1
        assert value(samples, "kvtrio_prompt_tokens_total") == 2


async def test_what_never_started_was_never_looked_up(autojump_clock: Any) -> None:
    """A request that left the queue for good has a reason of its own, and is no cache miss."""
    async with serving(sim=SimSettings(num_places=1)) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.post, NATIVE, {"prompt": "x", "n_predict": 30})
            await trio.sleep(0.05)
            waiting = {"prompt": "y", "stream": True, "cache_prompt": True}
            await server.post(NATIVE, waiting, hang_up_after_s=0.05)
        await server.stack.engine.wait_idle()
        left, answered = server.stack.records.requests
        assert (left.reason, left.place) == (FinishReason.ABORT, None)
        assert left.cache.reason is MissReason.NOT_STARTED
        samples = await scrape(server)
        assert value(samples, "kvtrio_requests_total") == 2
        assert value(samples, "kvtrio_cache_lookups_total") == 1
        assert value(samples, "kvtrio_cache_lookups_total", reason="first_turn") == 1
        assert value(samples, "kvtrio_prompt_tokens_total") == answered.num_prompt_tokens


@pytest.mark.parametrize("reason", list(MissReason))
def test_every_reason_is_written_and_counted(reason: MissReason) -> None:
    """One that the core adds needs nothing here."""
    out, tally = io.BytesIO(), Tally()
    record = RequestRecord(
        request_id=RequestId(1),
        reason=FinishReason.STOP,
        stopped_by_text=False,
        place=0,
        num_prompt_tokens=2,
        num_cached_tokens=0,
        num_computed_tokens=2,
        num_generated_tokens=1,
        queue_s=0.0,
        prefill_s=0.1,
        decode_s=0.0,
        gap_p50_s=None,
        gap_p99_s=None,
        gap_max_s=None,
        cache=CacheReport(reason=reason),
    )
    clock = Clock(monotonic_ns=lambda: 1, wall_s=lambda: 1.0)
    FanOut((tally, JsonObserver(Log(out, clock), key=b"log key"))).request(record)
    assert json.loads(out.getvalue())["miss_reason"] == reason.value
    assert tally.requests.by_miss[reason, TurnClass.FIRST] == 1


async def test_no_label_holds_a_callers_words(autojump_clock: Any) -> None:
    """Session, purpose, salt, model and prompt stay out."""
    word = "Canary7Words"
    async with serving(purposes=("chat",)) as server:
        ours = {"session": word, "purpose": "chat"}
        body = {"prompt": word, "n_predict": 1, "model": word, "cache_salt": word, "kvtrio": ours}
        assert (await server.post(NATIVE, body)).status == 200
        assert word not in (await server.get("/metrics")).raw.body.decode()


async def test_what_kinds_share_in_ram_is_told(autojump_clock: Any) -> None:
    """Bytes in use and their limit, in /metrics and /props; nothing of it where shares are."""
    groups = (Group(StateClass.POINT, None, 0, 16), Group(StateClass.TOKEN, None, 24))
    sizes = shared_ram(5000, groups, 4)
    sizes.pop("num_host_window_blocks")
    sim = SimSettings(groups=groups, block_size=4, num_places=1, max_context=96, **sizes)
    names = ("kvtrio_ram_bytes_used", "kvtrio_ram_bytes_limit")
    async with serving(sim=evolve(sim, num_state_slots=2)) as server:
        for number in range(4):
            await server.post(NATIVE, {"prompt": f"{number}" * 60, "n_predict": 4})
        samples = await scrape(server)
        used, limit = (samples[name][0].value for name in names)
        assert 0 < used <= limit == 5000
        memory = (await server.get("/props")).json["kvtrio"]["memory"]
        assert memory["shared_bytes"] == {"ram": 5000}
    async with serving(sim=SMALL) as server:
        assert not (await scrape(server)).keys() & set(names)
