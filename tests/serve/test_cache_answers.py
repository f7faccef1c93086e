"""What answers say about reuse: how much, from where, why not more, and where it ended."""

from typing import Any

import pytest
import trio

from harness.serving import BOS, EOS, Serving, serving, token_ids, word
from harness.virtual import SimSettings
from kvtrio.core.types import Retain
from kvtrio.obs.events import CacheDivergence

NATIVE, TEXT, CHAT = "/completion", "/v1/completions", "/v1/chat/completions"
SMALL = SimSettings(num_places=1, max_context=96, num_host_blocks=200)
"""One conversation fills the device."""
MEMBERS = {
    "tier",
    "path",
    "reason",
    "turn",
    "reused_device",
    "reused_ram",
    "reused_disk",
    "computed",
    "matched",
    "other_adapter_match",
    "divergence",
    "evicted_age_s",
    "recalled",
}


def body(path: str, text: str = "hello there", **more: Any) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
    return {"prompt": text, "max_tokens": 4, **more}


async def cache(server: Serving, path: str = NATIVE, **fields: Any) -> Any:
    """What the answer says about the cache, plain or streamed."""
    reply = await server.post(path, fields)
    assert reply.status == 200, reply.json
    last = reply.events[-1] if fields.get("stream") else reply.json
    return last["kvtrio"]["cache"]


async def chat(server: Serving, *contents: str, **more: Any) -> Any:
    """A conversation that begins with the system's words."""
    roles = ["system"] + ["user", "assistant"] * len(contents)
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    fields = {"messages": messages, "max_tokens": 4, **more}
    return await cache(server, CHAT, **fields)


# --- in every dialect ---


