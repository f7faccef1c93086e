"""The error catalogue, and that nothing else ever answers for a failure."""

import re
from typing import Any

import pytest
import trio

from harness.serving import serving
from harness.virtual import SimSettings
from harness.virtual_http import Call
from kvtrio.backends.sim import Moment
from kvtrio.serve.errors import CATALOGUE, CONTEXT_SIZE, ApiError, ErrorSpec

VALUES = {
    "expected": "expected int",
    "low": 1,
    "high": 4,
    "limit": 8,
    "index": 2,
    "other": "stream",
    "n_prompt_tokens": 5031,
    "n_ctx": 1024,
}
STATUS_OF_TYPE = {
    "invalid_request_error": {400, 405, 408, 413},
    "not_supported_error": {400, 501},
    "exceed_context_size_error": {400},
    "authentication_error": {401},
    "not_found_error": {404},
    "rate_limit_error": {429},
    "server_error": {500},
    "unavailable_error": {503},
}


@pytest.mark.parametrize("spec", CATALOGUE.values(), ids=CATALOGUE.keys())
def test_every_entry_renders(spec: ErrorSpec) -> None:
    """Each entry has a body with all the members that clients read, and a status of its type."""
    error = ApiError(spec, "n", **VALUES)
    body = error.body()["error"]
    assert set(body) >= {"message", "type", "param", "code", "kvtrio"}
    assert body["code"] == spec.status
    assert body["kvtrio"]["code"] == spec.code
    assert spec.status in STATUS_OF_TYPE[spec.type]
    assert "{" not in body["message"]
    assert "None" not in body["message"]
    assert ("Retry-After" in error.headers()) == (spec.status in (429, 503))


def test_an_overflow_satisfies_every_client() -> None:
    """The body that openai, LangChain, LiteLLM and llama.cpp's interface were tried with."""
    error = ApiError(CONTEXT_SIZE, "messages", n_prompt_tokens=5031, n_ctx=1024)
    body = error.body()["error"]
    del body["kvtrio"]
    assert body == {
        "message": "request (5031 tokens) exceeds the available context size (1024 tokens), "
        "try increasing it (context_length_exceeded)",
        "type": "exceed_context_size_error",
        "param": "messages",
        "code": 400,
        "n_prompt_tokens": 5031,
        "n_ctx": 1024,
    }


@pytest.mark.parametrize(
    ("call", "status", "code"),
    [
        (Call(target="/none"), 404, "not_found"),
        (Call(target="/v1/none", method="POST", body=b"{}"), 404, "not_found"),
        (Call(target="/static/x.js"), 404, "not_found"),
        (Call(target="/v1/chat/completions"), 405, "method_not_allowed"),
        (Call(target="/health", method="DELETE"), 405, "method_not_allowed"),
        (Call(target="/completion", method="POST", body=b"x" * 3000), 413, "body_too_large"),
        (Call(target="/completion", method="POST"), 400, "bad_json"),
    ],
)
async def test_failures_are_json(autojump_clock: Any, call: Call, status: int, code: str) -> None:
    """Whatever quart refuses on its own is answered from the catalogue, not with HTML."""
    async with serving(max_body_bytes=2000) as server:
        answer = await server.call(call)
        assert answer.status == answer.error["code"] == status
        assert answer.error["kvtrio"] == {"code": code}
        assert answer.headers["content-type"] == "application/json; charset=utf-8"


async def test_a_wrong_method_names_the_right_ones(autojump_clock: Any) -> None:
    """405 comes with Allow."""
    async with serving() as server:
        answer = await server.get("/v1/chat/completions")
        assert "POST" in answer.headers["allow"]


@pytest.mark.parametrize("target", ["//v1//models", "/v1/models/", "/health/"])
async def test_untidy_paths_are_not_redirected(autojump_clock: Any, target: str) -> None:
    """No redirect pages: the path answers, or it is not found."""
    async with serving() as server:
        assert (await server.get(target)).status in (200, 404)


async def test_a_body_that_stays_away_times_out(autojump_clock: Any) -> None:
    """408 after the body's time, as JSON."""
    async with serving(body_timeout_s=7.0) as server:
        stream, start = server.http.connect(), trio.current_time()
        await stream.send_all(b"POST /completion HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{")
        data = bytes(await stream.receive_some(65536))
        assert data.startswith(b"HTTP/1.1 408")
        assert trio.current_time() - start == 7.0
        data += bytes(await stream.receive_some(65536))
        assert b'"body_timeout"' in data


async def test_our_fault_is_a_500_without_a_word_of_it(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception: fixed text for the client, a loud line for the operator."""
    async with serving() as server:
        monkeypatch.setattr("kvtrio.serve.info.models", lambda *_: 1 / 0, raising=True)
        answer = await server.get("/v1/models")
        assert answer.status == 500
        assert answer.error["type"] == "server_error"
        assert not re.search(r"zero|division|0x[0-9a-f]{6}|\.py", answer.error["message"])
        assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_without_finite_numbers_fails_and_others_do_not(
    autojump_clock: Any, is_streamed: bool
) -> None:
    """It gets an error of its own, also in the middle of its stream; the server goes on."""
    sim = SimSettings(
        token_function=lambda moment: (
            None if moment.row.params.temperature == 2.0 and moment.index == 2 else ord("a")
        )
    )
    body = {"prompt": "hi", "n_predict": 4, "stream": is_streamed}
    async with serving(sim=sim) as server:
        broken = await server.post("/completion", {**body, "temperature": 2.0})
        error = broken.events[-1]["error"] if is_streamed else broken.error
        assert error["kvtrio"]["code"] == "not_finite"
        assert broken.status == (200 if is_streamed else 500)
        assert (await server.post("/completion", {**body, "stream": False})).status == 200


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_without_memory_for_its_step_fails_and_others_do_not(
    autojump_clock: Any, is_streamed: bool
) -> None:
    """It is told to come back, also in the middle of its stream; those beside it go on."""

    def token(moment: Moment) -> int:
        if moment.row.params.temperature == 2.0 and moment.index == 2:
            raise MemoryError
        return ord("a")

    body = {"prompt": "hi", "n_predict": 4, "stream": is_streamed}
    others = []
    async with serving(sim=SimSettings(token_function=token)) as server:

        async def other() -> None:
            others.append(await server.post("/completion", {**body, "stream": False}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            failed = await server.post("/completion", {**body, "temperature": 2.0})
        error = failed.events[-1]["error"] if is_streamed else failed.error
        assert error["kvtrio"]["code"] == "no_memory"
        assert failed.status == (200 if is_streamed else 503)
        assert others[0].json["content"] == "aaaa"
