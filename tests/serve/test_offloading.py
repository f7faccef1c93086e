"""What takes long is done beside the event loop, and what is read long, beside the streams."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio
from attrs import evolve

from harness.serving import ByteTokenizer, served_model, serving
from harness.virtual import SimSettings
from kvtrio.engine.offload import InlineOffload
from kvtrio.schedulers.stall_free import StallFree

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
LONG = "many words " * 2800
"""Some 30,000 tokens of a byte each."""
SIM = SimSettings(
    max_context=40_000, max_batch_tokens=4096, block_size=16, policy=StallFree(), num_places=2
)


class Desk:
    """Where offloaded work is done; knows whether somebody is at it."""

    def __init__(self) -> None:
        self.is_taken = False
        self.num_jobs = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        self.is_taken = True
        self.num_jobs += 1
        yield
        self.is_taken = False


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk()

    async def run(
        _: InlineOffload, work: Callable[..., Any], *args: Any, num_bytes: int = 0
    ) -> Any:
        await trio.lowlevel.checkpoint()
        with desk.taken():
            return work(*args)

    monkeypatch.setattr(InlineOffload, "run", run)
    return desk


class DeskTokenizer(ByteTokenizer):
    """Encodes at the desk only."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def encode(self, text: str, **options: bool) -> list[int]:  # type: ignore[override]
        assert self.desk.is_taken, "text was encoded on the event loop"
        return super().encode(text, **options)

    def encode_fragment(self, fragment: Any) -> list[int]:
        assert self.desk.is_taken, "text was encoded on the event loop"
        return super().encode_fragment(fragment)


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, "/tokenize"])
async def test_texts_are_encoded_beside_the_loop(
    autojump_clock: Any, desk: Desk, path: str
) -> None:
    """Bodies of 30,000 tokens, plain and streamed, and again when their beginning is known."""
    model = evolve(served_model(), tokenizer=DeskTokenizer(desk))
    sim = evolve(SIM, cost=lambda batch: 0.001 + 0.00002 * batch.num_tokens)
    async with serving(sim=sim, model=model) as server:
        for stream in (False, True):
            messages = [{"role": "user", "content": LONG}]
            body = {"prompt": LONG, "messages": messages, "content": LONG, "max_tokens": 2}
            answer = await server.post(path, {**body, "stream": stream})
            assert answer.status == 200
        assert desk.num_jobs >= 2
        assert not desk.is_taken


@pytest.mark.slow
async def test_a_long_prompt_keeps_nobody_waiting(autojump_clock: Any) -> None:
    """While 30,000 tokens are read, a stream's tokens come within the bound, over HTTP."""
    sim = evolve(SIM, cost=lambda batch: 0.01 + 0.0005 * batch.num_tokens, max_gap_s=0.1)
    times: list[float] = []
    async with serving(sim=sim) as server, trio.open_nursery() as nursery:

        async def stream() -> None:
            body = {"prompt": "x", "n_predict": 600, "stream": True}
            times.extend((await server.post(NATIVE, body)).raw.chunk_times_s)

        nursery.start_soon(stream)
        await trio.sleep(1.0)
        long = await server.post(NATIVE, {"prompt": LONG, "n_predict": 1})
        assert long.json["tokens_evaluated"] > 30_000
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert max(gaps) <= 0.1
    reading = [step for step in server.stack.records.steps if step.num_prefill_tokens]
    assert all(step.breach is None for step in reading)