@pytest.mark.parametrize("path", [NATIVE, TEXT, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("usage", [False, True])
async def test_every_dialect_tells_it_once_at_the_end(
    autojump_clock: Any, path: str, stream: bool, usage: bool
) -> None:
    """The same members on plain answers and on the last chunk; counts agree with all others."""
    fields = body(path, stream=stream, stream_options={"include_usage": usage})
    async with serving() as server:
        await server.post(path, fields)
        reply = await server.post(path, fields)
        events = reply.events if stream else [reply.json]
        assert ["kvtrio" in event for event in events].count(True) == 1
        last = events[-1]
        told = last["kvtrio"]["cache"]
        assert told.keys() == MEMBERS
        assert (told["tier"], told["path"]) == ("device", "resident")
        assert (told["reason"], told["turn"]) == ("nothing_missed", "regenerate")
        assert told["computed"] == last["timings"]["prompt_n"] == 1
        assert told["reused_device"] == last["timings"]["cache_n"] > 10
        assert told["reused_ram"] == 0
        if "usage" in last:
            assert last["usage"]["prompt_tokens_details"] == {
                "cached_tokens": told["reused_device"]
            }


async def test_nothing_known(autojump_clock: Any) -> None:
    """A first turn says so, without a place of divergence."""
    async with serving() as server:
        told = await cache(server, **body(NATIVE))
        assert (told["tier"], told["path"], told["turn"]) == (None, "none", "first")
        assert (told["reason"], told["divergence"]) == ("first_turn", None)
        assert told["computed"] == 12


async def test_state_comes_back_from_ram(autojump_clock: Any) -> None:
    """Pushed off the device by another conversation, found in RAM, and said so."""
    one, other = "one conversation " * 4, "quite another one " * 4
    async with serving(sim=SMALL) as server:
        await cache(server, **body(NATIVE, one))
        await cache(server, **body(NATIVE, other))
        told = await cache(server, **body(NATIVE, one + "goes on"))
        assert (told["tier"], told["path"]) == ("ram", "ram")
        assert told["reused_ram"] > 0
        assert told["reused_ram"] + told["reused_device"] >= len(one) - 1
        assert server.stack.records.moves


async def test_lost_state_is_called_evicted(autojump_clock: Any) -> None:
    """Without RAM the first conversation is gone: the answer says since when it was unused."""
    sim = SimSettings(num_places=1, max_context=96, num_host_blocks=0)
    one = "one conversation " * 4
    async with serving(sim=sim) as server:
        await cache(server, **body(NATIVE, one))
        for number in range(4):
            await cache(server, **body(NATIVE, f"{number}{number} strangers come by " * 3))
        told = await cache(server, **body(NATIVE, one))
        assert told["reason"] == "evicted"
        assert 0 < told["evicted_age_s"] < 10
        assert told["divergence"]["section"] == "prompt"


async def test_switched_off(autojump_clock: Any) -> None:
    """cache_prompt: false reuses nothing; what it computed is there for others."""
    async with serving() as server:
        await cache(server, **body(NATIVE))
        off = await cache(server, **body(NATIVE, cache_prompt=False))
        assert (off["reason"], off["computed"]) == ("caching_off", 12)
        fresh = body(NATIVE, "fresh words", cache_prompt=False)
        await cache(server, **fresh)
        assert (await cache(server, **body(NATIVE, "fresh words")))["computed"] == 1


async def test_several_answers_compute_a_prompt_once(autojump_clock: Any) -> None:
    """n = 3 and equal prompts at once: the blocks they share are computed once."""
    prompt = "some words that all of them begin with, and a few more"
    async with serving() as server:
        answers = (await server.post(NATIVE, body(NATIVE, prompt, n=3))).json
        computed = sorted(each["kvtrio"]["cache"]["computed"] for each in answers)
        assert sum(computed) < len(prompt) + 3 * 4
        for each in answers:
            told = each["kvtrio"]["cache"]
            assert told["computed"] + told["reused_device"] + told["reused_ram"] == 1 + len(prompt)


async def test_another_adapters_state_is_mentioned(autojump_clock: Any) -> None:
    """The longest match under another set explains the miss, with its length."""
    async with serving() as server:
        await server.add_adapter("a")
        await cache(server, **body(NATIVE))
        told = await cache(server, **body(NATIVE, model="a"))
        assert told["reason"] == "adapter_mismatch"
        assert told["other_adapter_match"] == 11
        assert told["divergence"] == {"position": 0, "message_index": None, "section": "prompt"}


# --- where a conversation diverged ---


@pytest.mark.parametrize(
    ("changed", "index", "section"),
    [(0, 0, "system"), (1, 1, "user"), (2, 2, "assistant"), (3, 3, "user")],
)
async def test_the_message_that_changed_is_named(
    autojump_clock: Any, changed: int, index: int, section: str
) -> None:
    """By index and role, whatever the tokens are; the log has the same."""
    contents = ["be kind to all", "why is the sky blue", "it scatters light", "and at dusk"]
    async with serving(sim=SimSettings(max_context=512)) as server:
        await chat(server, *contents)
        contents[changed] = contents[changed][:-1] + "#"
        told = await chat(server, *contents)
        assert told["reason"] in ("diverged", "first_turn")
        assert told["divergence"]["message_index"] == index
        assert told["divergence"]["section"] == section
        assert told["divergence"]["position"] == told["matched"]
        (line,) = [line for line in server.lines if isinstance(line, CacheDivergence)]
        assert (line.position, line.message_index) == (told["matched"], index)
        assert line.section.value == section


async def test_a_divergence_in_the_answer_is_in_the_tail(autojump_clock: Any) -> None:
    """Behind all messages: the continuation of an answer that was begun by the caller."""
    async with serving(sim=SimSettings(max_context=512)) as server:
        messages = [
            {"role": "user", "content": "count with me"},
            {"role": "assistant", "content": "one two three"},
        ]
        await cache(server, CHAT, messages=messages, max_tokens=2)
        messages[1] = {"role": "assistant", "content": "one two four"}
        told = await cache(server, CHAT, messages=messages, max_tokens=2)
        assert told["divergence"]["section"] == "tail"
        assert told["divergence"]["message_index"] is None


async def test_a_conversation_that_grows_has_no_divergence(autojump_clock: Any) -> None:
    """The next turn continues: all that was known is used."""
    async with serving(sim=SimSettings(max_context=512), then=ord("y")) as server:
        await chat(server, "be kind", "hello")
        told = await chat(server, "be kind", "hello", "yyyy", "once more")
        assert (told["reason"], told["turn"]) == ("new_tokens", "continuation")
        assert told["divergence"] is None


# --- tenants ---


async def test_tenants_share_nothing(autojump_clock: Any) -> None:
    """Another key, or another salt, computes all of it, in as many steps as a first time."""
    async with serving(api_keys=("k1", "k2")) as server:

        async def ask(key: str, **more: Any) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            reply = await server.post(NATIVE, body(NATIVE, **more), headers=headers)
            return reply.json["kvtrio"]["cache"]

        first = await ask("k1")
        assert (await ask("k2")) == first
        assert (await ask("k1"))["computed"] == 1
        assert (await ask("k1", cache_salt="s")) == first
        assert (await ask("k2", cache_salt="s")) == first
        assert (await ask("k1", cache_salt="s"))["computed"] == 1


async def test_a_salt_is_no_key(autojump_clock: Any) -> None:
    """Without keys a salt makes a namespace of its own, and an empty one makes none."""
    async with serving() as server:
        await cache(server, **body(NATIVE))
        assert (await cache(server, **body(NATIVE, cache_salt="x")))["reason"] == "first_turn"
        assert (await cache(server, **body(NATIVE, cache_salt="")))["computed"] == 1


# --- text that comes back ---


async def test_generated_ids_are_kept(autojump_clock: Any) -> None:
    """An answer whose text tokenises otherwise: with recall all of it is found again."""
    tokens = (*token_ids("hello", " world"), EOS)
    for recall_bytes, recalled in ((1 << 20, 2), (0, 0)):
        async with serving(tokens, recall_bytes=recall_bytes) as server:
            first = (await server.post(NATIVE, body(NATIVE, "Q: "))).json
            assert first["content"] == "hello world"
            again = await server.post(NATIVE, body(NATIVE, "Q: hello world and?"))
            told = again.json["kvtrio"]["cache"]
            assert told["recalled"] == recalled
            assert told["reused_device"] == (6 if recalled else 4)
            assert server.stack.records.requests[-1].num_recalled_tokens == recalled
            shown = again.json["prompt"]
            assert shown == "<s>Q: hello world and?"


@pytest.mark.parametrize("path", [NATIVE, TEXT, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [(*token_ids("al", "pha be", "ta ga"), EOS), token_ids("al")])
async def test_conversations_are_recalled_in_every_dialect(
    autojump_clock: Any, path: str, stream: bool, tokens: tuple[int, ...]
) -> None:
    """Stopped or cut by its limit, streamed or whole: the next turn recalls the answer."""
    text = "alpha beta ga" if len(tokens) > 1 else "alaaa"
    number = 3 if len(tokens) > 1 else 4
    async with serving(tokens, sim=SimSettings(max_context=512)) as server:
        await server.post(path, body(path, "Q", stream=stream))
        if path == CHAT:
            turns = [("user", "Q"), ("assistant", text), ("user", "more")]
            messages = [{"role": role, "content": content} for role, content in turns]
            told = await cache(server, CHAT, messages=messages, max_tokens=1)
        else:
            told = await cache(server, path, **body(path, f"Q{text} more"))
        assert told["recalled"] == number


async def test_only_ones_own_answers_are_recalled(autojump_clock: Any) -> None:
    """Another tenant's text is encoded as it comes, and so is any after cache_prompt: false."""
    tokens = (*token_ids("hello"), EOS)
    async with serving(tokens) as server:
        await cache(server, **body(NATIVE, "Q", cache_salt="one"))
        follow_up = body(NATIVE, "Qhello?")
        assert (await cache(server, **follow_up))["recalled"] == 0
        assert (await cache(server, **follow_up, cache_salt="one"))["recalled"] == 1
        off = await cache(server, **follow_up, cache_salt="one", cache_prompt=False)
        assert off["recalled"] == 0
        await cache(server, **body(NATIVE, "P", cache_prompt=False))
        assert (await cache(server, **body(NATIVE, "Phello?")))["recalled"] == 0


async def test_prompts_are_never_recalled(autojump_clock: Any) -> None:
    """Token ids that were sent, not generated, do not change how a text is encoded."""
    async with serving() as server:
        await cache(server, prompt=[BOS, word("hello")], n_predict=1)
        answer = (await server.post(NATIVE, body(NATIVE, "hello"))).json
        assert answer["kvtrio"]["cache"]["recalled"] == 0
        assert answer["timings"]["prompt_n"] == 5


async def test_an_answer_that_was_left_is_recalled_as_far_as_it_got(autojump_clock: Any) -> None:
    """Stop in a chat window: the client hangs up, shows what it has, and goes on from there."""
    tokens = token_ids("al", "pha be", "ta ga", "mma!")
    async with serving(tokens) as server:
        await server.post(NATIVE, body(NATIVE, "Q", stream=True, n_predict=100), hang_up_after=3)
        await server.stack.engine.wait_idle()
        await trio.sleep(1)
        told = await cache(server, **body(NATIVE, "Qalpha beta ga."))
        assert told["recalled"] == 3


# --- fields ---


@pytest.mark.parametrize(
    ("fields", "retain", "purpose"),
    [
        ({}, Retain.NORMAL, None),
        ({"purpose": "chat"}, Retain.NORMAL, 0),
        ({"purpose": "title"}, Retain.AUXILIARY, 1),
        ({"purpose": "recap"}, Retain.AUXILIARY, 2),
        ({"purpose": "probe"}, Retain.AUXILIARY, 3),
        ({"purpose": "title", "retain": "normal"}, Retain.NORMAL, 1),
        ({"retain": "auxiliary"}, Retain.AUXILIARY, None),
        ({"retain": "pin", "retain_s": 60}, Retain.PIN, None),
        ({"session": "s", "purpose": None, "retain": None}, Retain.NORMAL, None),
    ],
)
async def test_hints(
    autojump_clock: Any, fields: dict[str, Any], retain: Retain, purpose: int | None
) -> None:
    """How long state is wanted, and for what; a purpose has a default for it."""
    async with serving() as server:
        await cache(server, **body(NATIVE, kvtrio=fields))
        (record,) = server.stack.records.requests
        assert (record.retain, record.purpose) == (retain, purpose)
        again = await cache(server, **body(NATIVE))
        assert (again["computed"] == 1) is (retain is not Retain.AUXILIARY)


async def test_sessions_are_opaque(autojump_clock: Any) -> None:
    """Equal names give equal digests for one tenant, and others for another."""
    async with serving(api_keys=("k1", "k2")) as server:
        for key, name in (("k1", "s"), ("k1", "s"), ("k2", "s"), ("k1", "t")):
            headers = {"authorization": key}
            await server.post(NATIVE, body(NATIVE, kvtrio={"session": name}), headers=headers)
        one, same, other, different = (each.session for each in server.stack.records.requests)
        assert one == same
        assert len({one, other, different}) == 3
        assert len(one or b"") == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"session": "x" * 129},
        {"session": 1},
        {"purpose": "gossip"},
        {"purpose": 0},
        {"retain": "forever"},
        {"retain": "pin"},
        {"retain": "pin", "retain_s": 0},
        {"retain": "pin", "retain_s": 86401},
        {"retain_s": 5},
        {"retain": "normal", "retain_s": 5},
        {"sesion": "x"},
        [],
        "x",
    ],
)
@pytest.mark.parametrize("path", [NATIVE, CHAT])
async def test_fields_of_ours_are_checked(autojump_clock: Any, path: str, fields: Any) -> None:
    """A wrong or unknown member is a 400 that names the field and repeats nothing."""
    async with serving() as server:
        reply = await server.post(path, body(path, kvtrio=fields))
        assert reply.status == 400
        assert reply.error["param"].startswith("kvtrio")
        assert "gossip" not in reply.raw.body.decode()
        assert server.stack.core.next_step == 0


async def test_the_operator_declares_the_purposes(autojump_clock: Any) -> None:
    """Others are refused then; /props tells which there are."""
    async with serving(purposes=("mail", "code")) as server:
        assert (await server.get("/props")).json["kvtrio"]["purposes"] == ["mail", "code"]
        await cache(server, **body(NATIVE, kvtrio={"purpose": "code"}))
        assert server.stack.records.requests[0].purpose == 1
        assert (await server.post(NATIVE, body(NATIVE, kvtrio={"purpose": "chat"}))).status == 400


# --- slots ---


async def test_slots_tell_what_each_place_held_last(autojump_clock: Any) -> None:
    """Counts only; state is found again whoever used the place in between."""
    async with serving(sim=SimSettings(num_places=2)) as server:
        for text in ("one two three", "something else", "one two three"):
            await cache(server, **body(NATIVE, text, id_slot=1))
        first, second = (await server.get("/slots")).json
        assert "kvtrio" not in first
        assert second["n_prompt_tokens_cache"] == 0, "idle, as llama-server shows it"
        assert second["kvtrio"]["last"] == {
            "n_prompt_tokens": 14,
            "n_prompt_tokens_cache": 13,
            "n_decoded": 4,
            "n_past": 17,
        }
