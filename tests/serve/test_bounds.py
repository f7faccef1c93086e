"""What a request may bring: refused before time or memory is spent on it."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from attrs import evolve

from harness.serving import ByteTokenizer, Reply, served_model, serving
from harness.virtual_http import Call
from kvtrio.serve.bounds import Bounds, check_values
from kvtrio.serve.errors import ApiError
from kvtrio.serve.services import BASE_BODY_BYTES, MAX_BODY_BYTES, ServeSettings

NATIVE, TEXT, CHAT = "/completion", "/v1/completions", "/v1/chat/completions"
N_CTX, LONGEST = 256, 6
"""Of the server of these tests; its longest token is "pha be"."""
MAX_VALUES = 2**16 + 4 * N_CTX


class NothingRead(ByteTokenizer):
    """Fails when it is asked to read."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        raise AssertionError("this was refused for its length")

    def fragments(self, text: str, *, parse_special: bool) -> list[Any]:
        raise AssertionError("this was refused for its length")


def code(answer: Reply) -> str:
    found: str = answer.error["kvtrio"]["code"]
    return found


# --- prompts ---


@pytest.mark.parametrize("recall_bytes", [0, 1 << 20])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (NATIVE, {"prompt": "x" * N_CTX * LONGEST}),
        (TEXT, {"prompt": ["x" * N_CTX * LONGEST]}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * N_CTX * LONGEST}]}),
        (CHAT, {"messages": [{"role": "user", "content": "\U0001f600" * 500_000}]}),
        # every text is a token at least
        (NATIVE, {"prompt": [1] + ["x"] * N_CTX}),
        (NATIVE, {"prompt": [[1, "x" * 6 * 200] + [2] * 60]}),
        (NATIVE, {"prompt": [1] * 5000}),
        # ids outside the vocabulary are not looked at
        (NATIVE, {"prompt": [10**9] * 5000}),
    ],
)
async def test_what_cannot_fit_is_not_tokenised(
    autojump_clock: Any, path: str, body: dict[str, Any], recall_bytes: int
) -> None:
    """400 with llama-server's type and a number of tokens that the prompt has at least."""
    model = evolve(served_model(), tokenizer=NothingRead())
    async with serving(model=model, recall_bytes=recall_bytes) as server:
        raw = json.dumps(body, ensure_ascii=False).encode()
        answer = await server.post(path, raw)
        assert answer.status == 400
        assert answer.error["type"] == "exceed_context_size_error"
        assert N_CTX <= answer.error["n_prompt_tokens"] <= len(raw)
        assert answer.error["n_ctx"] == N_CTX
        assert "at least" in answer.error["message"]
        assert "exceeds the available context size" in answer.error["message"]


async def test_what_may_fit_is_tokenised(autojump_clock: Any) -> None:
    """The bound refuses nothing that the context could hold, and the exact number is told."""
    async with serving() as server:
        fits = {"prompt": "x" * (N_CTX - 3), "n_predict": 1}
        assert (await server.post(NATIVE, fits)).status == 200
        over = {"prompt": "x" * (N_CTX * LONGEST - LONGEST)}
        answer = await server.post(NATIVE, over)
        assert answer.error["n_prompt_tokens"] == N_CTX * LONGEST - LONGEST + 1


@pytest.mark.parametrize("text", ["x", "xxxxxx", "é" * 30, "\U0001f600", "pha be" * 20])
def test_the_bound_is_never_above_the_truth(text: str) -> None:
    """Also for characters of several bytes."""
    bounds = Bounds.of(ByteTokenizer(), 20)
    num_bytes = len(text.encode())
    assert bounds.longest_token == LONGEST
    if num_bytes <= 19 * LONGEST:
        bounds.check_prompt([text], "prompt")
        return
    with pytest.raises(ApiError) as refused:
        bounds.check_prompt([text], "prompt")
    assert 20 <= refused.value.numbers["n_prompt_tokens"] <= num_bytes


# --- JSON values ---


VALUES: list[Any] = [
    {},
    [],
    [1, "a,b", [], {}, {"a": [1, 2]}, "[{,"],
    {"a,[{": '\\",[', "b": {"c": None}},
    "[,{",
    {"prompt": "x", "stop": ["a", "b"]},
    [[[[]]]],
    [[] for _ in range(20)],
]


def number_of_values(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value
    return 1 + sum(map(number_of_values, inside)) if isinstance(value, list | dict) else 1


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("indent", [None, 2])
def test_values_are_counted_as_bytes(value: Any, indent: int | None) -> None:
    """Never fewer than there are, and marks within strings do not count."""
    body, number = json.dumps(value, indent=indent).encode(), number_of_values(value)
    with pytest.raises(ApiError):
        check_values(body, number - 1)
    # An empty list or object counts as a value and a place for one.
    check_values(body, number + body.count(b"[]") + body.count(b"{}") + 1)


@pytest.mark.parametrize(
    "body", [b'"', b'{"a', b'"\\', b'"\\"', b'"' + b'\\"' * 10**6, b'"",' * 10**6, b"[" * 10**6]
)
def test_what_is_no_json_is_counted_in_time(body: bytes) -> None:
    """Unfinished strings and worse: every byte is looked at once."""
    with suppress(ApiError):
        check_values(body, 1000)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"chat_template_kwargs":{"a":[%s{}]}}' % (b"{}," * MAX_VALUES)),
        (CHAT, b'{"messages":[{"role":"user","content":"a","z":[%s{}]}]}' % (b"{}," * MAX_VALUES)),
        (CHAT, b'{"tool_choice":"none","tools":[%s{}]}' % (b"{}," * MAX_VALUES)),
        (TEXT, b"{%s}" % b",".join(b'"%x":1' % i for i in range(MAX_VALUES + 1))),
        (NATIVE, b'{"prompt":[%s1]}' % (b"1," * MAX_VALUES)),
        ("/tokenize", b'{"content":[%s1]}' % (b"1," * MAX_VALUES)),
        ("/detokenize", b'{"tokens":[%s1]}' % (b"1," * MAX_VALUES)),
        ("/apply-template", b'{"messages":[%s{}]}' % (b"{}," * MAX_VALUES)),
        ("/lora-adapters", b"[%s{}]" % (b"{}," * MAX_VALUES)),
        ("/v1/load_lora_adapter", b'{"x":[%s{}]}' % (b"{}," * MAX_VALUES)),
    ],
)
async def test_a_body_of_small_things_is_refused(
    autojump_clock: Any, path: str, body: bytes
) -> None:
    """On every route, in fields that count and in fields that do not."""
    async with serving() as server:
        answer = await server.post(path, body)
        assert answer.status == 400
        assert code(answer) == "too_many_values"


