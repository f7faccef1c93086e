"""Adapters that come and go while the server runs."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from model.adapter_builder import gguf_adapter, random_pairs

from harness.serving import Serving, served_model, serving
from harness.virtual import SimSettings
from kvtrio.backends.sim import HashTokens
from kvtrio.obs.schema import Digest
from kvtrio.obs.words import AdapterEvent
from kvtrio.serve import adapters as adapters_module

NATIVE, LOAD, UNLOAD = "/completion", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
HASHED = SimSettings(token_function=HashTokens(256))
PROMPT = "the same words every time, long enough for some blocks"


async def complete(server: Serving, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "n_predict": 6, "temperature": 0, "return_tokens": True}
    reply = await server.post(NATIVE, body | fields)
    assert reply.status == 200, reply.json
    return reply.json


async def load(server: Serving, name: str, path: str) -> Any:
    reply = await server.post(LOAD, {"lora_name": name, "lora_path": path})
    assert reply.status == 200, reply.json
    return reply.json


async def listed(server: Serving) -> list[Any]:
    entries: list[Any] = (await server.get("/lora-adapters")).json
    return entries


def put(folder: Path, name: str, seed: int) -> None:
    pairs = random_pairs(served_model().spec, seed=seed)
    (folder / name).write_bytes(gguf_adapter(pairs))


async def test_load_use_unload(autojump_clock: Any, lora_dir: Path) -> None:
    """Loaded, an adapter can be asked for; its global scale is 0, so nobody else meets it."""
    async with serving(sim=HASHED, lora_dir=lora_dir) as server:
        base = await complete(server)
        assert (await load(server, "mine", "a.gguf"))["success"] is True
        assert (await complete(server))["tokens"] == base["tokens"]
        mine = await complete(server, model="mine")
        assert mine["timings"]["cache_n"] == 0
        assert mine["tokens"] != base["tokens"]
        (entry,) = await listed(server)
        assert (entry["id"], entry["name"], entry["path"]) == (0, "mine", "a.gguf")
        assert (entry["scale"], entry["kind"]) == (0.0, "gguf")
        assert len(bytes.fromhex(entry["digest"])) == 32
        assert entry["log_digest"] != entry["digest"][:16]
        assert (await server.post(UNLOAD, {"lora_name": "mine"})).status == 200
        assert await listed(server) == []
        refused = await server.post(NATIVE, {"prompt": "x", "lora": [{"id": 0, "scale": 1}]})
        assert refused.error["kvtrio"]["code"] == "unknown_adapter"
        assert (await complete(server, model="mine"))["tokens"] == base["tokens"]


async def test_both_forms_and_sub_folders(autojump_clock: Any, lora_dir: Path) -> None:
    """A GGUF file, a PEFT folder, and one further down; the folder's own path is never shown."""
    async with serving(lora_dir=lora_dir) as server:
        for name, path in (("one", "a.gguf"), ("two", "p"), ("three", "sub/c.gguf")):
            await load(server, name, path)
        entries = await listed(server)
        assert [entry["path"] for entry in entries] == ["a.gguf", "p", "c.gguf"]
        assert [entry["kind"] for entry in entries] == ["gguf", "peft", "gguf"]
        assert str(lora_dir) not in str(entries)


async def test_new_bytes_under_an_old_name_are_another_adapter(
    autojump_clock: Any, lora_dir: Path
) -> None:
    """A reload counts at once and keeps the id; the old bytes again find the old state."""
    async with serving(sim=HASHED, lora_dir=lora_dir) as server:
        put(lora_dir, "x.gguf", 11)
        old = await load(server, "x", "x.gguf")
        first = await complete(server, model="x")
        assert (await complete(server, model="x"))["timings"]["prompt_n"] == 1
        put(lora_dir, "x.gguf", 12)
        new = await load(server, "x", "x.gguf")
        assert new["id"] == old["id"]
        assert new["digest"] != old["digest"]
        second = await complete(server, model="x")
        assert second["timings"]["cache_n"] == 0
        assert second["tokens"] != first["tokens"]
        put(lora_dir, "x.gguf", 11)
        assert (await load(server, "x", "x.gguf"))["digest"] == old["digest"]
        third = await complete(server, model="x")
        assert third["timings"]["prompt_n"] == 1
        assert third["tokens"] == first["tokens"]


