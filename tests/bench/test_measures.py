"""What ``kvtrio bench`` says of servers whose speed is known, in virtual time."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from harness.scripted_http import playing
from harness.serving import Serving, serving
from harness.virtual import SimSettings
from kvtrio.bench.completion import Ask, complete, tokenise
from kvtrio.bench.errors import BenchError, NotMeasured
from kvtrio.bench.http import Client
from kvtrio.bench.measures import (
    NEW_TOKENS,
    SHORT_PROMPT,
    Sizes,
    decode,
    measures,
    prefill,
    returning,
    streams,
)
from kvtrio.bench.prompts import text
from kvtrio.core.batch import Batch

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
PROMPT_TOKEN_S = 1e-3
STEP_S = 0.01


def step_s(batch: Batch) -> float:
    """A prompt's tokens take a millisecond each; a step that decodes takes ten, whatever it has."""
    num_prompt_tokens = sum(len(c.token_ids) for c in batch.chunks if len(c.token_ids) > 1)
    return PROMPT_TOKEN_S * num_prompt_tokens or STEP_S


@asynccontextmanager
async def server(num_places: int = 4) -> AsyncIterator[tuple[Client, Serving]]:
    sim = SimSettings(num_places=num_places, max_batch_tokens=256, cost=step_s)
    async with serving(sim=sim) as served:

        async def connect() -> trio.abc.Stream:
            return served.http.connect()

        yield Client("sim", connect), served


async def test_prefill_is_the_prompt_over_the_wait(autojump_clock: MockClock) -> None:
    """1,000 prompt tokens a second are reported as that."""
    async with server() as (client, _):
        assert await prefill(100)(client, "x") == pytest.approx(1 / PROMPT_TOKEN_S)


async def test_decode_leaves_the_prompt_out(autojump_clock: MockClock) -> None:
    """100 steps a second are 100 tokens a second, however long the prompt took."""
    async with server() as (client, _):
        for num_prompt_tokens in (10, 150):
            rate = await decode(num_prompt_tokens, 20)(client, "x")
            assert rate == pytest.approx(1 / STEP_S)


async def test_streams_count_together(autojump_clock: MockClock) -> None:
    """Four streams that share each step make four times the tokens; where only two run at once,
    twice, less the prompts in between."""
    async with server() as (client, _):
        assert await streams(4, 20)(client, "x") == pytest.approx(4 / STEP_S)
    async with server(num_places=2) as (client, _):
        work_s = 2 * 19 * STEP_S + 2 * SHORT_PROMPT * PROMPT_TOKEN_S
        assert await streams(4, 20)(client, "x") == pytest.approx(4 * 19 / work_s, rel=0.1)


async def test_a_returning_conversation_waits_for_its_new_part(autojump_clock: MockClock) -> None:
    """What the server remembers costs nothing; the thirty new tokens do."""
    async with server() as (client, served):
        new_ms = 1e3 * NEW_TOKENS * PROMPT_TOKEN_S
        assert await returning(100)(client, "x") == pytest.approx(new_ms, abs=2)
        assert served.stack.records.hits[-1].report.num_device_tokens >= 99


async def test_other_measures_reuse_nothing(autojump_clock: MockClock) -> None:
    """Asked twice, a prompt takes as long as at first."""
    async with server() as (client, _):
        assert await prefill(100)(client, "x") == await prefill(100)(client, "x")


@pytest.mark.slow
async def test_what_a_server_refuses_is_not_measured(autojump_clock: MockClock) -> None:
    """A prompt that does not fit, an answer that does not fit, alone or in one of many streams."""
    async with server() as (client, _):
        with pytest.raises(NotMeasured, match="status 400"):
            await prefill(300)(client, "x")
        with pytest.raises(NotMeasured, match="came instead of 250"):
            await streams(3, 250)(client, "x")


@pytest.mark.parametrize(
    ("events", "error", "says"),
    [
        (
            b'data: {"stop":true,"tokens_predicted":2}\n\n',
            NotMeasured,
            "2 tokens came instead of 3",
        ),
        (
            b'data: {"content":"a","tokens_predicted":3,"stop":false}\n\n',
            NotMeasured,
            "came instead of 3",
        ),
        (b'data: {"error":{"message":"too bad"}}\n\n', NotMeasured, "came instead of 3"),
        (b"data: {\n\n", BenchError, "no JSON"),
        (b"", NotMeasured, "came instead of 3"),
    ],
)
async def test_a_short_answer_makes_no_rate(
    events: bytes, error: type[Exception], says: str
) -> None:
    """An answer that ends early, by whatever fault."""
    with pytest.raises(error, match=says):
        await complete(playing(HEAD + events), Ask(token_ids=[1], num_tokens=3))


async def test_a_stream_that_comes_at_once_has_no_rate(autojump_clock: MockClock) -> None:
    """A server that collects its tokens would look endlessly fast."""
    events = b'data: {}\n\ndata: {"stop":true,"tokens_predicted":3}\n\n'
    timing = await complete(playing(HEAD + events), Ask(token_ids=[1], num_tokens=3))
    with pytest.raises(NotMeasured, match="at once"):
        timing.rate.is_integer()


async def test_a_server_without_tokenize_is_named() -> None:
    """Something else than a llama-server may answer everything with 200."""
    with pytest.raises(BenchError, match="has no /tokenize"):
        await tokenise(playing(HEAD + b'{"ok":true}'), "x")


def test_texts_are_the_same_every_time_and_never_alike() -> None:
    """Equal labels give equal texts; others differ from the first word on. There are enough words
    for as many tokens as are asked for."""
    assert text("a 1", 50) == text("a 1", 50)
    texts = [text(f"decode {number}", 50) for number in range(20)]
    assert len({each.partition(" ")[2][:12] for each in texts}) == 20
    assert min(len(each.split()) for each in texts) >= 50


def test_the_table_has_what_was_promised() -> None:
    """The full set of measures, by name."""
    names = [measure.name for measure in measures(Sizes())]
    assert names == [
        "prefill 128",
        "prefill 512",
        "prefill 2,048",
        "prefill 6,000",
        "decode",
        "decode at 4,096",
        "4 streams",
        "8 streams",
        "16 streams",
        "first token after 3,000 + 30",
    ]
