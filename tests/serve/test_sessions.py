"""Saved conversations over HTTP: llama-server's routes for slots, ``kvtrio.session``, refusals.

The whole stack in virtual time over real files; a restart is another stack over the same folder.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from harness.serving import IDENTITY, Reply, Serving, serving
from harness.virtual import SimSettings
from harness.virtual_http import Call
from kvtrio.core.config import Group
from kvtrio.core.types import StateClass

CHAT, NATIVE = "/v1/chat/completions", "/completion"
SIM = SimSettings(
    num_places=2,
    max_context=1000,
    max_batch_tokens=64,
    num_host_blocks=1000,
    cost=lambda batch: 0.1,
)
HYBRID = evolve(
    SIM,
    groups=(Group(StateClass.TOKEN, None, 24), Group(StateClass.POINT, None, 0, 16)),
    num_state_slots=4,
    num_host_state_slots=40,
)
WINDOWED = evolve(
    SIM,
    groups=(Group(StateClass.TOKEN, None, 24), Group(StateClass.WINDOW, 8, 24)),
)
KINDS = pytest.mark.parametrize("sim", [SIM, HYBRID], ids=["window", "recurrent"])
PROMPT = "it was a bright cold day in April, and the clocks were striking thirteen. " * 4


async def act(
    server: Serving, action: str, name: Any = "chat", slot: Any = 0, **more: Any
) -> Reply:
    body = {"filename": name, **more} if name is not None else more
    return await server.post(f"/slots/{slot}?action={action}", body)


async def complete(server: Serving, prompt: Any = PROMPT, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "return_tokens": True, **more}
    reply = await server.post(NATIVE, body)
    assert reply.status == 200, reply.json
    answer: dict[str, Any] = reply.json
    return answer


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


def counts(answer: dict[str, Any]) -> tuple[int, int]:
    return answer["timings"]["cache_n"], answer["timings"]["prompt_n"]


# --- llama-server's routes ---


@pytest.mark.slow
@KINDS
async def test_a_conversation_goes_on_after_a_restart(
    autojump_clock: Any, tmp_path: Path, sim: SimSettings
) -> None:
    """The next turn computes what is new; the same again and a changed tail nearly nothing."""
    async with serving(sim=sim, session_dir=tmp_path) as server:
        ids = (await server.post("/tokenize", {"content": PROMPT, "add_special": True})).json
        first = await complete(server, ids["tokens"], id_slot=1)
        saved = await act(server, "save", slot=1)
        length = len(ids["tokens"]) + 3
        assert (saved.status, saved.json["id_slot"], saved.json["filename"]) == (200, 1, "chat")
        assert saved.json["n_saved"] == length
        assert saved.json["n_written"] <= sum(path.stat().st_size for path in files(tmp_path))
        assert saved.json["timings"]["save_ms"] >= 0
    async with serving(sim=sim, session_dir=tmp_path) as server:
        restored = await act(server, "restore", slot=0)
        assert (restored.status, restored.json["id_slot"]) == (200, 0)
        assert restored.json["n_restored"] == length
        assert restored.json["n_read"] == saved.json["n_written"]
        assert restored.json["timings"]["restore_ms"] >= 0
        checkpoints = restored.json["kvtrio"]["checkpoints"]
        assert bool(checkpoints) is (sim is HYBRID)
        chat = ids["tokens"] + first["tokens"]
        assert counts(await complete(server, [*chat, 65, 66])) == (length, 3)
        again = await complete(server, ids["tokens"])
        assert again["tokens"] == first["tokens"]
        assert counts(again)[1] <= 32
        assert counts(await complete(server, [*chat[:-6], 65]))[1] <= 32


async def test_a_place_stands_for_what_was_restored_there(
    autojump_clock: Any, tmp_path: Path
) -> None:
    """It can be saved again under another name, which adds no state; and erased."""
    async with serving(sim=SIM, session_dir=tmp_path) as server:
        await complete(server, id_slot=0)
        saved = (await act(server, "save")).json
        assert (await act(server, "restore", slot=1)).status == 200
        places = (await server.get("/slots")).json
        assert places[1]["n_prompt_tokens"] == saved["n_saved"]
        again = (await act(server, "save", "copy", slot=1)).json
        assert again["n_saved"] == saved["n_saved"]
        assert again["kvtrio"]["new_bytes"] == 0
        erased = (await act(server, "erase", None, slot=1)).json
        assert erased == {"id_slot": 1, "n_erased": saved["n_saved"]}
        assert "n_prompt_tokens" not in (await server.get("/slots")).json[1]
        assert (await act(server, "save", slot=1)).error["kvtrio"]["code"] == "empty_slot"
        assert (await act(server, "erase", None, slot=1)).json["n_erased"] == 0


async def test_an_erased_conversation_is_computed_again(autojump_clock: Any) -> None:
    """Erasing needs no folder for sessions."""
    async with serving(sim=SIM) as server:
        length = sum(counts(await complete(server, id_slot=0)))
        assert counts(await complete(server, id_slot=0))[0] == length - 1
        assert (await server.post("/slots/0?action=erase", b"")).json["n_erased"] == length + 3
        assert counts(await complete(server, id_slot=0)) == (0, length)


@pytest.mark.slow
async def test_saving_waits_for_a_busy_place(autojump_clock: Any, tmp_path: Path) -> None:
    """It says the length of the request that ran there then; and so does restoring wait."""
    async with serving(sim=SIM, session_dir=tmp_path) as server, trio.open_nursery() as nursery:
        await complete(server, "short", id_slot=0)
        await act(server, "save", "short")
        nursery.start_soon(lambda: complete(server, id_slot=0, n_predict=50))
        await trio.sleep(1)
        saved = await act(server, "save")
        assert saved.raw.total_s > 4
        assert saved.json["n_saved"] == len(PROMPT) + 1 + 49
        nursery.start_soon(lambda: complete(server, id_slot=0, n_predict=50))
        await trio.sleep(1)
        restored = await act(server, "restore", "short")
        assert restored.raw.total_s > 3


async def test_what_is_asked_of_a_busy_place_is_done_in_order(
    autojump_clock: Any, tmp_path: Path
) -> None:
    """Erased first and restored then, it has what was restored, though both came while it was
    busy."""
    async with serving(sim=SIM, session_dir=tmp_path) as server, trio.open_nursery() as nursery:
        await complete(server, id_slot=0)
        saved = (await act(server, "save")).json["n_saved"]
        nursery.start_soon(lambda: complete(server, id_slot=0, n_predict=50))
        await trio.sleep(1)
        nursery.start_soon(act, server, "erase", None)
        await trio.sleep(0.1)
        assert (await act(server, "restore")).json["n_restored"] == saved


async def test_who_leaves_while_it_is_saved_leaves_nothing(
    autojump_clock: Any, tmp_path: Path
) -> None:
    """Neither a file nor a lock: the next one saves, several at once too, one after another."""
    async with serving(sim=SIM, session_dir=tmp_path) as server:
        await complete(server, id_slot=0)
        body = json.dumps({"filename": "left"}).encode()
        call = Call(target="/slots/0?action=save", method="POST", body=body, hang_up_after_s=0.05)
        await server.call(call)
        await trio.sleep(1)
        assert files(tmp_path) == []
        replies: list[Reply] = []

        async def save(name: str) -> None:
            replies.append(await act(server, "save", name))

        async with trio.open_nursery() as nursery:
            for name in ("one", "two", "three"):
                nursery.start_soon(save, name)
        assert {reply.status for reply in replies} == {200}
        assert sorted(reply.json["kvtrio"]["new_bytes"] == 0 for reply in replies) == [0, 1, 1]


async def test_props_say_whether_conversations_can_be_saved(
    autojump_clock: Any, tmp_path: Path
) -> None:
    """And not where."""
    async with serving(sim=SIM, session_dir=tmp_path) as server:
        props = (await server.get("/props")).json
        assert props["kvtrio"]["sessions"] == {"enabled": True}
        assert tmp_path.name not in json.dumps(props)


@pytest.mark.parametrize("sim", [SIM, HYBRID, WINDOWED], ids=["plain", "recurrent", "window"])
async def test_what_is_saved_is_not_read_out_again(
    sim: SimSettings, autojump_clock: Any, tmp_path: Path
) -> None:
    """Steps read state out: none when nothing is new, few when a conversation has grown, also after
    it was restored; and where files were removed meanwhile all are written again."""
    async with serving(sim=sim, session_dir=tmp_path) as server:
        core = server.stack.core
        await complete(server, id_slot=0)
        first = (await act(server, "save")).json
        before = core.next_step
        again = (await act(server, "save", "again")).json
        assert (core.next_step, again["kvtrio"]["new_bytes"]) == (before, 0)
        assert again["n_saved"] == first["n_saved"]
        for path in files(tmp_path / ".blocks"):
            path.unlink()
        assert (await act(server, "save")).json["kvtrio"] == first["kvtrio"]
    async with serving(sim=sim, session_dir=tmp_path) as server:
        core = server.stack.core
        assert (await act(server, "restore")).json["n_restored"] == first["n_saved"]
        before = core.next_step
        assert (await act(server, "save", "again")).json["kvtrio"]["new_bytes"] == 0
        assert core.next_step == before
        await complete(server, PROMPT + "more", id_slot=0)
        grown = (await act(server, "save")).json["kvtrio"]
        assert 0 < grown["new_bytes"] < first["kvtrio"]["new_bytes"] / 2


@pytest.mark.slow
async def test_a_place_keeps_what_it_has_when_restoring_fails(
    autojump_clock: Any, tmp_path: Path
) -> None:
    """A file with one wrong bit is refused before anything is taken from it."""
    async with serving(sim=SIM, session_dir=tmp_path) as server:
        await complete(server, id_slot=0)
        saved = (await act(server, "save")).json
        await complete(server, "another one", id_slot=1)
        other = (await act(server, "save", "other", slot=1)).json
        await act(server, "erase", None, slot=0)
        for path in files(tmp_path / ".blocks"):
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 1
            path.write_bytes(raw)
        failed = await act(server, "restore", slot=1)
        assert (failed.status, failed.error["kvtrio"]["code"]) == (400, "session_damaged")
        assert failed.error["message"].startswith("Unable to restore slot: ")
        assert counts(await complete(server))[0] < saved["n_saved"] // 2
        assert (await act(server, "save", "third", slot=1)).json["n_saved"] >= other["n_saved"]


NAMES = ("", "a/b", "..", "a\\b", ".blocks", " a", "a.", "x" * 256, "a\0b", "a:b")
REFUSED = (
    ("/slots/x?action=save", {"filename": "a"}, 400, "bad_slot"),
    ("/slots/2?action=save", {"filename": "a"}, 400, "bad_slot"),
    (f"/slots/{'9' * 5000}?action=save", {"filename": "a"}, 400, "bad_slot"),
    ("/slots/-1?action=save", {"filename": "a"}, 400, "bad_slot"),
    ("/slots/0", {"filename": "a"}, 400, "bad_action"),
    ("/slots/0?action=load", {"filename": "a"}, 400, "bad_action"),
    ("/slots/0?action=save", {}, 400, "missing_field"),
    ("/slots/0?action=restore", {}, 400, "missing_field"),
    ("/slots/0?action=save", {"filename": 5}, 400, "wrong_value"),
    ("/slots/0?action=save", [], 400, "bad_json"),
    ("/slots/0?action=restore", {"filename": "none"}, 404, "session_not_found"),
    ("/slots/1?action=save", {"filename": "a"}, 400, "empty_slot"),
    *(
        (f"/slots/0?action={action}", {"filename": name}, 400, "bad_session_name")
        for action in ("save", "restore")
        for name in NAMES
    ),
)


async def test_slot_requests_that_are_refused(autojump_clock: Any, tmp_path: Path) -> None:
    """Each with its own code, and nothing is written."""
    async with serving(sim=SIM, session_dir=tmp_path) as server:
        await complete(server, "hi", id_slot=0)
        for target, body, status, code in REFUSED:
            reply = await server.post(target, body)
            assert (reply.status, reply.error["kvtrio"]["code"]) == (status, code), (target, body)
        assert files(tmp_path) == []


async def test_without_a_folder_nothing_is_saved(autojump_clock: Any) -> None:
    """501, for each route that would need it."""
    async with serving(sim=SIM) as server:
        for action in ("save", "restore"):
            reply = await act(server, action)
            assert (reply.status, reply.error["kvtrio"]["code"]) == (501, "no_session_dir")
        body = {"prompt": "x", "n_predict": 1, "kvtrio": {"session": "a", "save_session": True}}
        assert (await server.post(NATIVE, body)).error["kvtrio"]["code"] == "no_session_dir"
        body["kvtrio"] = {"session": "a"}  # a name for the log
        assert "session" not in (await server.post(NATIVE, body)).json["kvtrio"]


@pytest.mark.slow
async def test_state_of_something_else_is_refused(autojump_clock: Any, tmp_path: Path) -> None:
    """Another model, another format or block size, adapters that are not there."""
    async with serving(sim=SIM, session_dir=tmp_path) as server:
        adapter = await server.add_adapter("a")
        await complete(server, id_slot=0)
        await act(server, "save", "plain")
        await complete(server, id_slot=0, lora=[{"id": adapter.id, "scale": 0.5}])
        await act(server, "save", "adapted")
    cases: list[tuple[str, dict[str, Any], SimSettings, str | None]] = [
        ("plain", {"identity": evolve(IDENTITY, model=bytes(32))}, SIM, "session_model"),
        ("plain", {"identity": evolve(IDENTITY, format=bytes(32))}, SIM, "session_format"),
        ("plain", {}, evolve(SIM, block_size=8), "session_format"),
        ("adapted", {}, SIM, "session_adapters"),
        ("plain", {}, SIM, None),
    ]
    for name, settings, sim, code in cases:
        async with serving(sim=sim, session_dir=tmp_path, **settings) as server:
            reply = await act(server, "restore", name)
            assert reply.status == (400 if code else 200)
            if code:
                assert reply.error["kvtrio"]["code"] == code
    async with serving(sim=SIM, session_dir=tmp_path) as server:
        adapter = await server.add_adapter("a", scale=1.0)
        assert (await act(server, "restore", "adapted")).status == 200
        lora = [{"id": adapter.id, "scale": 0.5}]
        assert counts(await complete(server, lora=lora))[1] == 1
        assert counts(await complete(server))[0] == 0


@pytest.mark.slow
async def test_conversations_are_their_owners(autojump_clock: Any, tmp_path: Path) -> None:
    """A key neither saves, restores, erases nor overwrites what is another's; salts part them, too.
    The same key finds its own after a restart."""
    keys = {"api_keys": ("one", "two")}

    def of(key: str) -> dict[str, Any]:
        return {"headers": {"authorization": f"Bearer {key}"}}

    async with serving(sim=SIM, session_dir=tmp_path, **keys) as server:
        mine, theirs = of("one"), of("two")
        body = {"prompt": PROMPT, "n_predict": 4, "id_slot": 0}
        assert (await server.post(NATIVE, body, **mine)).status == 200
        save, restore = "/slots/0?action=save", "/slots/1?action=restore"
        name = {"filename": "mine"}
        assert (await server.post(save, name, **theirs)).error["kvtrio"]["code"] == "empty_slot"
        salted = {**name, "cache_salt": "s"}
        assert (await server.post(save, salted, **mine)).error["kvtrio"]["code"] == "empty_slot"
        erased = await server.post("/slots/0?action=erase", {}, **theirs)
        assert erased.json["n_erased"] == 0
        assert (await server.post(save, name, **mine)).status == 200
        assert (await server.post(restore, name, **theirs)).status == 404
        assert (await server.post(restore, salted, **mine)).status == 404
        await server.post(NATIVE, body, **theirs)
        taken = await server.post(save, name, **theirs)
        assert taken.error["kvtrio"]["code"] == "session_taken"
    async with serving(sim=SIM, session_dir=tmp_path, **keys) as server:
        assert (await server.post(restore, name, **mine)).status == 200
        again = (await server.post(NATIVE, body, **theirs)).json
        assert counts(again)[0] == 0
        assert counts((await server.post(NATIVE, body, **mine)).json)[1] == 1


# --- kvtrio.session ---


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_chat_goes_on_after_a_restart(
    autojump_clock: Any, tmp_path: Path, sim: SimSettings, stream: bool
) -> None:
    """Saved at each turn where that is asked for; restored when memory has less of it, and only
    then. The answer tells both."""
    chat = [said("system", PROMPT), said("user", "well?")]

    async def turn(server: Serving, save: bool) -> dict[str, Any]:
        ours = {"session": "tale", "save_session": save}
        body = {"messages": chat, "max_tokens": 3, "kvtrio": ours, "stream": stream}
        reply = await server.post(CHAT, body)
        last: dict[str, Any] = reply.events[-1] if stream else reply.json
        chat.extend([said("assistant", "aaa"), said("user", "and then?")])
        return last

    async with serving(sim=sim, session_dir=tmp_path) as server:
        first = await turn(server, True)
        length = sum(counts(first))
        assert first["kvtrio"]["session"] == {"restored": 0, "saved": length + 2, "error": None}
        second = await turn(server, False)
        assert second["kvtrio"]["session"] == {"restored": 0, "saved": None, "error": None}
    async with serving(sim=sim, session_dir=tmp_path) as server:
        third = await turn(server, True)
        assert third["kvtrio"]["session"]["restored"] == length + 2
        assert counts(third)[0] == length + 2
        fourth = await turn(server, False)
        assert fourth["kvtrio"]["session"]["restored"] == 0
        assert counts(fourth)[1] < 80


async def test_a_named_chat_whose_file_is_damaged_is_computed(
    autojump_clock: Any, tmp_path: Path
) -> None:
    """The answer comes, and says why nothing was restored; saving it again heals it."""
    body = {"prompt": PROMPT, "n_predict": 4, "kvtrio": {"session": "a", "save_session": True}}
    async with serving(sim=SIM, session_dir=tmp_path) as server:
        await server.post(NATIVE, body)
    raw = bytearray((tmp_path / "a").read_bytes())
    raw[len(raw) // 2] ^= 4
    (tmp_path / "a").write_bytes(raw)
    async with serving(sim=SIM, session_dir=tmp_path) as server:
        ours = {"session": "a"}
        answer = (await server.post(NATIVE, {**body, "kvtrio": ours})).json
        assert answer["kvtrio"]["session"]["restored"] == 0
        assert answer["kvtrio"]["session"]["error"].startswith("session_")
        assert answer["content"] == "aaaa"
        assert (await server.post(NATIVE, body)).json["kvtrio"]["session"]["saved"]
    async with serving(sim=SIM, session_dir=tmp_path) as server:
        answer = (await server.post(NATIVE, body)).json
        assert answer["kvtrio"]["session"]["restored"] == sum(counts(answer)) + 3


@pytest.mark.parametrize(
    ("ours", "more", "code"),
    [
        ({"save_session": True}, {}, "needs_field"),
        ({"session": "a/b", "save_session": True}, {}, "bad_session_name"),
        ({"session": "a", "save_session": True}, {"n": 2}, "conflict"),
        ({"session": "a", "save_session": True, "retain": "auxiliary"}, {}, "conflict"),
        ({"session": "a", "save_session": 1}, {}, "wrong_value"),
        ({"session": "a/b"}, {}, None),
        ({"session": "a"}, {"n": 2}, None),
    ],
)
async def test_what_could_not_be_saved_is_refused_before(
    autojump_clock: Any, tmp_path: Path, ours: Any, more: Any, code: str | None
) -> None:
    """A 400 before anything is computed; a name that is for the log may be any."""
    async with serving(sim=SIM, session_dir=tmp_path) as server:
        reply = await server.post(
            CHAT, {"messages": [said("user", "x")], "max_tokens": 1, "kvtrio": ours, **more}
        )
        if code is None:
            assert reply.status == 200
            return
        assert (reply.status, reply.error["kvtrio"]["code"]) == (400, code)
        assert server.stack.core.next_step == 0
