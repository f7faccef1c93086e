"""No word of a user in what is said of adapters, reuse and metrics, nor in the log about them.

As ``test_canary``, for the routes, fields, errors and events that deal with state. The name of an
adapter that somebody loaded is shown where adapters are listed, and nowhere else.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, field
from model.adapter_builder import gguf_adapter, random_pairs

from harness.serving import SEALER, Reply, Serving, served_model, serving, token_ids
from harness.virtual import SimSettings
from kvtrio.obs import events
from kvtrio.obs.logging import Clock, Log
from kvtrio.obs.observer import JsonObserver
from kvtrio.obs.schema import Level, name_of

CANARY = "Canary7Words"
SPELLINGS = tuple(
    spelling.lower()
    for spelling in (
        CANARY,
        CANARY[:8],
        CANARY[::-1],
        CANARY.encode().hex(),
        base64.b64encode(CANARY.encode()).decode()[:12],
        repr(list(CANARY.encode()))[1:20],
    )
)
NATIVE, TEXT, CHAT = "/completion", "/v1/completions", "/v1/chat/completions"
LORA, LOAD, UNLOAD = "/lora-adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
HEADERS = {"authorization": f"Bearer {CANARY}", "user-agent": CANARY}
ABOUT_SERVER = (LORA, "/metrics", "/v1/metrics", "/slots", "/props", "/v1/models", "/health")
STATE_EVENTS = {
    name_of(kind)
    for kind in (
        events.CacheMatch,
        events.CacheDivergence,
        events.CacheRestore,
        events.CacheEvict,
        events.CacheDiscard,
        events.AdapterChange,
    )
}


def assert_clean(text: str) -> None:
    assert [spelling for spelling in SPELLINGS if spelling in text.lower()] == [], text


@define
class Watch:
    """Looks at answers, and at the log of all that a server did."""

    codes: set[str] = field(factory=set)

    def look(self, reply: Reply) -> Reply:
        if reply.status is None or reply.status >= 400:
            assert_clean(reply.raw.body.decode())
            self.codes.add(reply.error["kvtrio"]["code"])
        assert_clean(json.dumps(reply.headers))
        return reply

    def lines(self, server: Serving) -> list[dict[str, Any]]:
        """The log at level debug, searched."""
        out, records = io.BytesIO(), server.stack.records
        log = Log(out, Clock(monotonic_ns=lambda: 0, wall_s=lambda: 0.0), Level.DEBUG)
        observer = JsonObserver(log, key=SEALER.log_key)
        for step in records.steps:
            observer.step(step)
        for hit in records.hits:
            observer.cached(hit)
        for move in records.moves:
            observer.moved(move)
        for request in records.requests:
            observer.request(request)
        for line in server.lines:
            log.emit(line)
        assert_clean(out.getvalue().decode())
        return [json.loads(line) for line in out.getvalue().splitlines()]


def full_body(**changes: Any) -> dict[str, Any]:
    """The canary in every field that says something of state, and in the words themselves."""
    roles = ("system", "user", "assistant", "user")
    body = {
        "model": CANARY,
        "cache_salt": CANARY,
        "kvtrio": {"session": CANARY, "purpose": "chat"},
        "messages": [{"role": role, "content": f"{CANARY} {role}"} for role in roles],
        "prompt": f"{CANARY} " * 6,
        "max_tokens": 3,
    }
    return body | changes


async def about_server(server: Serving, watch: Watch) -> None:
    for path in ABOUT_SERVER:
        reply = watch.look(await server.get(path, **HEADERS))
        assert reply.status == 200
        assert_clean(reply.raw.body.decode())


async def test_reuse_is_explained_without_a_word(autojump_clock: Any) -> None:
    """Hits, divergence, evictions, RAM, discards: all in numbers; so are the answers' accounts."""
    sim = SimSettings(num_places=1, max_context=224, num_host_blocks=30)
    watch = Watch()
    async with serving(token_ids("al"), sim=sim) as server:
        await server.add_adapter("a")
        for number in range(4):
            for path in (NATIVE, TEXT, CHAT):
                changed = full_body()
                changed["messages"][1]["content"] += f" {number}"
                for stream in (False, True):
                    reply = await server.post(path, changed | {"stream": stream}, headers=HEADERS)
                    last = (reply.events if stream else [reply.json])[-1]
                    assert_clean(json.dumps(last["kvtrio"]))
        probe = {"session": CANARY, "purpose": "title"}
        await server.post(NATIVE, full_body(kvtrio=probe, model="a"), headers=HEADERS)
        await about_server(server, watch)
        lines = watch.lines(server)
    assert {line["event"] for line in lines} >= STATE_EVENTS
    done = [line for line in lines if line["event"] == "request.done"]
    assert all(len(line["session"]) == 16 for line in done)


