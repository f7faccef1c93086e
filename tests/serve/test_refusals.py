"""Requests that are refused: by their form, their numbers, or the state of the server."""

import json
from typing import Any

import pytest
import trio

from harness.serving import VOCAB_SIZE, Reply, serving
from harness.virtual import SimSettings
from harness.virtual_http import Call
from kvtrio.model.tokenizer import MAX_TEXT_CHARS

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
HI = [{"role": "user", "content": "hi"}]
DEEP = [b'{"x":' + b"[" * depth + b"]" * depth + b"}" for depth in (2000, 100_000)]


def base(path: str) -> dict[str, Any]:
    return {"messages": HI} if path == CHAT else {"prompt": "hi"}


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, "/tokenize", "/apply-template"])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{:",
        b"null",
        b"[]",
        b'"x"',
        b" " * 1000,
        b"\xef\xbb\xbf{}",
        b'{"prompt":"\xff\xfe","content":"\xff","messages":[{"role":"\xff"}]}',
        b'{"prompt":"\\ud83d","content":"\\ud83d","messages":[{"role":"\\ud83d"}]}',
        b'{"prompt":"\\ude00\\ud83d","content":"\\ude00\\ud83d","messages":[{"role":"\\ude00"}]}',
        b"{} {}",
        *DEEP,
        DEEP[0].replace(b'"x"', b'"messages"').replace(b"{", b'{"prompt":[[[[1]]]],"content":{},'),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_broken_bodies_are_a_400(
    autojump_clock: Any, path: str, raw: bytes, stream: bool
) -> None:
    """No body, no JSON, no object, no UTF-8, half an emoji, too deep: the same 400 everywhere."""
    if stream:
        raw = raw.replace(b"{", b'{"stream":true,', 1).replace(b"true,}", b"true}")
    async with serving() as server:
        answer = await server.post(path, raw)
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("depth", [10, 64, 400, 700, 950, 3000])
@pytest.mark.parametrize(
    "where",
    [
        b'{"messages":[{"role":"user","content":"x","extra":%b}],"max_tokens":1}',
        b'{"messages":[{"role":"user","content":%b}],"max_tokens":1}',
        b'{"messages":[{"role":"user","content":"x"}],"tools":%b,"max_tokens":1}',
        b'{"messages":[{"role":"user","content":"x"}],"metadata":%b,"max_tokens":1}',
        b'{"messages":[{"role":"user","content":"x"}],"unknown":%b,"max_tokens":1}',
        b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":%b},"n":1}',
        b'{"messages":[{"role":"user","content":"x"}],"stop":%b,"max_tokens":1}',
    ],
)
async def test_no_depth_is_our_fault(autojump_clock: Any, where: bytes, depth: int) -> None:
    """However deep, and wherever: an answer or a 400."""
    async with serving() as server:
        answer = await server.post(CHAT, where % (b"[" * depth + b"]" * depth))
        assert answer.status in (200, 400)


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -2),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_completion_tokens", -7),
        ("n_predict", "x"),
        ("n", 0),
        ("n", -1),
        ("n", 5),
        ("n", 10**9),
        ("n", "3"),
        ("n_cmpl", 5),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 2),
        ("typical_p", -1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("repeat_last_n", 2**70),
        ("repeat_penalty", 0),
        ("repeat_penalty", -1),
        ("repeat_last_n", -1),
        ("presence_penalty", 101),
        ("frequency_penalty", "x"),
        ("n_probs", -1),
        ("n_probs", 2**31),
        ("seed", 1.5),
        ("seed", "x"),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ["x"] * 50_000),
        ("stop", "x" * 100_000),
        ("id_slot", 4),
        ("id_slot", -2),
        ("stream", "yes"),
        ("stream_options", []),
        ("stream_options", {"include_usage": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {str(VOCAB_SIZE): 1}),
        ("logit_bias", {"97": "x"}),
        ("logit_bias", {"97": None}),
        ("logit_bias", {"97": True}),
        ("logit_bias", {"97": 1e300}),
        ("logit_bias", [[97]]),
        ("logit_bias", [[97, 1, 1]]),
        ("logit_bias", [[1.5, 1]]),
        ("logit_bias", [[VOCAB_SIZE, 1]]),
        ("logit_bias", {str(number): 1 for number in range(10_000)}),
        ("logit_bias", {"x" * 10_000: 1}),
        ("logit_bias", 5),
        ("sse_ping_interval", -5),
        ("return_progress", 1),
    ],
)
async def test_wrong_values_are_a_400_that_names_the_field(
    autojump_clock: Any, path: str, field: str, value: Any
) -> None:
    """Wrong type, out of range, too many or too long: 400 before anything is computed."""
    async with serving() as server:
        answer = await server.post(path, {**base(path), field: value})
        assert answer.status == 400
        assert answer.error["param"].partition("[")[0].partition(".")[0] in (field, "n")
        assert server.stack.core.next_step == 0