async def test_running_requests_end_on_the_weights_they_began_with(
    autojump_clock: Any, lora_dir: Path
) -> None:
    """A reload and an unload beside a stream: it ends as it would have, and only then is the old
    adapter freed."""
    async with serving(sim=HASHED, lora_dir=lora_dir) as server:
        await load(server, "x", "a.gguf")
        expected = (await complete(server, model="x", n_predict=60, cache_prompt=False))["tokens"]
        freed: list[int] = []
        backend_unload = server.stack.backend.unload_adapter
        server.stack.backend.unload_adapter = lambda handle: (  # type: ignore[method-assign]
            freed.append(handle),
            backend_unload(handle),
        )[1]
        answers: list[Any] = []

        async def run() -> None:
            answers.append(await complete(server, model="x", n_predict=60, cache_prompt=False))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(0.05)
            await load(server, "x", "b.gguf")
            await server.post(UNLOAD, {"lora_name": "x"})
            await trio.sleep(0.01)
            assert answers == []
            assert freed == [2], "nobody used the second one"
        assert answers[0]["tokens"] == expected
        await trio.sleep(1)
        assert freed == [2, 1]


async def test_loading_holds_nobody_up(autojump_clock: Any, lora_dir: Path) -> None:
    """Adapters come and go beside a stream, whose gaps stay what a step takes."""
    sim = SimSettings(cost=lambda batch: 0.01)
    async with serving(sim=sim, lora_dir=lora_dir) as server:
        chunk_times: list[float] = []

        async def stream() -> None:
            body = {"prompt": "x", "n_predict": 50, "stream": True}
            chunk_times.extend((await server.post(NATIVE, body)).raw.chunk_times_s)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream)
            for name in "abcd":
                await trio.sleep(0.03)
                await load(server, name, "a.gguf")
                await server.post(UNLOAD, {"lora_name": name})
        gaps = [after - before for before, after in pairwise(chunk_times)]
        assert max(gaps) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("name", "path", "status", "code"),
    [
        ("x", "none.gguf", 400, "adapter_refused"),
        ("x", "stray.gguf", 400, "adapter_refused"),
        ("x", "empty.gguf", 400, "adapter_refused"),
        ("x", "link.gguf", 400, "adapter_refused"),
        ("x", "../outside.gguf", 400, "adapter_refused"),
        ("x", "/etc/passwd", 400, "adapter_refused"),
        ("x", "sub/../a.gguf", 400, "adapter_refused"),
        ("x", "sub", 400, "adapter_refused"),
        ("x", "a.gguf\0", 400, "adapter_refused"),
        ("sim-model", "a.gguf", 400, "taken_name"),
        ("", "a.gguf", 400, "bad_request"),
        ("x" * 129, "a.gguf", 400, "bad_request"),
        ("a,b", "a.gguf", 400, "wrong_value"),
        ("a\nb", "a.gguf", 400, "wrong_value"),
        ("a\0", "a.gguf", 400, "wrong_value"),
        ("a\x7f", "a.gguf", 400, "wrong_value"),
        ("a\u2028b", "a.gguf", 400, "wrong_value"),
        ("\ud800", "a.gguf", 400, None),
        ("x", "", 400, "bad_request"),
        ("x", None, 400, "bad_request"),
        (None, "a.gguf", 400, "bad_request"),
        ("x", ["a.gguf"], 400, "bad_request"),
    ],
)
async def test_what_cannot_be_loaded(
    autojump_clock: Any, lora_dir: Path, name: Any, path: Any, status: int, code: str | None
) -> None:
    """A clear 4xx; the adapters that are there stay as they were, and nothing is echoed."""
    async with serving(lora_dir=lora_dir) as server:
        await load(server, "good", "a.gguf")
        before = await listed(server)
        reply = await server.post(LOAD, {"lora_name": name, "lora_path": path})
        assert reply.status == status
        if code not in (None, "bad_request"):
            assert reply.error["kvtrio"]["code"] == code
        assert str(lora_dir) not in reply.raw.body.decode()
        assert "passwd" not in reply.raw.body.decode()
        assert await listed(server) == before


async def test_names_may_be_long_and_foreign(autojump_clock: Any, lora_dir: Path) -> None:
    """All that can be printed, but for commas; such an adapter can be asked for."""
    async with serving(lora_dir=lora_dir) as server:
        for name in ("x" * 128, "m\u00fcller's fox; 2", "\u4f60\u597d"):
            await load(server, name, "a.gguf")
            assert (await complete(server, model=name))["model"] == name
            assert (await server.post(UNLOAD, {"lora_name": name})).status == 200


