"""openai-python against the routes on a real socket: the shapes that need no real model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from harness.real_http import running
from harness.serving import Serving, serving, token_ids
from harness.virtual import SimSettings

pytestmark = [
    pytest.mark.slow,
    # The client leaves its generators to the garbage collector, at which trio warns.
    pytest.mark.filterwarnings(
        "ignore:Async generator 'openai:ResourceWarning",
        "ignore:Exception ignored in. <async_generator:pytest.PytestUnraisableExceptionWarning",
    ),
]
HI: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(
    *tokens: str, **settings: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Serving]]:
    async with serving(token_ids(*tokens), **settings) as server, running(server.app) as http:
        url = f"http://127.0.0.1:{http.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            yield client, server


async def test_text_logprobs_fit_the_clients_type(ticking_clock: Any) -> None:
    """The lists of OpenAI's text completions; llama-server's ``content`` survives beside them."""
    async with client_of("hello", " world") as (client, _):
        answer = await client.completions.create(model="any", prompt="x", max_tokens=2, logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["hello", " world"]
        assert logprobs.text_offset == [0, 5]
        assert logprobs.model_extra is not None
        assert len(logprobs.model_extra["content"]) == 2


async def test_chat_logprobs_and_choices_fit(ticking_clock: Any) -> None:
    """Several answers with log-probabilities, streamed."""
    async with client_of("hello") as (client, _):
        stream = await client.chat.completions.create(
            model="any",
            messages=HI,
            max_tokens=2,
            n=2,
            logprobs=True,
            top_logprobs=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        entries = [
            entry
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content or []
        ]
        assert sorted(entry.token for entry in entries) == ["a", "a", "hello", "hello"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 4


async def test_a_model_can_be_retrieved(ticking_clock: Any) -> None:
    """By the name that the list gives it; another name is the client's NotFoundError."""
    async with client_of() as (client, _server):
        listed = [model async for model in client.models.list()]
        assert await client.models.retrieve(listed[0].id) == listed[0]
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("another/model")


async def test_errors_become_the_clients_classes(ticking_clock: Any) -> None:
    """Too long, unknown path, not supported, draining: class, code, type and parameter."""
    async with client_of() as (client, server):
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.completions.create(model="any", prompt=[97] * 300)
        assert too_long.value.type == "exceed_context_size_error"
        assert too_long.value.param == "prompt"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="any", messages=HI, response_format={"type": "json_object"}
            )
        assert refused.value.param == "response_format"
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="any", input="x")
        server.stack.engine.drain()
        with pytest.raises(openai.InternalServerError) as draining:
            await client.chat.completions.create(model="any", messages=HI)
        assert draining.value.status_code == 503


async def test_a_full_queue_is_the_clients_rate_limit(ticking_clock: Any) -> None:
    """429 becomes RateLimitError, with the time to wait."""
    sim = SimSettings(num_places=1, max_waiting=1)
    async with client_of(sim=sim) as (client, _):
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model="any", prompt=["x"] * 3)
        assert limited.value.response.headers["retry-after"] == "1"


async def test_an_error_in_mid_stream_is_raised(ticking_clock: Any) -> None:
    """The error event reaches the caller as an exception."""
    async with client_of() as (client, server):
        stream = await client.chat.completions.create(
            model="any", messages=HI, max_tokens=100, stream=True
        )
        server.stack.engine._hub.stop()
        with pytest.raises(openai.APIError, match="stopped before"):
            [chunk async for chunk in stream]