@pytest.mark.parametrize(
    "raw", [b'{"prompt":"x","temperature":NaN}', b'{"prompt":"x","top_p":1e309}']
)
async def test_numbers_that_are_none(autojump_clock: Any, raw: bytes) -> None:
    """NaN is no JSON; what does not fit a double is out of range."""
    async with serving() as server:
        assert (await server.post(NATIVE, raw)).status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grammar", "root ::= x"),
        ("json_schema", {"type": "object"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("mirostat", 1),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5),
        ("dynatemp_range", 1.0),
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 2),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("post_sampling_probs", True),
        ("min_tokens", 3),
        ("stop_token_ids", [1]),
    ],
)
async def test_known_fields_that_we_do_not_have_are_refused(
    autojump_clock: Any, field: str, value: Any
) -> None:
    """What would change the answer and cannot be done is said, not dropped."""
    async with serving() as server:
        answer = await server.post(CHAT, {"messages": HI, field: value})
        assert answer.status == 400
        assert answer.error["type"] == "not_supported_error"
        assert answer.error["param"] == field


@pytest.mark.parametrize(
    "more",
    [
        {"grammar": "", "json_schema": None, "response_format": {"type": "text"}, "lora": []},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"mirostat": 0, "dry_multiplier": 0.0, "xtc_probability": 0, "dynatemp_range": 0},
        {"mirostat_tau": 5, "samplers": ["top_k"], "dry_sequence_breakers": ["x"]},
        {"echo": False, "suffix": None, "best_of": 1, "modalities": ["text"]},
        {"adaptive_target": -1.0, "t_max_predict_ms": -1, "min_keep": 0},
        {"user": "x", "metadata": {"a": [1]}, "store": True, "model": "gpt-4"},
        {"something_else": [[{}]], "kvtrio": {}},
        {"repetition_penalty": 1.0, "ignore_eos": False, "n": None, "stop": None, "seed": None},
        {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "logit_bias": None},
        {"logit_bias": {"97": -100, "hello": False}, "n_probs": 0, "stream_options": None},
        {"logit_bias": [[97, 1], ["ab", False], [98, -2.5]]},
    ],
)
async def test_unused_and_unknown_fields_are_no_error(
    autojump_clock: Any, more: dict[str, Any]
) -> None:
    """A known field at its "off" value, an ignored one, and one nobody knows: all 200."""
    async with serving() as server:
        answer = await server.post(CHAT, {"messages": HI, "max_tokens": 1, **more})
        assert answer.status == 200, answer.raw.body


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [[]],
        [""],
        ["a", ""],
        [VOCAB_SIZE],
        [-1],
        [1.5],
        [True],
        [[1, None]],
        {},
        5,
        {"prompt_string": 5},
        {"prompt_string": "x", "multimodal_data": ["eA=="]},
        ["x"] * 65,
        [[[1]]],
        ["a", {"x": 1}],
        [2**70],
    ],
)
@pytest.mark.parametrize("path", [TEXT, NATIVE])
async def test_prompts_that_are_none(autojump_clock: Any, path: str, prompt: Any) -> None:
    """Missing, empty, of another shape, too many, or with ids outside the vocabulary."""
    async with serving() as server:
        answer = await server.post(path, {"prompt": prompt})
        assert answer.status == 400


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (None, "missing_field"),
        ([], "wrong_value"),
        ({}, "wrong_value"),
        ("hi", "wrong_value"),
        (["hi"], "wrong_value"),
        ([{}], "bad_message"),
        ([{"role": 5, "content": "x"}], "bad_message"),
        ([{"role": "", "content": "x"}], "bad_message"),
        ([*HI, {"role": "user", "content": 5}], "bad_message"),
        ([*HI, {"role": "user", "content": ["x"]}], "bad_message"),
        ([*HI, {"role": "user", "content": [{"type": "text"}]}], "bad_message"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only_text"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "only_text"),
        ([*HI, *[{"role": "assistant", "content": "x"}] * 2], "bad_message"),
        (HI * 5000, "wrong_value"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/apply-template"])
async def test_messages_that_are_none(
    autojump_clock: Any, path: str, messages: Any, code: str
) -> None:
    """Each is a client's fault: 400, and the message's index where there is one."""
    async with serving() as server:
        answer = await server.post(path, {"messages": messages})
        assert answer.status == 400
        assert answer.error["kvtrio"]["code"] == code


@pytest.mark.parametrize(
    "more",
    [
        {"continue_final_message": True, "add_generation_prompt": True},
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": 10**6},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"enable_thinking": "yes"}},
        {"chat_template_kwargs": []},
    ],
)
async def test_chat_fields_that_do_not_go(autojump_clock: Any, more: dict[str, Any]) -> None:
    """Contradictions, reserved names, too many alternatives."""
    async with serving() as server:
        assert (await server.post(CHAT, {"messages": HI, **more})).status == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("size", "fits"), [(255, True), (256, False), (257, False), (900, False)])
async def test_a_prompt_that_does_not_fit(
    autojump_clock: Any, size: int, fits: bool, stream: bool
) -> None:
    """400 with both numbers, before any computing, in a stream too; one that just fits ends by
    length."""
    async with serving() as server:
        answer = await server.post(NATIVE, {"prompt": [97] * size, "stream": stream})
        assert answer.status == (200 if fits else 400)
        if not fits:
            assert answer.error["type"] == "exceed_context_size_error"
            assert (answer.error["n_prompt_tokens"], answer.error["n_ctx"]) == (size, 256)
            assert "exceeds the available context size" in answer.error["message"]
            assert "context_length_exceeded" in answer.error["message"]
            assert server.stack.core.next_step == 0


async def test_a_chat_that_does_not_fit_names_its_field(autojump_clock: Any) -> None:
    """The parameter is what the client sent."""
    async with serving() as server:
        messages = [{"role": "user", "content": "x" * 300}]
        assert (await server.post(CHAT, {"messages": messages})).error["param"] == "messages"


async def test_a_full_queue_is_a_429(autojump_clock: Any) -> None:
    """Beyond places and queue: refused at once with Retry-After; the others are served."""
    sim = SimSettings(num_places=2, max_waiting=2)
    answers: list[Reply] = []
    async with serving(sim=sim) as server:

        async def one() -> None:
            answers.append(await server.post(NATIVE, {"prompt": "x", "n_predict": 20}))

        async with trio.open_nursery() as nursery:
            for _ in range(7):
                nursery.start_soon(one)
        assert sorted(each.status or 0 for each in answers) == [200] * 4 + [429] * 3
        refused = [each for each in answers if each.status == 429]
        assert all(each.headers["retry-after"] == "1" for each in refused)
        assert all(each.error["type"] == "rate_limit_error" for each in refused)
        assert all(each.raw.total_s == 0 for each in refused)
        assert server.stack.is_empty


async def test_a_batch_is_admitted_whole_or_not(autojump_clock: Any) -> None:
    """One answer too many for the queue: 429, and none of the others runs."""
    sim = SimSettings(num_places=2, max_waiting=2)
    async with serving(sim=sim) as server:
        answer = await server.post(TEXT, {"prompt": ["x"] * 5, "max_tokens": 5})
        assert answer.status == 429
        assert server.stack.is_empty


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
async def test_draining_is_a_503(autojump_clock: Any, path: str) -> None:
    """New requests are refused with Retry-After; what runs finishes; health stays up."""
    async with serving() as server:
        running: list[Reply] = []

        async def run() -> None:
            running.append(await server.post(NATIVE, {"prompt": "x", "n_predict": 20}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(0.02)
            server.stack.engine.drain()
            answer = await server.post(path, base(path))
            assert answer.status == 503
            assert answer.error["type"] == "unavailable_error"
            assert int(answer.headers["retry-after"]) >= 1
            assert (await server.get("/health")).status == 200
        assert running[0].json["content"] == "a" * 20


@pytest.mark.slow
async def test_giant_requests_cost_nothing(autojump_clock: Any) -> None:
    """A prompt list of a million entries, a stop string of megabytes: 400, nothing computed."""
    async with serving() as server:
        for body in ({"prompt": ["x"] * 10**6}, {"prompt": "x", "stop": "y" * 10**7}):
            answer = await server.call(
                Call(target=TEXT, method="POST", body=json.dumps(body).encode())
            )
            assert answer.status in (400, 413)
        assert server.stack.core.next_step == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, "/tokenize"])
async def test_texts_that_no_model_could_hold(autojump_clock: Any, path: str) -> None:
    """What the tokenizer declines to look at is a 400, and clients know it for an overflow; also
    where the context could hold it."""
    text = "x" * (MAX_TEXT_CHARS + 1)
    body = {"prompt": text, "content": text, "messages": [{"role": "user", "content": text}]}
    async with serving(n_ctx=10**7, max_body_bytes=64 << 20) as server:
        answer = await server.post(path, body)
        assert answer.status == 400
        assert "context_length_exceeded" in answer.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_bounded_over_all_answers(
    autojump_clock: Any, stream: bool
) -> None:
    """Answers x tokens x alternatives is refused before anything is computed if it is too much."""
    async with serving(sim=SimSettings(max_waiting=200)) as server:
        body = {"prompt": ["x"] * 50, "n_predict": 255, "n_probs": 100, "stream": stream}
        answer = await server.post(NATIVE, body)
        assert answer.error["kvtrio"]["code"] == "too_many_logprobs"
        assert server.stack.core.next_step == 0
        assert (await server.post(NATIVE, {**body, "n_predict": 2})).status == 200


CANARY = "Xq7Canary"


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        {CANARY: CANARY},
        {"prompt": {CANARY: CANARY}, "content": {CANARY: 1}, "messages": [{CANARY: CANARY}]},
        {"messages": [{"role": "user", "content": {CANARY: 1}}], "prompt": [CANARY, None]},
        {"messages": [{"role": CANARY * 20}], "prompt": "x", "stop": {CANARY: CANARY}},
        {"messages": HI, "prompt": "x", "temperature": CANARY, "tokens": [CANARY]},
        {"messages": HI, "prompt": "x", "logit_bias": {CANARY: CANARY}, "tokens": {CANARY: 1}},
        {"messages": HI, "prompt": "x", "chat_template_kwargs": {"messages": CANARY}},
        {"messages": HI, "prompt": "x", "response_format": {CANARY: CANARY}},
        {"messages": HI, "prompt": "x", "stream_options": CANARY, "grammar": CANARY},
        {"messages": HI, "prompt": "x", "reasoning_effort": CANARY * 20},
    ],
)
async def test_errors_never_echo(autojump_clock: Any, path: str, body: dict[str, Any]) -> None:
    """No refusal repeats a word of the request."""
    async with serving() as server:
        answer = await server.post(path, body)
        if answer.status != 200:
            assert CANARY.encode() not in answer.raw.body
            assert CANARY.lower().encode() not in answer.raw.body