async def test_a_stray_tensor_is_named(autojump_clock: Any, lora_dir: Path) -> None:
    """Whoever loads an adapter learns what of it fits nothing."""
    async with serving(lora_dir=lora_dir) as server:
        reply = await server.post(LOAD, {"lora_name": "x", "lora_path": "stray.gguf"})
        assert "blk.7.attn_q.weight" in reply.error["message"]


async def test_without_a_folder_nothing_can_be_loaded(autojump_clock: Any) -> None:
    """The operator has to permit it."""
    async with serving() as server:
        reply = await server.post(LOAD, {"lora_name": "x", "lora_path": "a.gguf"})
        assert reply.status == 501
        assert reply.error["kvtrio"]["code"] == "no_adapter_dir"


async def test_an_unknown_name_cannot_be_unloaded(autojump_clock: Any) -> None:
    """404, as in vLLM."""
    async with serving() as server:
        assert (await server.post(UNLOAD, {"lora_name": "x"})).status == 404


async def test_there_is_a_limit(
    autojump_clock: Any, lora_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In number and in bytes; a reload under a known name needs no new place."""
    async with serving(lora_dir=lora_dir) as server:
        adapters = server.services.loader.adapters
        adapters.max_adapters = 2
        await load(server, "one", "a.gguf")
        await load(server, "two", "b.gguf")
        full = await server.post(LOAD, {"lora_name": "three", "lora_path": "a.gguf"})
        assert full.error["kvtrio"]["code"] == "adapters_full"
        await load(server, "two", "a.gguf")
        adapters.max_adapters = adapters_module.MAX_ADAPTERS
        adapters.max_bytes = sum(each.info.num_bytes for each in adapters.all) + 1
        large = await server.post(LOAD, {"lora_name": "three", "lora_path": "a.gguf"})
        assert large.error["kvtrio"]["code"] == "adapters_too_large"
        assert [entry["name"] for entry in await listed(server)] == ["one", "two"]


async def test_what_the_model_refuses_changes_nothing(
    autojump_clock: Any, lora_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend has no room: a 400, and the name keeps what it had."""

    def refuse(data: object) -> int:
        raise ValueError("not enough memory")

    async with serving(lora_dir=lora_dir) as server:
        await load(server, "x", "a.gguf")
        before = await listed(server)
        monkeypatch.setattr(server.stack.backend, "load_adapter", refuse)
        reply = await server.post(LOAD, {"lora_name": "x", "lora_path": "b.gguf"})
        assert reply.error["kvtrio"]["code"] == "no_adapter_room"
        assert await listed(server) == before


async def test_changes_are_logged_without_names(autojump_clock: Any, lora_dir: Path) -> None:
    """One line per change, with digests that GET /lora-adapters explains."""
    async with serving(lora_dir=lora_dir) as server:
        entry = await load(server, "mine", "a.gguf")
        await server.post("/lora-adapters", [{"id": 0, "scale": 0.5}])
        await load(server, "mine", "b.gguf")
        await server.post(UNLOAD, {"lora_name": "mine"})
        await trio.sleep(1)
        changes = server.lines
        assert [change.what for change in changes] == [
            AdapterEvent.LOADED,
            AdapterEvent.SCALED,
            AdapterEvent.REPLACED,
            AdapterEvent.FREED,
            AdapterEvent.UNLOADED,
            AdapterEvent.FREED,
        ]
        assert str(changes[0].content) == entry["log_digest"]
        key = server.services.settings.sealer.log_key
        assert {change.name for change in changes} == {Digest.of("mine", key)}


async def test_loads_at_once_take_turns(autojump_clock: Any, lora_dir: Path) -> None:
    """Ten at once under two names: each is answered, and one adapter of each name remains."""
    async with serving(lora_dir=lora_dir) as server:

        async def one(number: int) -> None:
            await load(server, "xy"[number % 2], "ab"[number // 5] + ".gguf")

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(one, number)
        await trio.sleep(1)
        assert sorted(entry["name"] for entry in await listed(server)) == ["x", "y"]
        assert len({entry["digest"] for entry in await listed(server)}) <= 2
        assert server.services.loader.adapters.idle() == ()
