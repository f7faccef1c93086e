"""Conversations on all kinds of model: what a turn computes, and that it changes nothing.

The whole stack in virtual time, on real tokenizers, templates and arithmetic.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import define, evolve, field

from harness.hybrids import (
    Cold,
    TellingCore,
    Told,
    assert_same,
    cold,
    served_file,
    torch_settings,
)
from harness.serving import Serving, serving
from kvtrio.store.sessions import SessionStore

MODELS = ["qwen3", "gemma3", "qwen35", "lfm2", "mamba2", "granitehybrid"]
"""Full attention, sliding windows, and recurrent layers with and without attention."""
FEW = 64
"""Tokens that may be computed again."""
TEXT = "the cat sat on a mat while rain fell over old towns and nobody knew why birds sang"
SHORT, LONG = 8, 90

pytestmark = pytest.mark.slow
ON_ALL = pytest.mark.parametrize("name", MODELS)
ON_RECURRENT = pytest.mark.parametrize("name", MODELS[2:])
ON_EACH_KIND = pytest.mark.parametrize("name", MODELS[:3])


@define(eq=False)
class Stack:
    """A server with one model, and one beside it that never reuses anything."""

    server: Serving
    cold: Cold
    rng: Random = field(factory=lambda: Random(3))
    seen: list[tuple[int, ...]] = field(factory=list)
    """All that was computed so far."""
    table: list[tuple[str, int, int, int]] = field(factory=list)
    """What was asked, length, new tokens, computed."""

    def words(self, number: int) -> str:
        return " ".join(self.rng.choice(TEXT.split()) for _ in range(number))

    async def chat(self, what: str, messages: list[Any], few: int = FEW) -> str:
        """Ask, check the answer and what it cost; returns the answer's text."""
        body = {"messages": messages, "max_tokens": 16, "temperature": 0, "logprobs": True}
        reply = await self.server.post("/v1/chat/completions", body)
        assert reply.status == 200, reply.json
        self.check(what, few)
        return str(reply.json["choices"][0]["message"]["content"])

    async def raw(self, what: str, ids: tuple[int, ...], few: int = FEW) -> Told:
        body = {"prompt": list(ids), "n_predict": 8, "temperature": 0, "n_probs": 1}
        reply = await self.server.post("/completion", {**body, "ignore_eos": True})
        assert reply.status == 200, reply.json
        return self.check(what, few)

    async def slot(self, action: str, name: str) -> dict[str, Any]:
        reply = await self.server.post(f"/slots/0?action={action}", {"filename": name})
        assert reply.status == 200, reply.json
        answer: dict[str, Any] = reply.json
        return answer

    async def warm(self, what: str, messages: list[Any]) -> None:
        """The head of what is to come, in idle time."""
        reply = await self.server.post("/v1/cache/warm", {"messages": messages})
        assert reply.json["is_complete"], reply.json
        told = self.account(what)
        assert told.num_computed == reply.json["computed_tokens"]
        self.seen[-1] = told.submit.token_ids  # nothing was written

    def check(self, what: str, few: int) -> Told:
        told = self.account(what, few)
        assert_same(told.sampled, self.cold.answer(told.submit))
        return told

    def account(self, what: str, few: int = FEW) -> Told:
        core = self.server.stack.core
        assert isinstance(core, TellingCore)
        told = core.last
        ids = told.submit.token_ids
        num_new = len(ids) - max((num_shared(ids, each) for each in self.seen), default=0)
        self.seen.append(told.sequence)
        self.table.append((what, len(ids), num_new, told.num_computed))
        assert told.num_computed <= num_new + few, self.table
        return told