async def test_adapters_are_changed_without_a_word(autojump_clock: Any, tmp_path: Path) -> None:
    """Names and paths come from outside; errors, answers about the server and log leave them out.
    Only the lists of adapters show the names that they are for."""
    (tmp_path / f"{CANARY}.gguf").write_bytes(gguf_adapter(random_pairs(served_model().spec)))
    (tmp_path / "bad.gguf").write_bytes(CANARY.encode() * 99)
    watch = Watch()
    async with serving(lora_dir=tmp_path) as server:

        async def post(path: str, body: Any) -> Reply:
            return watch.look(await server.post(path, body, headers=HEADERS))

        for path in (CANARY, f"../{CANARY}", f"/{CANARY}", f"{CANARY}\0", "bad.gguf", CANARY * 99):
            assert (await post(LOAD, {"lora_name": CANARY, "lora_path": path})).status == 400
        for body in (CANARY, [CANARY], {CANARY: CANARY}, {"lora_name": [CANARY]}, f"{CANARY}{{"):
            for path in (LOAD, UNLOAD, LORA):
                raw = body.encode() if isinstance(body, str) else body
                assert (await post(path, raw)).status == 400
        assert (await post(UNLOAD, {"lora_name": CANARY})).status == 404
        await about_server(server, watch)
        loaded = {"lora_name": CANARY, "lora_path": f"{CANARY}.gguf"}
        assert (await post(LOAD, loaded)).status == 200
        assert (await post(NATIVE, full_body())).json["model"] == CANARY
        assert (await post(LORA, [{"id": 0, "scale": 0.5}])).status == 200
        assert (await post(UNLOAD, {"lora_name": CANARY})).status == 200
        await trio.sleep(1)
        await about_server(server, watch)
        changes = [line for line in watch.lines(server) if line["event"] == "adapter.change"]
    assert [line["what"] for line in changes] == ["loaded", "scaled", "unloaded", "freed"]


async def test_refusals(
    autojump_clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error that adapters and hints can meet, with the canary in reach."""
    (tmp_path / "a.gguf").write_bytes(gguf_adapter(random_pairs(served_model().spec)))
    load = {"lora_name": CANARY, "lora_path": "a.gguf"}
    watch = Watch()

    def refuse(data: object) -> int:
        raise ValueError(CANARY)

    async with serving(lora_dir=tmp_path) as server:
        adapters = server.services.loader.adapters

        async def post(path: str, body: Any) -> None:
            watch.look(await server.post(path, body, headers=HEADERS))

        await post(NATIVE, full_body(lora=[{"id": 5, "scale": 1}]))
        await post(LORA, [{"id": 0}, {"id": 0}])
        await post(LOAD, load | {"lora_path": CANARY})
        await post(LOAD, load | {"lora_name": "sim-model"})
        await post(UNLOAD, {"lora_name": CANARY})
        await post(CHAT, full_body(kvtrio={"purpose": CANARY}))
        await post(CHAT, full_body(kvtrio={CANARY: CANARY}))
        await post(CHAT, full_body(kvtrio={"session": CANARY, "retain": CANARY}))
        await post(CHAT, full_body(cache_salt=[CANARY], lora=CANARY, cache_prompt=CANARY))
        adapters.max_bytes = 1
        await post(LOAD, load)
        adapters.max_bytes, adapters.max_adapters = 1 << 30, 0
        await post(LOAD, load)
        adapters.max_adapters = 1
        monkeypatch.setattr(server.stack.backend, "load_adapter", refuse)
        await post(LOAD, load)
        watch.lines(server)
    async with serving() as server:
        watch.look(await server.post(LOAD, load, headers=HEADERS))
    assert watch.codes == {
        "unknown_adapter",
        "repeated_adapter",
        "adapter_refused",
        "taken_name",
        "no_adapter",
        "unknown_purpose",
        "wrong_value",
        "adapters_too_large",
        "adapters_full",
        "no_adapter_room",
        "no_adapter_dir",
    }
