"""Whose turn it is: refusals with a time to come back, deadlines, predictions, classes, users."""

from typing import Any

import pytest
import trio
from attrs import evolve

from harness.serving import HEARTBEAT_S, Reply, Serving, serving
from harness.virtual import SimSettings
from kvtrio.core.types import FinishReason
from kvtrio.schedulers.fair import Fair
from kvtrio.schedulers.priority import Priority
from kvtrio.schedulers.stall_free import StallFree

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
PATHS = (CHAT, TEXT, NATIVE)
ONE_PLACE = SimSettings(num_places=1, policy=StallFree(), cost=lambda batch: 0.1)
"""A token every tenth of a second."""


def body(num_tokens: int = 10, text: str = "x", **more: Any) -> dict[str, Any]:
    return {
        "prompt": text,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        **more,
    }


async def busy(server: Serving, nursery: trio.Nursery, *, num_tokens: int = 100) -> None:
    """Fill one place for ten seconds."""
    nursery.start_soon(server.post, NATIVE, body(num_tokens))
    await trio.sleep(0.05)


async def learn_stay(server: Serving) -> None:
    """Let the server see how long requests stay: a second each."""
    for number in range(40):
        await server.post(NATIVE, body(10, f"{number} of them"))


# --- refused ---


async def test_a_full_queue_says_when_to_come_back(autojump_clock: Any) -> None:
    """Retry-After is what a place takes to become free, in whole seconds."""
    sim = evolve(ONE_PLACE, max_waiting=0, cost=lambda batch: 0.25)
    async with serving(sim=sim) as server:
        await learn_stay(server)
        async with trio.open_nursery() as nursery:
            await busy(server, nursery, num_tokens=5)
            answer = await server.post(NATIVE, body())
            assert (answer.status, answer.raw.total_s) == (429, 0)
            assert answer.error["kvtrio"] == {"code": "queue_full"}
            assert answer.headers["retry-after"] == "3"  # of 2.5 s


@pytest.mark.parametrize("path", PATHS)
async def test_too_many_waiting_tokens_are_a_429(autojump_clock: Any, path: str) -> None:
    """The queue is bounded in prompt tokens, too; one long prompt is taken if nobody waits."""
    sim = evolve(ONE_PLACE, max_waiting_tokens=150)
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:
        await busy(server, nursery)
        nursery.start_soon(server.post, path, body(1, "y" * 200))
        await trio.sleep(0.01)
        for stream in (False, True):
            answer = await server.post(path, body(1, "z", stream=stream))
            assert answer.status == 429
            assert answer.error["type"] == "rate_limit_error"
            assert answer.error["kvtrio"] == {"code": "queue_tokens"}
            assert "150" in answer.error["message"]
            assert int(answer.headers["retry-after"]) >= 1
        assert server.stack.engine.statistics().num_waiting == 1


async def test_each_of_several_answers_counts_in_the_queue(autojump_clock: Any) -> None:
    """n = 3 with two places left in the queue is refused as a whole."""
    sim = evolve(ONE_PLACE, num_places=3, max_waiting=2)
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(server.post, NATIVE, body(20, f"{number}"))
        await trio.sleep(0.05)
        assert (await server.post(CHAT, body(n=3))).status == 429
        assert server.stack.engine.statistics().num_waiting == 0
        assert (await server.post(CHAT, body(n=2))).status == 200