def num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@asynccontextmanager
async def started(
    name: str, shared: Path, template: str | None = None, sessions: Path | None = None
) -> AsyncIterator[Stack]:
    """``template``: in place of the model's own. ``sessions``: where they are saved."""
    path = shared / "tiny" / "models" / f"{name}.gguf"
    sim, model = torch_settings(path), served_file(path, template)
    async with serving(sim=sim, model=model, session_dir=sessions) as server:
        stack = Stack(server, cold(path))
        yield stack
    for row in stack.table:
        print(f"{name:14} {row[0]:32} prompt {row[1]:5} new {row[2]:4} computed {row[3]:4}")


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@ON_RECURRENT
async def test_two_conversations_take_turns_in_one_place(
    autojump_clock: Any, name: str, shared: Path
) -> None:
    """Ten turns each: each computes its new tokens and a few."""
    async with started(name, shared) as stack:
        chats = [[said("system", stack.words(40))] for _ in range(2)]
        for turn in range(10):
            for number, chat in enumerate(chats):
                chat.append(said("user", stack.words(SHORT)))
                chat.append(said("assistant", await stack.chat(f"chat {number} turn {turn}", chat)))


@ON_ALL
async def test_the_same_again_and_variations_of_it(
    autojump_clock: Any, name: str, shared: Path
) -> None:
    """Next turn, identical request, changed tail, branch; raw prompts, without messages."""
    async with started(name, shared) as stack:
        tokenizer = stack.server.services.model.tokenizer
        text = stack.words(900)
        prompt = tuple(tokenizer.encode(text, add_special=True, parse_special=True))
        more = tuple(tokenizer.encode(" What then?", add_special=False, parse_special=False))
        chat = (await stack.raw("first", prompt)).sequence
        await stack.raw("next turn", chat + more)
        await stack.raw("again", prompt)
        await stack.raw("changed tail", chat[:-4] + more)
        half = prompt[: len(prompt) // 2]
        await stack.raw("branch", half + more, few=512)
        await stack.raw("branch again", half + more[::-1])


@ON_ALL
async def test_long_chats_that_are_changed(autojump_clock: Any, name: str, shared: Path) -> None:
    """Nine turns, then regenerate, edits and a switch between branches: what is new
    and a few tokens."""
    async with started(name, shared) as stack:
        chat = [said("system", stack.words(60))]
        for turn in range(9):
            chat.append(said("user", stack.words(LONG if turn % 3 == 1 else SHORT)))
            chat.append(said("assistant", await stack.chat(f"turn {turn}", chat)))
        await stack.chat("regenerate", chat[:-1])
        await stack.chat("edit of the last", [*chat[:-2], said("user", stack.words(SHORT))])
        early = [*chat[:7], said("user", stack.words(SHORT)), *chat[8:12]]
        await stack.chat("edit of an early one", early[:8])
        branch = [*chat[:7], said("user", stack.words(LONG))]
        branch.append(said("assistant", await stack.chat("another branch", branch)))
        for turn in range(2):
            chat.append(said("user", stack.words(SHORT)))
            chat.append(said("assistant", await stack.chat(f"switch back {turn}", chat)))
            branch.append(said("user", stack.words(SHORT)))
            branch.append(said("assistant", await stack.chat(f"switch {turn}", branch)))
        await stack.chat("all edited early, from history", [*early, said("user", "why")])


@ON_ALL
async def test_a_whole_history_at_once(autojump_clock: Any, name: str, shared: Path) -> None:
    """A conversation that comes with nine turns: changes start at ends of messages."""
    async with started(name, shared) as stack:
        chat = [said("system", stack.words(60))]
        for turn in range(9):
            chat.append(said("user", stack.words(LONG if turn % 3 == 1 else SHORT)))
            chat.append(said("assistant", stack.words(40)))
        chat.append(said("user", stack.words(SHORT)))
        await stack.chat("first", chat)
        await stack.chat("regenerate", chat)
        await stack.chat("edit of the last", [*chat[:-1], said("user", stack.words(SHORT))])
        for index in (15, 9, 3):
            edited = [*chat[:index], said("user", stack.words(SHORT))]
            await stack.chat(f"edit of message {index}", edited)


# What Qwen 3's template does when thinking is off: an answer begins behind an empty block of
# thoughts, which is not there any more when the answer has become history.
THOUGHTLESS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{{- m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content }}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"""


@ON_EACH_KIND
async def test_thoughts_that_vanish_from_history(
    autojump_clock: Any, name: str, shared: Path
) -> None:
    """Each turn computes the last answer and what follows: all behind the first real difference."""
    async with started(name, shared, THOUGHTLESS) as stack:
        chat = [said("system", stack.words(60))]
        for turn in range(4):
            chat.append(said("user", stack.words(LONG if turn % 2 else SHORT)))
            answer = await stack.chat(f"turn {turn} without thoughts", chat)
            # Some clients send the thoughts back, and the template drops them.
            thoughts = "<think>\n\n</think>\n\n" if turn % 2 else ""
            chat.append(said("assistant", thoughts + answer))
            if turn:
                _, length, num_new, _ = stack.table[-1]
                assert num_new < length - 60


@ON_EACH_KIND
async def test_a_history_that_is_replaced_by_a_summary(
    autojump_clock: Any, name: str, shared: Path
) -> None:
    """The rewritten head restarts from the last common checkpoint, the old branch stays; and what
    is warm when the next turn comes is not computed for it."""
    async with started(name, shared) as stack:
        chat = [said("system", stack.words(100))]
        for turn in range(6):
            chat.append(said("user", stack.words(LONG if turn % 3 == 1 else SHORT)))
            chat.append(said("assistant", await stack.chat(f"turn {turn}", chat)))
        summary = said("user", f"what was said so far: {stack.words(120)}")
        short = [chat[0], summary, *chat[-2:]]
        await stack.warm("warm", short)
        short.append(said("user", stack.words(SHORT)))
        await stack.chat("turn behind the summary", short, few=0)
        chat.append(said("user", stack.words(SHORT)))
        await stack.chat("turn of the old branch", chat)


@pytest.mark.parametrize("name", MODELS[1:5])
async def test_a_saved_conversation_goes_on_in_another_server(
    autojump_clock: Any, name: str, shared: Path, tmp_path: Path
) -> None:
    """Next turn, identical request, changed tail and branch compute what they would have without
    the restart; without its checkpoints a session gives what it can, and the answer is right."""
    async with started(name, shared, sessions=tmp_path) as stack:
        tokenizer = stack.server.services.model.tokenizer
        prompt = tuple(tokenizer.encode(stack.words(500), add_special=True, parse_special=True))
        more = tuple(tokenizer.encode(" What then?", add_special=False, parse_special=False))
        chat = (await stack.raw("first", prompt)).sequence
        saved = await stack.slot("save", "chat")
        without_checkpoints(tmp_path, "chat", "bare")
    async with started(name, shared, sessions=tmp_path) as stack:
        restored = await stack.slot("restore", "chat")
        assert restored["n_restored"] == saved["n_saved"] == len(chat) - 1
        stack.seen.append(chat)
        await stack.raw("next turn", chat + more)
        await stack.raw("again", prompt)
        await stack.raw("changed tail", chat[:-4] + more)
        await stack.raw("branch", prompt[: len(prompt) // 2] + more, few=512)
    async with started(name, shared, sessions=tmp_path) as stack:
        bare = await stack.slot("restore", "bare")
        stack.seen.append(chat)
        has_states = stack.server.services.model.spec.has_states
        assert bare["n_restored"] == (0 if has_states else saved["n_saved"])
        few = len(chat) if has_states else FEW
        await stack.raw("next turn, no checkpoints", chat + more, few)
        await stack.raw("once more", chat + more)


def without_checkpoints(folder: Path, name: str, target: str) -> None:
    """The session again, without its states."""
    with closing(SessionStore.open(folder)) as store:
        identity = store.info(name, b"").identity
        with store.reading(name, b"") as reader:
            head = evolve(reader.head, state_positions=())
            blocks = list(map(reader.block, range(head.num_blocks(identity.block_size))))
        with store.saving(target, head, identity, b"") as writer:
            for parts in blocks:
                writer.add_block(parts)
            writer.commit()
