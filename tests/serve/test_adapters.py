"""Adapters over HTTP: which a request gets, and when a change counts."""

from typing import Any

import pytest
import trio

from harness.serving import Serving, serving
from harness.virtual import SimSettings
from kvtrio.backends.sim import HashTokens
from kvtrio.serve.adapters import Adapters, last_place

NATIVE, CHAT = "/completion", "/v1/chat/completions"
HASHED = SimSettings(token_function=HashTokens(256))
"""Answers depend on the whole history, and on what it was computed under."""
PROMPT = "the same words every time, long enough for some blocks"


async def complete(server: Serving, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "n_predict": 6, "temperature": 0, "return_tokens": True}
    reply = await server.post(NATIVE, body | fields)
    assert reply.status == 200, reply.json
    return reply.json


async def cold(server: Serving, **fields: Any) -> list[int]:
    tokens: list[int] = (await complete(server, cache_prompt=False, **fields))["tokens"]
    return tokens


async def two_adapters(server: Serving) -> None:
    await server.add_adapter("a", scale=1.0)
    await server.add_adapter("b", scale=0.5)


def only(adapter: int, scale: float) -> list[dict[str, float]]:
    return [{"id": adapter, "scale": scale}]


# --- what a request gets ---


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.5}]),
        ({"lora": None}, [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.5}]),
        ({"lora": []}, []),
        ({"lora": only(1, 2)}, only(1, 2.0)),
        ({"lora": [{"id": 1}]}, []),
        ({"lora": only(1, -0.5) + only(0, 0)}, only(1, -0.5)),
        ({"lora": only(1, 0.5) + only(0, 1)}, only(0, 1.0) + only(1, 0.5)),
        ({"model": "b"}, only(1, 1.0)),
        ({"model": "b", "lora": only(0, 3)}, only(0, 3.0)),
        ({"model": "b", "lora": []}, []),
        ({"model": "sim-model"}, [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.5}]),
        ({"model": "gpt-4"}, [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.5}]),
    ],
)
async def test_the_effective_set(autojump_clock: Any, fields: dict[str, Any], shown: Any) -> None:
    """The field if it is there, else the model's name, else the global scales; zeros drop out."""
    async with serving(sim=HASHED) as server:
        await two_adapters(server)
        answer = await complete(server, **fields)
        assert answer["generation_settings"]["lora"] == shown
        explicit = await complete(server, lora=shown)
        assert explicit["tokens"] == answer["tokens"]
        assert explicit["timings"]["prompt_n"] == 1


@pytest.mark.parametrize(
    "lora",
    [
        only(2, 1.0),
        only(-1, 1.0),
        only(10**12, 1.0),
        only(0, 1.0) + only(0, 0.5),
        only(0, 1e6),
        only(0, -1e6),
        [{"scale": 1.0}],
        [{"id": "0", "scale": 1.0}],
        [{"id": 0.5, "scale": 1.0}],
        [{"id": 0, "scale": "1"}],
        [{"id": 0, "scale": True}],
        [0],
        {"id": 0, "scale": 1.0},
        "a",
        only(0, 1.0) * 65,
    ],
)
@pytest.mark.parametrize("path", [NATIVE, CHAT, "/lora-adapters"])
async def test_what_is_no_list_of_adapters(autojump_clock: Any, path: str, lora: Any) -> None:
    """Unknown, doubled or strange: 400, and nothing runs or changes."""
    messages = [{"role": "user", "content": "x"}]
    body = lora if path == "/lora-adapters" else {"prompt": "x", "messages": messages, "lora": lora}
    async with serving() as server:
        await two_adapters(server)
        before = (await server.get("/lora-adapters")).json
        assert (await server.post(path, body)).status == 400
        assert (await server.get("/lora-adapters")).json == before
        assert server.stack.core.next_step == 0


@pytest.mark.parametrize("raw", [b'[{"id":0,"scale":1e999}]', b'[{"id":0,"scale":NaN}]'])
async def test_scales_are_finite(autojump_clock: Any, raw: bytes) -> None:
    """What no double holds is refused."""
    async with serving() as server:
        await two_adapters(server)
        assert (await server.post("/lora-adapters", raw)).status == 400