# --- deadlines ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_deadline_that_cannot_be_met_is_refused_at_once(
    autojump_clock: Any, path: str, stream: bool
) -> None:
    """503 before any waiting, with the time by which it would have been late."""
    async with serving(sim=ONE_PLACE) as server:
        await learn_stay(server)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                await busy(server, nursery, num_tokens=10)
            late = body(stream=stream, kvtrio={"deadline_ms": 500})
            answer = await server.post(path, late)
            assert (answer.status, answer.raw.total_s) == (503, 0)
            assert answer.error["type"] == "unavailable_error"
            assert answer.error["kvtrio"] == {"code": "deadline"}
            assert answer.headers["retry-after"] == "4"  # its turn comes in 4 s, 3.5 s late
            patient = body(stream=stream, kvtrio={"deadline_ms": 6000})
            assert (await server.post(path, patient)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_deadline_that_passes_in_the_queue_ends_the_request(
    autojump_clock: Any, path: str, stream: bool
) -> None:
    """503 where nothing was sent, an error event on a stream; no token of it was computed."""
    async with serving(sim=ONE_PLACE) as server, trio.open_nursery() as nursery:
        await busy(server, nursery)
        answer = await server.post(path, body(stream=stream, kvtrio={"deadline_ms": 2000}))
        assert answer.raw.total_s == pytest.approx(2.0, abs=0.11)
        error = answer.events[-1]["error"] if stream else answer.error
        assert answer.status == (200 if stream else 503)
        assert error["kvtrio"]["code"] == "deadline"
        if not stream:
            assert int(answer.headers["retry-after"]) >= 1
        assert answer.raw.is_complete
        (record,) = server.stack.records.requests
        assert (record.reason, record.num_computed_tokens) == (FinishReason.DEADLINE, 0)


@pytest.mark.parametrize(("deadline_ms", "ends_s"), [(None, 2.0), (1000, 1.0), (9000, 2.0)])
async def test_the_operator_may_bound_the_waiting(
    autojump_clock: Any, deadline_ms: int | None, ends_s: float
) -> None:
    """The earlier of the two limits holds."""
    async with serving(sim=ONE_PLACE, max_waiting_s=2.0) as server, trio.open_nursery() as nursery:
        await busy(server, nursery)
        answer = await server.post(NATIVE, body(kvtrio={"deadline_ms": deadline_ms}))
        assert answer.status == 503
        assert answer.raw.total_s == pytest.approx(ends_s, abs=0.11)


async def test_a_deadline_is_for_the_start_only(autojump_clock: Any) -> None:
    """A request that started in time may take as long as it takes."""
    async with serving(sim=ONE_PLACE) as server:
        answer = await server.post(NATIVE, body(50, kvtrio={"deadline_ms": 1000}))
        assert (answer.status, answer.json["tokens_predicted"]) == (200, 50)


async def test_one_late_answer_ends_its_siblings(autojump_clock: Any) -> None:
    """n = 2 and one place: the second never started, so the whole request is a 503."""
    sim = evolve(ONE_PLACE, num_places=2)
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:
        await busy(server, nursery)
        answer = await server.post(CHAT, body(100, n=2, kvtrio={"deadline_ms": 1000}))
        assert answer.status == 503
        await trio.sleep(0.15)  # the step under way
        reasons = sorted(record.reason.value for record in server.stack.records.requests)
        assert reasons == ["abort", "deadline"]


# --- predictions ---


@pytest.mark.parametrize("path", PATHS)
async def test_a_prediction_is_told_to_those_who_ask(autojump_clock: Any, path: str) -> None:
    """In the answer; on a stream in its headers and at its end; in nobody else's."""
    async with serving(sim=ONE_PLACE) as server:
        await learn_stay(server)
        async with trio.open_nursery() as nursery:
            await busy(server, nursery, num_tokens=10)
            for stream in (False, True):
                ask = body(stream=stream, kvtrio={"predict": True})
                answer = await server.post(path, ask)
                last = answer.events[-1] if stream else answer.json
                told = last["kvtrio"]["predicted_ttft_ms"]
                assert told > 0
                if stream:
                    assert answer.headers["kvtrio-predicted-ttft-ms"] == f"{told:.0f}"
            silent = await server.post(path, body())
            assert "predicted_ttft_ms" not in silent.json["kvtrio"]
            assert "kvtrio-predicted-ttft-ms" not in silent.headers


async def test_a_prediction_comes_true(autojump_clock: Any) -> None:
    """On a machine that is known by now, the first token comes about when it was said."""
    async with serving(sim=ONE_PLACE) as server:
        await learn_stay(server)
        ask = body(5, "another one", stream=True, kvtrio={"predict": True})
        answer = await server.post(NATIVE, ask)
        told_s = answer.events[-1]["kvtrio"]["predicted_ttft_ms"] / 1e3
        assert answer.raw.first_s is not None
        assert answer.raw.first_s <= told_s * 1.05
        assert told_s < 10 * answer.raw.first_s


@pytest.mark.parametrize("path", PATHS)
async def test_a_refusal_tells_the_prediction_too(autojump_clock: Any, path: str) -> None:
    """The one who is refused is the one who wants to know."""
    async with serving(sim=ONE_PLACE) as server:
        await learn_stay(server)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                await busy(server, nursery, num_tokens=10)
            ask = body(kvtrio={"predict": True, "deadline_ms": 1})
            answer = await server.post(path, ask)
            assert answer.status == 503
            assert answer.error["kvtrio"]["predicted_ttft_ms"] >= 2900


# --- fields ---


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 11),
        ("priority", -11),
        ("priority", 1.5),
        ("priority", "high"),
        ("deadline_ms", 0),
        ("deadline_ms", -1),
        ("deadline_ms", 86_400_001),
        ("deadline_ms", "soon"),
        ("predict", 1),
        ("urgent", True),
    ],
)
async def test_wrong_values_are_a_400(
    autojump_clock: Any, path: str, field: str, value: Any
) -> None:
    """Ranges and types, and names that we do not have."""
    async with serving() as server:
        answer = await server.post(path, body(kvtrio={field: value}))
        assert answer.status == 400
        assert server.stack.core.next_step == 0