async def test_text_is_not_values(autojump_clock: Any) -> None:
    """A large text of nothing but commas and brackets is one value."""
    async with serving(sim=None, n_ctx=10**6) as server:
        answer = await server.post("/tokenize", {"content": "[{,}]," * 100_000})
        assert answer.status == 200
        assert len(answer.json["tokens"]) == 600_000


# --- texts for their own sake ---


@pytest.mark.parametrize("content", ["x" * 1_100_000, ["x" * 10_000] * 110])
async def test_tokenize_has_a_limit(autojump_clock: Any, content: Any) -> None:
    """On all its texts together; more than a context, and bounded."""
    async with serving() as server:
        assert code(await server.post("/tokenize", {"content": content})) == "too_much_text"


async def test_pieces_and_ids_have_a_limit(autojump_clock: Any) -> None:
    """An answer that lists tokens one by one is bounded; the bare ids of the same text are not."""
    async with serving() as server:
        text = {"content": "x" * (MAX_VALUES + 1)}
        assert (await server.post("/tokenize", text)).status == 200
        refused = await server.post("/tokenize", {**text, "with_pieces": True})
        assert code(refused) == "too_many"
        assert str(MAX_VALUES) in refused.error["message"]


# --- bodies ---


@pytest.mark.parametrize(
    ("n_ctx", "limit"), [(2048, BASE_BODY_BYTES + 65_536), (10**7, MAX_BODY_BYTES)]
)
async def test_the_body_limit_follows_the_context(
    autojump_clock: Any, n_ctx: int, limit: int
) -> None:
    """A few megabytes for a small context, 16 at most; one byte more is a 413."""
    async with serving(n_ctx=n_ctx) as server:
        settings: ServeSettings = server.services.settings
        assert settings.max_body_bytes == limit
        too_large = b'{"prompt":"%s"}' % (b"x" * limit)
        call = Call(target=NATIVE, method="POST", body=too_large)
        assert (await server.call(call)).status == 413


# --- Unicode ---

NOT_UTF8, HALF, NULLED = b'"a\xffb"', b'"a\\ud83d"', b'"\\udc00 and more of it"'


@pytest.mark.parametrize("value", [NOT_UTF8, HALF, NULLED])
@pytest.mark.parametrize("path", [NATIVE, TEXT, CHAT])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{%s,"user":%s}', "user"),
        (b'{%s,"model":%s}', "model"),
        (b'{%s,"cache_salt":%s}', "cache_salt"),
        (b'{%s,"metadata":{"a":[%s]}}', "metadata"),
        (b'{%s,"tool_choice":{%s:1}}', "tool_choice"),
        (b'{%s,"stop":["a",%s]}', "stop"),
        (b'{%s,"kvtrio":{"session":%s}}', "kvtrio"),
        (b'{%s,"unknown":%s}', None),
        (b"{%s,%s:1}", None),
    ],
)
async def test_a_body_is_unicode_everywhere(
    autojump_clock: Any, path: str, body: bytes, field: str | None, value: bytes
) -> None:
    """Bytes that are not UTF-8 and halves of surrogate pairs are a 400 wherever they stand; a field
    of ours is named, another's name is never repeated."""
    prompt = b'"messages":[{"role":"user","content":"x"}]' if path == CHAT else b'"prompt":"x"'
    async with serving() as server:
        answer = await server.post(path, body % (prompt, value))
        assert answer.status == 400
        assert code(answer) == ("bad_json" if field is None else "bad_text")
        assert answer.error["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (NATIVE, b'{"prompt":%s}', "prompt"),
        (CHAT, b'{"messages":[{"role":"user","content":%s}]}', "messages"),
        ("/tokenize", b'{"content":%s}', "content"),
        ("/v1/load_lora_adapter", b'{"lora_name":%s,"lora_path":"x"}', "lora_name"),
    ],
)
@pytest.mark.parametrize("value", [NOT_UTF8, HALF, NULLED])
async def test_so_is_what_is_read(
    autojump_clock: Any, path: str, body: bytes, field: str, value: bytes
) -> None:
    """The same in the fields that count."""
    async with serving() as server:
        answer = await server.post(path, body % value)
        assert (code(answer), answer.error["param"]) == ("bad_text", field)


async def test_whole_pairs_are_text(autojump_clock: Any) -> None:
    """A pair of surrogates is how JSON writes a character."""
    async with serving() as server:
        answer = await server.post("/tokenize", b'{"content":"\\ud83d\\ude00","x":"\\u00e9"}')
        assert msgspec.json.decode(answer.raw.body) == {"tokens": list("\U0001f600".encode())}
