"""POST /v1/cache/warm: prompts read in idle time, so that the turn that comes next finds them."""

from typing import Any

import pytest
import trio
from attrs import evolve

from harness.serving import Serving, serving
from harness.virtual import SimSettings
from kvtrio.serve.idle import QUIET_S
from kvtrio.serve.warm import MAX_WAITING

WARM, CHAT, NATIVE = "/v1/cache/warm", "/v1/chat/completions", "/completion"
SIM = SimSettings(
    num_places=1,
    max_context=2000,
    max_batch_tokens=32,
    num_host_blocks=2000,
    cost=lambda batch: 0.1,
)
"""A tenth of a second a step, 32 tokens of prompt in each."""
LONG = "x" * 640


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def head(words: str = "about cats " * 20) -> list[dict[str, str]]:
    return [said("system", words), said("user", "hello"), said("assistant", "well, hello")]


async def chat(server: Serving, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 3, "stop": [], **more}
    timings: dict[str, Any] = (await server.post(CHAT, body)).json["timings"]
    return timings


@pytest.mark.parametrize("who_speaks_last", ["assistant", "system"])
async def test_the_turn_that_comes_next_computes_what_is_new(
    autojump_clock: Any, who_speaks_last: str
) -> None:
    """All of a warm head is found: an answer's end is written, too, and no new answer begun."""
    messages = head() if who_speaks_last == "assistant" else head()[:1]
    async with serving(sim=SIM) as server:
        warmed = (await server.post(WARM, {"messages": messages})).json
        assert warmed["object"] == "cache.warm"
        assert warmed["model"] == "sim-model"
        assert (warmed["is_complete"], warmed["interruptions"]) == (True, 0)
        assert (warmed["cached_tokens"], warmed["computed_tokens"]) == (0, warmed["prompt_tokens"])
        turn = await chat(server, [*messages, said("user", "hm?")])
        assert turn["cache_n"] == warmed["prompt_tokens"]
        again = (await server.post(WARM, {"messages": messages})).json
        assert (again["cached_tokens"], again["computed_tokens"]) == (turn["cache_n"] - 1, 1)


async def test_the_body_of_the_request_to_come_can_be_sent(autojump_clock: Any) -> None:
    """What shapes an answer is left out; a prompt will do, too; and nothing is written."""
    async with serving(sim=SIM) as server:
        body = {"prompt": LONG, "n_predict": 50, "stream": True, "n": 3, "logprobs": 5, "stop": "x"}
        warmed = (await server.post(WARM, body)).json
        assert warmed["computed_tokens"] == len(LONG) + 1
        answer = (await server.post(NATIVE, {"prompt": f"{LONG}y", "n_predict": 1})).json
        assert answer["timings"]["cache_n"] == len(LONG) + 1
        first = server.stack.records.requests[0]
        assert (first.num_generated_tokens, first.num_computed_tokens) == (0, len(LONG) + 1)


async def test_a_head_is_warm_under_its_adapters_and_for_its_owner_only(
    autojump_clock: Any,
) -> None:
    """Another adapter or salt finds nothing of it."""
    async with serving(sim=SIM) as server:
        adapter = await server.add_adapter("a")
        lora = [{"id": adapter.id, "scale": 1.0}]
        mine = {"lora": lora, "cache_salt": "mine"}
        warmed = (await server.post(WARM, {"messages": head(), **mine})).json
        messages = [*head(), said("user", "hm?")]
        assert (await chat(server, messages))["cache_n"] == 0
        assert (await chat(server, messages, lora=lora))["cache_n"] == 0
        assert (await chat(server, messages, **mine))["cache_n"] == warmed["prompt_tokens"]


# --- idle time ---