@pytest.mark.parametrize("user", [5, ["x"], {}, "x" * 513])
async def test_a_wrong_user_is_a_400(autojump_clock: Any, user: Any) -> None:
    """A short text or nothing."""
    async with serving() as server:
        assert (await server.post(CHAT, body(user=user))).status == 400


async def test_a_higher_class_takes_a_place(autojump_clock: Any) -> None:
    """With all places taken the high one starts at once; the other goes on where it was, and its
    stream shows every token once."""
    sim = evolve(ONE_PLACE, policy=Priority(), max_context=512)
    replies: dict[str, Reply] = {}
    async with serving(sim=sim) as server:

        async def ask(name: str, **more: Any) -> None:
            replies[name] = await server.post(NATIVE, body(text=name * 30, **more))

        async with trio.open_nursery() as nursery:
            low = {"num_tokens": 40, "stream": True, "return_progress": True}
            nursery.start_soon(lambda: ask("l", **low))
            await trio.sleep(1.05)
            nursery.start_soon(lambda: ask("h", num_tokens=5, kvtrio={"priority": 3}))
        assert replies["h"].raw.total_s < 1.0
        events = replies["l"].events
        assert "".join(event["content"] for event in events) == "a" * 40
        processed = [e["prompt_progress"]["processed"] for e in events if "prompt_progress" in e]
        assert processed == sorted(processed)
        record = server.stack.records.requests[-1]
        assert (record.num_preemptions, record.num_generated_tokens) == (1, 40)
        assert record.longest_gap is not None
        assert record.longest_gap.cause.value == "preempted"


async def test_a_preempted_stream_is_kept_alive(autojump_clock: Any) -> None:
    """Comments go out while a stream waits for its place to come back."""
    sim = evolve(ONE_PLACE, policy=Priority(), max_context=512)
    replies: list[Reply] = []
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:

        async def stream() -> None:
            replies.append(await server.post(NATIVE, body(20, stream=True)))

        nursery.start_soon(stream)
        await trio.sleep(1.05)
        high = await server.post(NATIVE, body(120, "y", kvtrio={"priority": 1}))
        assert high.raw.total_s > 2 * HEARTBEAT_S
        await server.stack.engine.wait_idle()
        await trio.testing.wait_all_tasks_blocked()
        assert replies[0].frames.count(b":") == 2
        assert replies[0].events[-1]["tokens_predicted"] == 20


async def order_of_ends(server: Serving, asks: list[tuple[str, dict[str, Any]]]) -> str:
    """The names in the order in which their answers were complete."""
    ended: list[str] = []

    async def ask(name: str, more: dict[str, Any]) -> None:
        headers = more.pop("headers", {})
        text = f"{name} {len(ended)}{trio.current_time()}"
        reply = await server.post(NATIVE, body(5, text, **more), headers=headers)
        assert reply.status == 200
        ended.append(name)

    async with trio.open_nursery() as nursery:
        for name, more in asks:
            nursery.start_soon(ask, name, dict(more))
            await trio.sleep(0.001)
    return "".join(ended)


async def test_users_share_alike(autojump_clock: Any) -> None:
    """Under ``fair``, one user's flood does not keep another waiting behind all of it."""
    sim = evolve(ONE_PLACE, policy=Fair())
    async with serving(sim=sim) as server:
        flood = [("f", {"user": "flooding"})] * 8
        order = await order_of_ends(server, [*flood, ("o", {"user": "other"})])
        assert order.index("o") <= 2


async def test_keys_share_alike_whatever_the_salt(autojump_clock: Any) -> None:
    """A key's holder is one tenant; a fresh salt for every request gains nothing."""
    sim = evolve(ONE_PLACE, policy=Fair())
    async with serving(sim=sim, api_keys=("one", "two")) as server:
        one, two = ({"headers": {"authorization": f"Bearer {key}"}} for key in ("one", "two"))
        flood = [("f", {**one, "cache_salt": f"salt {number}"}) for number in range(8)]
        order = await order_of_ends(server, [*flood, ("o", two)])
        assert order.index("o") <= 2


async def test_a_tenant_is_a_digest(autojump_clock: Any) -> None:
    """The core sees 32 bytes that tell users apart, and never a word of theirs."""
    async with serving(sim=ONE_PLACE) as server, trio.open_nursery() as nursery:
        for user in ("canary", "canary", "other", None):
            nursery.start_soon(server.post, NATIVE, body(user=user))
        await trio.sleep(0.01)
        tenants = [request.submit.tenant for request in server.stack.core.requests.values()]
        assert sorted(map(len, tenants)) == [0, 32, 32, 32]
        assert len(set(tenants)) == 3
        assert not any(b"canary" in tenant for tenant in tenants)