@pytest.mark.parametrize("path", [NATIVE, CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_the_adapter_as_the_model(
    autojump_clock: Any, path: str, stream: bool
) -> None:
    """Asked for as a model, it answers as one."""
    messages = [{"role": "user", "content": "x"}]
    async with serving() as server:
        await two_adapters(server)
        for asked, said in (("b", "b"), ("other", "sim-model"), (None, "sim-model")):
            body = {"prompt": "x", "messages": messages, "max_tokens": 1, "model": asked}
            reply = await server.post(path, {**body, "stream": stream})
            last = reply.events[-1] if stream else reply.json
            assert last["model"] == said


async def test_adapters_are_listed_as_models(autojump_clock: Any) -> None:
    """As vLLM does, below the model they belong to."""
    async with serving() as server:
        await two_adapters(server)
        base, *adapters = (await server.get("/v1/models")).json["data"]
        assert [each["id"] for each in adapters] == ["a", "b"]
        assert {each["parent"] for each in adapters} == {base["id"]}
        for entry in (base, *adapters):
            assert (await server.get(f"/v1/models/{entry['id']}")).json == entry


@pytest.mark.parametrize("name", ["none", "sim-model/a", "a%00", "..%2Fa", "SIM-MODEL"])
async def test_another_models_name_is_a_404(autojump_clock: Any, name: str) -> None:
    """Of which nothing is repeated."""
    async with serving() as server:
        for path in ("/models", "/v1/models"):
            answer = await server.get(f"{path}/{name}")
            assert answer.status == 404
            assert answer.error["kvtrio"]["code"] == "no_model"
            assert name not in answer.error["message"]


# --- state belongs to the set it was computed under ---


async def test_state_of_one_set_is_never_used_under_another(autojump_clock: Any) -> None:
    """Whichever way the setting came: reuse where the set is the same, nothing where it is not."""
    async with serving(sim=HASHED) as server:
        await two_adapters(server)

        async def check(reuse: bool, **fields: Any) -> None:
            answer = await complete(server, **fields)
            assert answer["tokens"] == await cold(server, **fields)
            assert (answer["timings"]["prompt_n"] == 1) is reuse
            assert reuse or answer["timings"]["cache_n"] == 0

        async def scales(a: float, b: float) -> None:
            body = [{"id": 0, "scale": a}, {"id": 1, "scale": b}]
            assert (await server.post("/lora-adapters", body)).json == {"success": True}

        await scales(0, 0)
        await check(False)
        await check(True)
        await scales(1, 0)
        await check(False)
        await check(True, lora=only(0, 1.0))
        await check(True, model="a")
        await check(False, lora=only(1, 1.0))
        await check(True)
        await scales(0, 0)
        await check(True)
        await check(True, lora=only(1, 0.0))
        await check(True, lora=[])
        both = only(0, 0.5) + only(1, 1.0)
        await check(False, lora=both)
        await check(True, lora=both[::-1])
        await check(False, lora=only(0, 0.25))


async def test_equal_names_are_not_equal_adapters(autojump_clock: Any) -> None:
    """Content is identity: two names of one content share state, the mirror of what may not be."""
    async with serving(sim=HASHED) as server:
        await server.add_adapter("one", "content")
        await server.add_adapter("two", "content")
        await server.add_adapter("three", "other content")
        first = await complete(server, model="one")
        second = await complete(server, model="two")
        third = await complete(server, model="three")
        assert second["timings"]["prompt_n"] == 1
        assert second["tokens"] == first["tokens"]
        assert third["timings"]["cache_n"] == 0


async def test_a_change_of_scales_leaves_running_requests_alone(autojump_clock: Any) -> None:
    """The set is fixed at admission: the stream ends as it would have; the next one differs."""
    async with serving(sim=HASHED) as server:
        await two_adapters(server)
        expected = await cold(server, n_predict=40)
        answers: list[Any] = []

        async def run() -> None:
            answers.append(await complete(server, n_predict=40))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(0.05)
            await server.post("/lora-adapters", only(0, 0.25))
        assert answers[0]["tokens"] == expected
        assert (await complete(server, n_predict=40))["tokens"] != expected


async def test_different_sets_share_a_step(autojump_clock: Any) -> None:
    """Four requests under four sets at once: each gets its own cold answer, in common steps."""
    sets: list[Any] = [[], only(0, 1.0), only(1, 1.0), only(0, 0.5) + only(1, 1.0)]
    async with serving(sim=HASHED) as server:
        await two_adapters(server)
        expected = [await cold(server, lora=each) for each in sets]
        found: dict[int, list[int]] = {}
        first_step = len(server.stack.records.steps)

        async def one(index: int) -> None:
            found[index] = (await complete(server, lora=sets[index]))["tokens"]

        async with trio.open_nursery() as nursery:
            for index in range(len(sets)):
                nursery.start_soon(one, index)
        assert [found[index] for index in range(len(sets))] == expected
        assert max(step.num_chunks for step in server.stack.records.steps[first_step:]) == 4


async def test_a_request_returns_what_it_holds(autojump_clock: Any) -> None:
    """Finished, refused or left by its client: no lease stays behind."""
    async with serving(sim=SimSettings(num_places=1, max_waiting=0)) as server:
        await two_adapters(server)
        adapters = server.services.loader.adapters
        await complete(server)
        await server.post(NATIVE, {"prompt": "x" * 500})
        await server.post(NATIVE, {"prompt": "x", "stream": True}, hang_up_after=1)
        await server.stack.engine.wait_idle()
        await trio.sleep(1)
        assert adapters.leases == ()


# --- activated adapters ---


async def test_an_activated_adapter_starts_at_its_last_invocation(autojump_clock: Any) -> None:
    """What stands before is the base's, and shared with it; the rest is the adapter's."""
    head, call = "words before it. " * 4, "CALL"
    async with serving(sim=HASHED, recall_bytes=0) as server:
        await server.add_adapter("x", invocation_tokens=tuple(call.encode()))
        prompt = f"{head}{call} and once more {head}{call} go"
        start = 1 + prompt.rindex(call)
        base = await complete(server, prompt=prompt, lora=[])
        answer = await complete(server, prompt=prompt, model="x")
        assert base["timings"]["cache_n"] == 0
        assert answer["timings"]["cache_n"] == start
        assert answer["tokens"] != base["tokens"]
        assert answer["tokens"] == await cold(server, prompt=prompt, model="x")
        again = await complete(server, prompt=prompt, model="x")
        assert again["timings"]["prompt_n"] == 1


async def test_an_activated_adapter_without_its_invocation_is_off(autojump_clock: Any) -> None:
    """The request is the base's, and shares all its state."""
    async with serving(sim=HASHED) as server:
        await server.add_adapter("x", invocation_tokens=tuple(b"CALL"))
        base = await complete(server, lora=[])
        answer = await complete(server, model="x")
        assert answer["tokens"] == base["tokens"]
        assert answer["timings"]["prompt_n"] == 1


async def test_activated_and_plain_adapters_mix(autojump_clock: Any) -> None:
    """Each counts from its own place on."""
    prompt = "words before it. " * 3 + "CALL go"
    async with serving(sim=HASHED) as server:
        await server.add_adapter("plain")
        await server.add_adapter("x", invocation_tokens=tuple(b"CALL"))
        await complete(server, prompt=prompt, lora=only(0, 1.0))
        both = await complete(server, prompt=prompt, lora=only(0, 1.0) + only(1, 1.0))
        assert both["timings"]["cache_n"] == 1 + prompt.index("CALL")
        assert both["tokens"] == await cold(server, prompt=prompt, lora=only(0, 1.0) + only(1, 1.0))


@pytest.mark.parametrize(
    ("tokens", "wanted", "place"),
    [
        ((1, 2, 3, 2, 3, 4), (2, 3), 3),
        ((1, 2, 3), (4,), None),
        ((1, 2), (1, 2, 3), None),
        ((), (1,), None),
        # Only token borders count: these bytes also lie across one.
        ((0x01000000, 0x00000002), (0x00000201,), None),
        ((0x00000201, 0x01000000, 0x00000002), (0x00000201,), 0),
    ],
)
def test_last_place(tokens: tuple[int, ...], wanted: tuple[int, ...], place: int | None) -> None:
    """Whole tokens, from the end."""
    assert last_place(tokens, wanted) == place


def test_ids_are_never_given_to_another_name() -> None:
    """Not even after the name that had one has gone."""
    from harness.serving import adapter_data
    from kvtrio.serve.adapters import AdapterInfo

    adapters, info = Adapters(), AdapterInfo.of("x", adapter_data("x"))
    assert [adapters.add(name, handle, info).id for handle, name in enumerate("abc")] == [0, 1, 2]
    adapters.remove("b")
    assert adapters.add("d", 7, info).id == 3
    assert adapters.add("a", 8, info).id == 0
    assert [each.id for each in adapters.all] == [0, 2, 3]
