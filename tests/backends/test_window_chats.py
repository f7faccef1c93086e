"""Conversations on a model with sliding windows: what a turn computes, that it changes nothing, and
how little memory it takes."""

from pathlib import Path
from random import Random

import pytest
from attrs import define, field

from harness.core_fakes import NumberMatcher
from harness.cpu_models import load_cpu
from harness.torch_models import load
from kvtrio.core import invariants
from kvtrio.core.config import CoreConfig
from kvtrio.core.events import Finished, Submit, TokenOut
from kvtrio.core.identity import KeyMaker
from kvtrio.core.machine import Core
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import RequestId
from kvtrio.schedulers.fcfs import FCFS

WINDOW, BLOCK, CONTEXT, STEP = 64, 16, 2048, 128
SIZES = {
    "block_size": BLOCK,
    "num_blocks": CONTEXT // BLOCK + 1,
    "max_context": CONTEXT,
    "max_rows": STEP,
    "max_sampled": 1,
    "num_threads": 1,
}
AMPLE, SCARCE = 900, 90
"""Blocks in RAM; every third has its part."""
FEW = 64
VOCAB = 200
SHORT, LONG, ANSWER = 12, 110, 12


@define(eq=False)
class Chats:
    """A core on a backend, and one beside it that never reuses anything."""

    backend: object
    other: object
    core: Core = field(init=False)
    cold: Core = field(init=False)
    rng: Random = field(factory=lambda: Random(5))
    number: int = 0
    seen: list[tuple[int, ...]] = field(factory=list)
    table: list[tuple[str, int, int, int]] = field(factory=list)
    """What was asked, length, new tokens, computed."""

    def __attrs_post_init__(self) -> None:
        self.core, self.cold = self._core(self.backend), self._core(self.other)

    def _core(self, backend):
        config = CoreConfig(
            groups=backend.info.groups,
            block_size=BLOCK,
            num_places=1,
            max_context=CONTEXT,
            max_waiting=1,
            max_batch_tokens=STEP,
            num_host_blocks=backend.info.num_host_blocks,
            num_host_window_blocks=backend.info.num_host_window_blocks,
            is_unified=backend.info.is_unified,
        )
        assert config.num_window_blocks == backend.info.num_window_blocks == 20
        return Core(config, FCFS(), KeyMaker(b"secret of the tests", b"root"))

    def words(self, count):
        return tuple(self.rng.randrange(VOCAB) for _ in range(count))

    def ask(self, what, messages, few=FEW):
        """The answer to a chat, which starts with its system prompt; each message is its tokens."""
        prompt = tuple(token for message in messages for token in message)
        ends, at = [], 0
        for message in messages:
            at += len(message)
            ends.append(at)
        warm, finished = self._run(self.core, self.backend, prompt, ends, True)
        expected, _ = self._run(self.cold, self.other, prompt, [], False)
        assert [s.token_id for s in warm] == [s.token_id for s in expected]
        assert max(abs(a.logprob - b.logprob) for a, b in zip(warm, expected, strict=True)) < 1e-4
        num_new = len(prompt) - max((shared(prompt, each) for each in self.seen), default=0)
        self.table.append((what, len(prompt), num_new, finished.num_computed_tokens))
        assert finished.num_computed_tokens <= num_new + few, self.table
        answer = tuple(s.token_id for s in warm)
        self.seen.append((*prompt, *answer[:-1]))
        return answer

    def _run(self, core, backend, prompt, ends, reuse):
        self.number += 1
        submit = Submit(
            request_id=RequestId(self.number),
            token_ids=prompt,
            max_new_tokens=ANSWER,
            sampling=SamplingParams(temperature=0.0, num_logprobs=0),
            matcher=NumberMatcher(),
            reuse=reuse,
            checkpoints=tuple(ends),
        )
        assert core.handle(submit, float(self.number)) == []
        tokens = []
        while core.has_work:
            batch = core.schedule(float(self.number))
            for output in core.update(batch, backend.step(batch), float(self.number)):
                if isinstance(output, TokenOut):
                    tokens.append(output.sampled)
                elif isinstance(output, Finished):
                    finished = output
            invariants.check(core)
        return tokens, finished

    def show(self):
        for what, length, num_new, computed in self.table:
            print(f"{what:28} prompt {length:5} new {num_new:4} computed {computed:4}")


def shared(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def load_torch(path, **sizes):
    return load(path, dtype="f32", **sizes)


def load_exact_cpu(path, **sizes):
    return load_cpu(path, key_type="f32", value_type="f32", **sizes)


@pytest.fixture(params=[load_torch, load_exact_cpu], ids=["torch", "cpu"])
def make(request, shared: Path):
    """Chats on the small Gemma 3, with so many blocks in RAM."""

    def made(num_blocks, is_unified=True):
        path, backends = shared / "tiny" / "models" / "gemma3.gguf", []
        bare = request.param(path, **SIZES)
        full, window = (
            sum(g.bytes_per_token for g in bare.info.groups if (g.window is None) == is_full)
            for is_full in (True, False)
        )
        host_bytes = num_blocks // 3 * (3 * full + window) * BLOCK
        for count in (host_bytes, 0):
            sizes = {**SIZES, "host_bytes": count, "is_unified": is_unified}
            backends.append(request.param(path, **sizes))
        assert backends[0].info.num_host_blocks == num_blocks
        return Chats(*backends)

    return made


@pytest.mark.slow
def test_changed_chats_compute_what_is_new(make):
    """Nine turns, regenerate, edits and a switch between branches, with room for all."""
    chats = make(AMPLE)
    chat = [chats.words(60)]
    for turn in range(9):
        chat.append(chats.words(LONG if turn % 3 == 1 else SHORT))
        chat.append(chats.ask(f"turn {turn}", chat))
    chats.ask("regenerate", chat[:-1])
    chats.ask("edit of the last", [*chat[:-2], chats.words(SHORT)])
    chats.ask("edit of an early one", [*chat[:7], chats.words(SHORT)])
    branch = [*chat[:7], chats.words(LONG)]
    branch.append(chats.ask("another branch", branch))
    for turn in range(2):
        for name, each in (("back", chat), ("to the branch", branch)):
            each.append(chats.words(SHORT))
            each.append(chats.ask(f"switch {name} {turn}", each))
    chats.show()


@pytest.mark.slow
@pytest.mark.parametrize("is_unified", [True, False])
def test_conversations_go_on_in_little_memory(make, is_unified):
    """Three take turns, with room for the last windows and little more: turns compute what is new;
    who edits an early message may pay for what has gone, and nothing is ever answered otherwise."""
    chats = make(SCARCE, is_unified)
    all_chats = [[chats.words(150)] for _ in range(3)]
    for turn in range(4):
        for number, chat in enumerate(all_chats):
            chat.append(chats.words(LONG // 2 if turn % 2 else SHORT))
            chat.append(chats.ask(f"chat {number} turn {turn}", chat))
    for chat in all_chats[1:]:
        chats.ask("regenerate", chat[:-1])
        chats.ask("edit of the last", [*chat[:-2], chats.words(SHORT)])
    for chat in all_chats[:2]:
        chats.ask("edit of an early one", [*chat[:3], chats.words(SHORT)], few=CONTEXT)
        chats.ask("back", [*chat, chats.words(SHORT)], few=CONTEXT)
    chats.show()
    parts = chats.core.cache.parts
    assert sum(parts.num_used.values()) <= sum(parts.limits.values()) == 20 + (SCARCE) // 3
