"""POST /v1/chat/completions and /v1/completions: OpenAI's shapes with llama-server's additions."""

from typing import Any

import pytest

from harness.serving import EOS, NOW, serving, token_ids
from harness.virtual import SimSettings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_PROMPT_TOKENS = 53
BODIES = {CHAT: HI, "/chat/completions": HI, TEXT: {"prompt": "hi"}}
ENVELOPE = {"id", "object", "created", "model", "system_fingerprint"}


def body(path: str, **more: Any) -> dict[str, Any]:
    return {**BODIES[path], "max_tokens": 4, **more}


def text_of(events: list[Any], index: int = 0) -> str:
    """The text of one choice, joined from a stream of either dialect."""
    parts = [c for event in events for c in event.get("choices", ()) if c["index"] == index]
    return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in parts)


def reasons(events: list[Any]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["finish_reason"] is not None:
                found.setdefault(choice["index"], []).append(choice["finish_reason"])
    return found


@pytest.mark.parametrize("path", [CHAT, "/chat/completions"])
async def test_a_plain_chat_answer(autojump_clock: Any, path: str) -> None:
    """Members, ids, usage and timings."""
    async with serving() as server:
        answer = (await server.post(path, body(path))).json
        assert set(answer) == ENVELOPE | {"choices", "usage", "timings", "kvtrio"}
        assert answer["choices"] == [
            {
                "finish_reason": "length",
                "index": 0,
                "message": {"role": "assistant", "content": "aaaa"},
            }
        ]
        assert answer["id"].startswith("chatcmpl-")
        assert len(answer["id"]) == len("chatcmpl-") + 32
        assert answer["object"] == "chat.completion"
        assert answer["created"] == int(NOW)
        assert answer["model"] == "sim-model"
        assert answer["system_fingerprint"].startswith("b")
        assert answer["usage"] == {
            "completion_tokens": 4,
            "prompt_tokens": CHAT_PROMPT_TOKENS,
            "total_tokens": CHAT_PROMPT_TOKENS + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        timings = answer["timings"]
        assert timings["cache_n"] + timings["prompt_n"] == CHAT_PROMPT_TOKENS


async def test_a_plain_text_answer(autojump_clock: Any) -> None:
    """Members of a text completion."""
    async with serving() as server:
        answer = (await server.post(TEXT, body(TEXT))).json
        assert set(answer) == ENVELOPE | {"choices", "usage", "timings", "kvtrio"}
        assert answer["object"] == "text_completion"
        assert answer["choices"] == [
            {"text": "aaaa", "index": 0, "logprobs": None, "finish_reason": "length"}
        ]


async def test_the_role_comes_with_the_first_token(autojump_clock: Any) -> None:
    """The first chunk with choices is when the first token is there: clients take its time."""
    long = {"messages": [{"role": "user", "content": "x" * 90}]}
    async with serving() as server:
        stream = await server.post(CHAT, {**long, "max_tokens": 2, "stream": True})
        first, second, *_ = stream.events
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
        assert second["choices"][0]["delta"] == {"content": "a"}
        assert stream.raw.chunk_times_s[0] == pytest.approx(4 * 11.9e-3 + 8.3e-3, abs=2e-3)
        assert b"role" in stream.raw.chunks[0]
        assert b'"content":"a"' in stream.raw.chunks[0]


async def test_the_end_of_a_chat_stream(autojump_clock: Any) -> None:
    """Finish chunk with an empty delta and the timings, then [DONE]; no usage unless asked."""
    async with serving() as server:
        stream = await server.post(CHAT, body(CHAT, stream=True))
        last = stream.events[-1]
        assert last["choices"] == [{"finish_reason": "length", "index": 0, "delta": {}}]
        assert last["timings"]["predicted_n"] == 4
        assert stream.frames[-1] == b"data: [DONE]"
        assert not any("usage" in event for event in stream.events)
        assert len({event["id"] for event in stream.events}) == 1


async def test_the_end_of_a_text_stream(autojump_clock: Any) -> None:
    """Without include_usage the last chunk carries usage and timings, as llama-server's does."""
    async with serving() as server:
        stream = await server.post(TEXT, body(TEXT, stream=True))
        last = stream.events[-1]
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["usage"]["completion_tokens"] == last["timings"]["predicted_n"] == 4
        assert stream.frames[-1] == b"data: [DONE]"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_comes_once_and_last(autojump_clock: Any, path: str) -> None:
    """include_usage: one more chunk without choices, usage null before it, equal to plain's."""
    async with serving() as server:
        plain = (await server.post(path, body(path))).json
        options = {"include_usage": True}
        wanted = body(path, stream=True, stream_options=options, cache_prompt=False)
        *others, last = (await server.post(path, wanted)).events
        assert last["choices"] == []
        assert last["usage"] == plain["usage"]
        assert last["timings"].keys() == plain["timings"].keys()
        assert all(event["usage"] is None for event in others)
        assert not any("timings" in event for event in others)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("tokens", "stop", "text", "reason"),
    [
        ((*token_ids("hello"), EOS), None, "hello", "stop"),
        (token_ids("al", "pha be", "ta ga", "mma!"), ["beta gamma"], "alpha ", "stop"),
        (
            token_ids("al", "pha be", "ta ga", "mma!"),
            ["zzz", "gamma?"],
            "alpha beta gamma!",
            "length",
        ),
    ],
)
async def test_stream_and_plain_agree(
    autojump_clock: Any, path: str, tokens: tuple[int, ...], stop: Any, text: str, reason: str
) -> None:
    """The same text and reason in both forms; a stop string never leaks, a tail is never lost."""
    async with serving(tokens) as server:
        plain = (await server.post(path, body(path, stop=stop))).json["choices"][0]
        events = (await server.post(path, body(path, stop=stop, stream=True))).events
        assert (plain["text"] if path == TEXT else plain["message"]["content"]) == text
        assert text_of(events) == text
        assert plain["finish_reason"] == reason
        assert reasons(events) == {0: [reason]}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_nothing_is_generated_for_zero_tokens(autojump_clock: Any, path: str) -> None:
    """max_tokens 0 reads the prompt: empty text, length, no completion tokens."""
    async with serving() as server:
        plain = (await server.post(path, {**body(path), "max_tokens": 0})).json
        assert plain["usage"]["completion_tokens"] == 0
        assert plain["choices"][0]["finish_reason"] == "length"
        events = (await server.post(path, {**body(path, stream=True), "max_tokens": 0})).events
        assert text_of(events) == ""
        assert reasons(events) == {0: ["length"]}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_several_answers(autojump_clock: Any, path: str) -> None:
    """n choices with their indexes; the prompt counts once, all tokens count."""
    async with serving() as server:
        answer = (await server.post(path, body(path, n=3, cache_prompt=False))).json
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        prompt = CHAT_PROMPT_TOKENS if path == CHAT else 3
        assert answer["usage"]["prompt_tokens"] == prompt
        assert answer["usage"]["completion_tokens"] == 12
        options = {"include_usage": True}
        wanted = body(path, n=3, stream=True, stream_options=options, cache_prompt=False)
        events = (await server.post(path, wanted)).events
        assert reasons(events) == {index: ["length"] for index in range(3)}
        assert [text_of(events, index) for index in range(3)] == ["aaaa"] * 3
        assert events[-1]["usage"] == answer["usage"]


async def test_several_streams_end_with_one_account(autojump_clock: Any) -> None:
    """Without include_usage, timings are on the last chunk of all and nowhere else."""
    async with serving() as server:
        events = (await server.post(CHAT, body(CHAT, n=2, stream=True))).events
        assert ["timings" in event for event in events].count(True) == 1
        assert "timings" in events[-1]


async def test_a_batch_counts_every_prompt(autojump_clock: Any) -> None:
    """Two prompts with two answers each: prompts once each, choices numbered through."""
    async with serving() as server:
        wanted = {"prompt": ["hi", "hello"], "max_tokens": 2, "n": 2}
        answer = (await server.post(TEXT, wanted)).json
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["prompt_tokens"] == 3 + 6
        assert answer["usage"]["completion_tokens"] == 8


async def test_answers_to_one_prompt_differ(autojump_clock: Any) -> None:
    """Each answer has its own seed, one apart, so that a chosen seed repeats all of them."""
    sim = SimSettings(token_function=lambda moment: 97 + moment.row.params.seed % 26)
    async with serving(sim=sim) as server:
        answers = [(await server.post(TEXT, body(TEXT, n=3, seed=4))).json for _ in range(2)]
        texts = [[choice["text"] for choice in each["choices"]] for each in answers]
        assert texts == [["eeee", "ffff", "gggg"]] * 2
        batch = (await server.post(TEXT, {**body(TEXT, n=2, seed=4), "prompt": ["a", "b"]})).json
        assert [choice["text"][0] for choice in batch["choices"]] == ["e", "f", "e", "f"]


@pytest.mark.parametrize("seed", [None, -1, 2**32 - 1])
async def test_unseeded_requests_get_fresh_seeds(autojump_clock: Any, seed: int | None) -> None:
    """Null, -1 and llama-server's constant ask for a random one."""
    sim = SimSettings(token_function=lambda moment: 97 + moment.row.params.seed % 26)
    async with serving(sim=sim) as server:
        texts = [
            (await server.post(TEXT, body(TEXT, seed=seed))).json["choices"][0]["text"]
            for _ in range(2)
        ]
        assert texts[0] != texts[1]


@pytest.mark.parametrize(("top", "expected"), [(0, 0), (3, 3), (None, 20)])
async def test_chat_logprobs(autojump_clock: Any, top: int | None, expected: int) -> None:
    """OpenAI's chat shape in both forms, one entry per token."""
    wanted = body(CHAT, logprobs=True, top_logprobs=top)
    async with serving(token_ids("hello", " world")) as server:
        plain = (await server.post(CHAT, wanted)).json["choices"][0]["logprobs"]["content"]
        events = (await server.post(CHAT, {**wanted, "stream": True})).events
        streamed = [
            entry
            for event in events
            for choice in event["choices"]
            for entry in choice.get("logprobs", {"content": []})["content"]
        ]
        assert streamed == plain
        assert "".join(entry["token"] for entry in plain) == "hello worldaa"
        assert all(len(entry["top_logprobs"]) == expected for entry in plain)
        assert all(entry["logprob"] <= 0 for entry in plain)


async def test_text_logprobs_have_both_shapes(autojump_clock: Any) -> None:
    """OpenAI's lists for this route, and llama-server's content; offsets go on over a stream."""
    wanted = body(TEXT, logprobs=2)
    async with serving(token_ids("hello", " world")) as server:
        plain = (await server.post(TEXT, wanted)).json["choices"][0]["logprobs"]
        assert plain["tokens"] == ["hello", " world", "a", "a"]
        assert plain["text_offset"] == [0, 5, 11, 12]
        assert len(plain["token_logprobs"]) == len(plain["content"]) == 4
        assert [len(best) for best in plain["top_logprobs"]] == [2] * 4
        events = (await server.post(TEXT, {**wanted, "stream": True})).events
        parts = [event["choices"][0]["logprobs"] for event in events[:-1]]
        for name in plain:
            assert [each for part in parts for each in part[name]] == plain[name]


async def test_progress_and_timings_in_chat_chunks(autojump_clock: Any) -> None:
    """return_progress and timings_per_token, as llama.cpp's interface asks for them."""
    wanted = body(CHAT, stream=True, return_progress=True, timings_per_token=True)
    async with serving() as server:
        events = (await server.post(CHAT, wanted)).events
        reports = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert [each["processed"] for each in reports] == [0, 32, CHAT_PROMPT_TOKENS]
        deltas = [event for event in events if event["choices"][0]["delta"].get("content")]
        assert [event["timings"]["predicted_n"] for event in deltas] == [1, 2, 3, 4]
        assert "timings" not in events[0]


async def test_continuing_an_answer(autojump_clock: Any) -> None:
    """An assistant message at the end is continued; only new text comes back."""
    messages = [*HI["messages"], {"role": "assistant", "content": "The answer is"}]
    async with serving() as server:
        rendered = (await server.post("/apply-template", {"messages": messages})).json["prompt"]
        assert rendered.endswith("<|im_start|>assistant\nThe answer is")
        answer = await server.post(CHAT, {"messages": messages, "max_tokens": 2})
        assert answer.json["choices"][0]["message"]["content"] == "aa"


async def test_a_second_request_on_one_connection(autojump_clock: Any) -> None:
    """Keep-alive: after a stream the same connection answers again."""
    async with serving() as server:
        stream = server.http.connect()
        head = b"POST /completion HTTP/1.1\r\nhost: a\r\ncontent-length: 29\r\n\r\n"
        for _ in range(2):
            await stream.send_all(head + b'{"prompt":"x", "n_predict":1}')
            data = b""
            while not data.endswith(b"}}"):
                data += bytes(await stream.receive_some(65536))
            assert data.startswith(b"HTTP/1.1 200")