async def test_it_waits_until_nobody_is_served(autojump_clock: Any) -> None:
    """While an answer streams no token of it is read, though a place is free."""
    sim = evolve(SIM, num_places=2)
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.post, NATIVE, {"prompt": "a", "n_predict": 40})
        await trio.sleep(0.05)
        reply = await server.post(WARM, {"prompt": LONG})
        assert reply.json["is_complete"]
        chunks = -(-(len(LONG) + 1) // sim.max_batch_tokens)
        assert reply.raw.total_s == pytest.approx(4.0 - 0.05 + QUIET_S + 0.1 * chunks, abs=0.2)
        assert max(step.num_chunks for step in server.stack.records.steps) == 1


async def test_who_comes_waits_for_one_step_and_nothing_is_computed_twice(
    autojump_clock: Any,
) -> None:
    """With one place, requests in the middle of a long head start at once; the head goes on from
    where it was, and its account is exact."""
    async with serving(sim=SIM) as server, trio.open_nursery() as nursery:
        replies: list[Any] = []

        async def warm() -> None:
            replies.append((await server.post(WARM, {"prompt": LONG})).json)

        nursery.start_soon(warm)
        await trio.sleep(QUIET_S + 0.35)
        for _ in range(2):
            answer = await server.post(NATIVE, {"prompt": "b", "n_predict": 5})
            assert answer.json["timings"]["predicted_n"] == 5
            assert answer.raw.total_s < 0.1 + 5 * 0.1 + 0.01
            await trio.sleep(QUIET_S + 0.35)
        assert replies == []
        await trio.sleep(5)
        (warmed,) = replies
        assert (warmed["is_complete"], warmed["interruptions"]) == (True, 2)
        assert (warmed["cached_tokens"], warmed["computed_tokens"]) == (0, len(LONG) + 1)
        computed = sum(step.num_prefill_tokens for step in server.stack.records.steps)
        assert computed == len(LONG) + 1 + 2  # and the other's letter, twice


async def test_who_asks_one_thing_after_another_meets_no_step_of_it(autojump_clock: Any) -> None:
    """Idle time begins a while after the last answer."""
    async with serving(sim=SIM) as server, trio.open_nursery() as nursery:
        await server.post(NATIVE, {"prompt": "b", "n_predict": 1})
        nursery.start_soon(server.post, WARM, {"prompt": LONG})
        for _ in range(10):
            await trio.sleep(QUIET_S * 0.9)
            answer = await server.post(NATIVE, {"prompt": "b", "n_predict": 1})
            assert answer.raw.total_s == pytest.approx(0.1)


async def test_heads_are_read_one_after_another(autojump_clock: Any) -> None:
    """In the order in which they came, and no more than so many may wait."""
    async with serving(sim=SIM) as server, trio.open_nursery() as nursery:
        done: list[int] = []

        async def warm(number: int) -> None:
            prompt = f"{number:02}" * 40
            assert (await server.post(WARM, {"prompt": prompt})).json["is_complete"]
            done.append(number)

        nursery.start_soon(server.post, NATIVE, {"prompt": "a", "n_predict": 20})
        await trio.sleep(0.05)
        for number in range(MAX_WAITING + 1):
            nursery.start_soon(warm, number)
            await trio.sleep(0.01)
        full = await server.post(WARM, {"prompt": "more"})
        assert (full.status, full.error["kvtrio"]["code"]) == (429, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        await trio.sleep(60)
        assert done == sorted(done) == list(range(MAX_WAITING + 1))


async def test_at_its_deadline_it_says_what_it_did(autojump_clock: Any) -> None:
    """It ends in time, and what was computed is kept."""
    async with serving(sim=SIM) as server:
        limit = {"kvtrio": {"deadline_ms": 1000}}
        reply = await server.post(WARM, {"prompt": LONG, **limit})
        assert reply.raw.total_s == pytest.approx(1.0)
        assert not reply.json["is_complete"]
        computed = reply.json["computed_tokens"]
        assert computed == 7 * SIM.max_batch_tokens
        await trio.sleep(1)
        answer = (await server.post(NATIVE, {"prompt": LONG, "n_predict": 1})).json
        assert answer["timings"]["cache_n"] >= computed


async def test_a_client_that_leaves_ends_it(autojump_clock: Any) -> None:
    """Nothing is computed for it after the step under way, and the next head has its turn."""
    async with serving(sim=SIM) as server:
        with trio.move_on_after(QUIET_S + 0.35):
            await server.post(WARM, {"prompt": LONG})
        await trio.sleep(0.2)
        assert server.stack.is_empty
        assert len(server.stack.records.steps) <= 5
        assert (await server.post(WARM, {"prompt": "b" * 50})).json["is_complete"]


# --- refusals ---


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_field", "messages"),
        ({"messages": head(), "prompt": "x"}, "conflict", "messages"),
        ({"messages": []}, "wrong_value", "messages"),
        ({"prompt": ["x", "y"]}, "too_many", "prompt"),
        ({"prompt": ""}, "empty_prompt", None),
        ({"prompt": "x" * 2000}, "context_length_exceeded", "prompt"),
        ({"prompt": "x", "lora": [{"id": 7, "scale": 1}]}, "unknown_adapter", "lora"),
        ({"prompt": "x", "tools": [{}]}, "not_supported", "tools"),
        ({"prompt": "x", "kvtrio": {"retain": "auxiliary"}}, "wrong_value", "kvtrio.retain"),
        ({"prompt": "x", "kvtrio": {"purpose": "title"}}, "wrong_value", "kvtrio.retain"),
        (
            {"prompt": "x", "kvtrio": {"session": "a", "save_session": True}},
            "not_supported",
            "kvtrio.save_session",
        ),
    ],
)
async def test_what_cannot_be_warmed_is_refused_at_once(
    autojump_clock: Any, body: dict[str, Any], code: str, param: str | None
) -> None:
    """A 400 from the catalogue, before any waiting."""
    async with serving(sim=SIM) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.post, NATIVE, {"prompt": "a", "n_predict": 40})
        await trio.sleep(0.05)
        reply = await server.post(WARM, body)
        assert (reply.status, reply.raw.total_s) == (400, 0)
        assert (reply.error["kvtrio"]["code"], reply.error["param"]) == (code, param)


async def test_a_server_that_drains_takes_none(autojump_clock: Any) -> None:
    """One that waits for idle time is told so when it comes."""
    async with serving(sim=SIM) as server, trio.open_nursery() as nursery:
        nursery.start_soon(server.post, NATIVE, {"prompt": "a", "n_predict": 10})
        await trio.sleep(0.05)
        server.stack.engine.drain()
        reply = await server.post(WARM, {"prompt": LONG})
        assert (reply.status, reply.error["kvtrio"]["code"]) == (503, "draining")
