"""Log-probabilities belong to the text that is given, whatever a stop string does to it."""

from typing import Any

import pytest

from harness.serving import serving, token_ids

NATIVE, TEXT, CHAT = "/completion", "/v1/completions", "/v1/chat/completions"
PATHS = (NATIVE, TEXT, CHAT)


def body(path: str, stop: list[str], limit: int, *, is_stream: bool) -> dict[str, Any]:
    wanted: dict[str, Any] = {"stop": stop, "max_tokens": limit, "stream": is_stream, "seed": 1}
    if path == CHAT:
        return {**wanted, "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    return {**wanted, "prompt": "x", "logprobs": 1}


def told(path: str, events: list[Any]) -> tuple[str, list[Any]]:
    """The text and the entries of a plain answer, or joined over the events of a stream."""
    text, entries = "", []
    for event in events:
        if path == NATIVE:
            text += event["content"]
            entries += event.get("completion_probabilities", [])
            continue
        for choice in event["choices"]:
            part = choice.get("message") or choice.get("delta") or choice
            text += part.get("content") or part.get("text") or ""
            entries += (choice.get("logprobs") or {}).get("content", [])
    return text, entries


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("tokens", "stop", "limit", "text", "joined"),
    [
        # the stop string is a whole token, several, or begins within one
        (token_ids("hello", "x", " world"), ["x"], 8, "hello", b"hello"),
        (token_ids("a", "e", "s", "t", "b"), ["est"], 8, "a", b"a"),
        (token_ids("hello", " world"), ["lo w"], 8, "hel", b""),
        (token_ids("a", "hello", " world"), ["o"], 8, "ahell", b"a"),
        # held back, then given after all: by the next token, or by the end
        (token_ids("a", "e", "s", "x"), ["est"], 4, "aesx", b"aesx"),
        (token_ids("a", "e", "s"), ["est"], 3, "aes", b"aes"),
        # within characters
        (token_ids("a", "é", "b"), ["é"], 8, "a", b"a"),
        (token_ids("é", "b"), ["b"], 8, "é", "é".encode()),
        ((ord("a"), 0xFF, 0xC3, ord("b"), ord("c")), ["c"], 8, "a\ufffd\ufffdb", b"a\xff\xc3b"),
        ((ord("a"), 0xC3), ["z"], 2, "a\ufffd", b"a\xc3"),
        (token_ids("e", "s", "t"), ["est"], 8, "", b""),
    ],
)
async def test_entries_join_to_the_text(
    autojump_clock: Any,
    path: str,
    is_stream: bool,
    tokens: tuple[int, ...],
    stop: list[str],
    limit: int,
    text: str,
    joined: bytes,
) -> None:
    """Tokens of the stop string have none, nor has one that is cut; no other is missing."""
    async with serving(tokens) as server:
        answer = await server.post(path, body(path, stop, limit, is_stream=is_stream))
        given, entries = told(path, answer.events if is_stream else [answer.json])
        assert given == text
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == joined


@pytest.mark.parametrize("path", PATHS)
async def test_no_entry_is_ahead_of_its_text(autojump_clock: Any, path: str) -> None:
    """In a stream, at every event, what the entries spell is the beginning of what was given."""
    tokens = token_ids("a", "e", "s", "e", "s", "hello", "é", "e", "s")
    async with serving(tokens) as server:
        answer = await server.post(path, body(path, ["est"], len(tokens), is_stream=True))
        text, spelt = "", b""
        for frame in answer.events:
            part, entries = told(path, [frame])
            text += part
            spelt += b"".join(bytes(entry["bytes"]) for entry in entries)
            assert text.encode().startswith(spelt)
        assert text.encode() == spelt


async def test_text_offsets_go_on_through_what_was_held(autojump_clock: Any) -> None:
    """Offsets of a stream are those of the plain answer."""
    tokens = token_ids("a", "e", "s", "hello", "e", "s")
    async with serving(tokens) as server:
        plain = await server.post(TEXT, body(TEXT, ["est"], 6, is_stream=False))
        streamed = await server.post(TEXT, body(TEXT, ["est"], 6, is_stream=True))
        parts = [choice["logprobs"] for e in streamed.events for choice in e["choices"]]
        offsets = [each for part in parts if part for each in part["text_offset"]]
        assert offsets == plain.json["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 8, 9]
