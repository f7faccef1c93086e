"""openai-python, unmodified, against a real server with a real model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
import trio
from openai import AsyncOpenAI, OpenAI

from harness.process import ServerProcess, running_server

F = TypeVar("F", bound=Callable[..., Any])

pytestmark = [pytest.mark.slow, pytest.mark.models]

QUESTION = "What is the capital of France? Answer in one sentence."
IGNORE_UNRAISABLE = "ignore::pytest.PytestUnraisableExceptionWarning"
MESSAGES = [{"role": "user", "content": QUESTION}]


def untidy(test: F) -> F:
    """openai leaves its own generators to the garbage collector, of which trio warns."""
    ignored = ("ignore:Async generator:ResourceWarning", IGNORE_UNRAISABLE)
    for rule in ignored:
        test = pytest.mark.filterwarnings(rule)(test)
    return test


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> OpenAI:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: OpenAI) -> None:
    """A plain answer has text, a reason, and a usage that adds up."""
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, temperature=0, max_tokens=32
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.model == "smollm2"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_stream_says_the_same(client: OpenAI) -> None:
    """Greedy, streamed and not: one text. The usage comes in a chunk of its own."""
    whole = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, temperature=0, max_tokens=24
    )
    with client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert next(c.choices[0].delta.role for c in chunks if c.choices) == "assistant"
    assert len(chunks) > 5
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


@untidy
async def test_several_at_once_under_trio(server: ServerProcess) -> None:
    """AsyncOpenAI runs under trio; four streams at once say what each says alone."""
    questions = [f"Count from {n} to {n + 3}." for n in range(4)]

    async def ask(client: AsyncOpenAI, question: str, stream: bool) -> str:
        asked = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 12,
        }
        if not stream:
            answer = await client.chat.completions.create(**asked)
            return answer.choices[0].message.content
        pieces = await client.chat.completions.create(**asked, stream=True)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

    together: dict[str, str] = {}
    async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:

        async def keep(question: str) -> None:
            together[question] = await ask(client, question, stream=True)

        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for question in questions:
                    nursery.start_soon(keep, question)
            alone = {question: await ask(client, question, stream=False) for question in questions}
    assert all(together.values())
    assert together == alone


@untidy
async def test_leaving_a_stream_ends_the_request(server: ServerProcess) -> None:
    """A client that goes away is aborted: its line in the log says so, long before the limit."""
    before = len(server.events("request.done"))
    async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        with trio.fail_after(60):
            stream = await client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": "Write a very long story."}],
                stream=True,
                max_tokens=4000,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                break
            await stream.close()
            # The next answer is made after the abort was booked.
            await client.completions.create(model="smollm2", prompt="Hi", max_tokens=1)
    new = server.wait_for_events("request.done", before + 2)[before:]
    assert [line["reason"] for line in new] == ["abort", "length"]
    assert new[0]["num_generated_tokens"] < 200


def test_seed_and_sampling(client: OpenAI) -> None:
    """The same seed gives the same text, in one request or another; n answers differ."""
    first, second = (
        client.chat.completions.create(
            model="smollm2", messages=MESSAGES, seed=7, temperature=1.0, max_tokens=16, n=2
        )
        for _ in range(2)
    )
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert texts[0] != texts[1]
    assert [choice.index for choice in first.choices] == [0, 1]


def test_logprobs(client: OpenAI) -> None:
    """Each token comes with the best alternatives, the greedy choice first."""
    answer = client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 4
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.logprob <= 0


def test_stop_string(client: OpenAI) -> None:
    """The answer ends before the stop string."""
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, temperature=0, max_tokens=32, stop=["is Par"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "The capital of France "


def test_completions(client: OpenAI) -> None:
    """The older route continues text."""
    answer = client.completions.create(
        model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert "Paris" in answer.choices[0].text
    assert answer.object == "text_completion"


def test_models(client: OpenAI) -> None:
    """One model under its alias."""
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_refusals(client: OpenAI) -> None:
    """Mistakes become openai's own exceptions, with the field that is wrong."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2", messages=[])
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="smollm2", input="x")


def test_a_prompt_that_does_not_fit(client: OpenAI) -> None:
    """The error tells both sizes and is recognisable as an overflow."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "word " * 9000}]
        )
    body = json.loads(caught.value.response.content)["error"]
    assert body["type"] == "exceed_context_size_error"
    assert body["n_prompt_tokens"] > body["n_ctx"] > 0
    assert "context_length_exceeded" in body["message"]


def test_keys(smollm2: Path) -> None:
    """With keys set, a wrong one is refused, either header works, and /health needs none."""
    with running_server(str(smollm2), "--backend", "sim", "--api-key", "one,two") as server:
        for key, is_right in (("one", True), ("two", True), ("three", False), ("on", False)):
            with OpenAI(base_url=server.url, api_key=key, max_retries=0) as client:
                if is_right:
                    client.models.list()
                    client.completions.create(model="x", prompt="x", max_tokens=1)
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.completions.create(model="x", prompt="x", max_tokens=1)
        with openai.DefaultHttpxClient() as web:
            assert web.get(f"{server.url}/health").status_code == 200
            assert web.get(f"{server.url}/props").status_code == 401
