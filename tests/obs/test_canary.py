"""No word of a user in the log or in an error, whatever they send and whatever goes wrong.

Every route and every error of the catalogue is driven, in virtual time, with a canary in every
place where text fits. It must not turn up, in any spelling, in the log at level debug, on stdout or
stderr, in the body or the headers of an error, or in an answer about the server itself.
"""

import base64
import io
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from attrs import define, evolve, field, frozen

from harness.serving import EOS, SEALER, Reply, Serving, served_model, serving
from harness.virtual import SimSettings
from harness.virtual_http import Call
from kvtrio.backends.sim import Moment
from kvtrio.model.tokenizer import MAX_TEXT_CHARS
from kvtrio.obs.logging import Clock, Log, library_bridge
from kvtrio.obs.observer import JsonObserver
from kvtrio.obs.schema import Level
from kvtrio.serve.app import ROUTES
from kvtrio.serve.errors import CATALOGUE
from kvtrio.serve.fields import IGNORED, REFUSED
from kvtrio.serve.schema import ChatBody, DetokenizeBody, NativeBody, TextBody, TokenizeBody
from kvtrio.serve.session_files import FAULTS

CANARY = "Canary7Words"
SPELLINGS = tuple(
    spelling.lower()
    for spelling in (
        CANARY,
        CANARY[:8],
        CANARY[::-1],
        CANARY.encode().hex(),
        base64.b64encode(CANARY.encode()).decode()[:12],
        repr(list(CANARY.encode()))[1:20],
    )
)
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
GENERATING = (CHAT, TEXT, NATIVE)
HEADERS = {
    "user-agent": CANARY,
    "cookie": f"{CANARY}={CANARY}",
    "referer": f"http://{CANARY}/{CANARY}",
    "authorization": f"Bearer {CANARY}",
    "x-request-id": CANARY,
    f"x-{CANARY}": CANARY,
}
FIELDS = sorted(
    {
        name
        for kind in (ChatBody, TextBody, NativeBody, TokenizeBody, DetokenizeBody)
        for name in msgspec.structs.asdict(kind())
    }
    | REFUSED.keys()
    | IGNORED.keys()
)


def full_body(**changes: Any) -> dict[str, Any]:
    """A body that every route accepts, with the canary wherever text is allowed."""
    messages = [
        {"role": "system", "content": CANARY, "name": CANARY},
        {"role": "user", "content": [{"type": "text", "text": CANARY}], CANARY: CANARY},
        {"role": "assistant", "content": CANARY},
        {"role": "user", "content": f"{CANARY}?"},
    ]
    body = {
        "model": CANARY,
        "user": CANARY,
        "metadata": {CANARY: CANARY},
        "messages": messages,
        "prompt": CANARY,
        "content": CANARY,
        "tokens": list(CANARY.encode()),
        "stop": [CANARY],
        "logit_bias": {CANARY: 1},
        "chat_template_kwargs": {CANARY: CANARY},
        "reasoning_effort": CANARY,
        "max_tokens": 2,
        CANARY: {CANARY: [CANARY]},
    }
    return body | changes


@define
class Recorder:
    """Looks at every answer; keeps the log and the errors met."""

    out: io.BytesIO = field(factory=io.BytesIO)
    codes: set[str] = field(factory=set)
    log: Log = field(init=False)
    observer: JsonObserver = field(init=False)

    def __attrs_post_init__(self) -> None:
        clock = Clock(monotonic_ns=lambda: 0, wall_s=lambda: 0.0)
        self.log = Log(self.out, clock, Level.DEBUG)
        self.observer = JsonObserver(self.log, key=SEALER.log_key)

    @asynccontextmanager
    async def serving(self, *args: Any, **settings: Any) -> AsyncIterator[Serving]:
        """A server whose records become log lines."""
        async with serving(*args, **settings) as server:
            yield server
        for step in server.stack.records.steps:
            self.observer.step(step)
        for request in server.stack.records.requests:
            self.observer.request(request)
        for hit in server.stack.records.hits:
            self.observer.cached(hit)
        for move in server.stack.records.moves:
            self.observer.moved(move)
        for rejection in server.stack.records.rejections:
            self.observer.rejected(rejection)
        for cost in server.stack.records.costs:
            self.observer.cost(cost)
        for line in server.lines:
            self.log.emit(line)

    def look(self, reply: Reply, *, about_server: bool = False) -> Reply:
        """An error, or an answer about the server, may not hold the canary."""
        status = reply.status
        if status is not None and status >= 400:
            about_server = True
            self.codes.add(reply.error["kvtrio"]["code"])
        if about_server:
            assert_clean(reply.raw.body.decode())
            assert_clean(json.dumps(reply.headers))
        return reply

    def see(self, error: Mapping[str, Any]) -> None:
        """The same for an error event of a stream."""
        assert_clean(json.dumps(error))
        self.codes.add(error["kvtrio"]["code"])


def assert_clean(text: str) -> None:
    found = [spelling for spelling in SPELLINGS if spelling in text.lower()]
    assert found == [], text


@pytest.fixture
def recorder(capfd: pytest.CaptureFixture[str]) -> Iterator[Recorder]:
    """Libraries log through the bridge; at the end everything that was written is searched."""
    recorder = Recorder()
    with library_bridge(recorder.log, logging.DEBUG):
        yield recorder
    captured = capfd.readouterr()
    assert_clean(recorder.out.getvalue().decode() + captured.out + captured.err)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_search_finds_every_spelling(spelling: str) -> None:
    """The tests below would pass if nothing was ever found."""
    with pytest.raises(AssertionError):
        assert_clean(json.dumps({"message": f"failed on '{spelling}'"}))


def calls_to_every_route() -> Iterator[tuple[Call, bool]]:
    """Yield good calls, wrong methods and unknown paths, and whether the server is the subject."""
    for route in ROUTES:
        for path in route.paths:
            target = f"{path}?{CANARY}={CANARY}"
            body = json.dumps(full_body()).encode() if route.method == "POST" else b""
            yield Call(target=target, method=route.method, body=body, headers=HEADERS), not body
            for method in ("DELETE", "OPTIONS", "PUT"):
                yield Call(target=target, method=method, body=b"", headers=HEADERS), True
    for target in (f"/{CANARY}", f"/v1/{CANARY}", f"/slots/{CANARY}", f"//{CANARY}%00", "/%ff"):
        for method in ("GET", "POST"):
            yield Call(target=target, method=method, headers=HEADERS), True


async def test_every_route(autojump_clock: Any, recorder: Recorder) -> None:
    """Good requests, wrong methods and unknown paths; the log tells of each answer made."""
    async with recorder.serving(sim=SimSettings(max_context=4096)) as server:
        statuses = set()
        for call, about_server in calls_to_every_route():
            reply = recorder.look(await server.call(call), about_server=about_server)
            statuses.add(reply.status)
            if call.body and reply.status == 200 and "max_tokens" in call.body.decode():
                assert reply.json
        assert statuses >= {200, 404, 405}
    lines = [json.loads(line) for line in recorder.out.getvalue().splitlines()]
    assert sum(line["event"] == "request.done" for line in lines) >= 6
    assert any(line["event"] == "sched.step" for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("path", GENERATING)
async def test_every_field(autojump_clock: Any, recorder: Recorder, path: str) -> None:
    """The canary as the value of every field that any dialect knows, in every shape."""
    shapes = (CANARY, [CANARY], {CANARY: CANARY}, [{CANARY: CANARY}], [[CANARY, CANARY]])
    num_refused = 0
    async with recorder.serving() as server:
        for name in FIELDS:
            for value in shapes:
                body = full_body(**{name: value})
                reply = recorder.look(await server.post(path, body, headers=HEADERS))
                num_refused += reply.status == 400
                assert reply.status in (200, 400)
    assert num_refused > len(FIELDS)


@frozen
class Wrong:
    """A request that is refused, and with which error."""

    code: str
    path: str
    body: dict[str, Any] | bytes


def wrong_message(**message: Any) -> dict[str, Any]:
    return full_body(messages=[{"role": "user", "content": CANARY} | message])


WRONG = (
    Wrong("bad_json", CHAT, f'{{"{CANARY}": {CANARY}'.encode()),
    Wrong("bad_json", "/tokenize", f'["{CANARY}"]'.encode()),
    Wrong("too_deep", NATIVE, f'{{"{CANARY}":'.encode() + b"[" * 50_000),
    Wrong("missing_field", CHAT, {CANARY: CANARY}),
    Wrong("missing_field", "/apply-template", {"prompt": CANARY}),
    Wrong("wrong_value", CHAT, full_body(temperature=CANARY)),
    Wrong("wrong_value", CHAT, full_body(chat_template_kwargs={"messages": CANARY})),
    Wrong("out_of_range", TEXT, full_body(n=99)),
    Wrong("too_many", TEXT, full_body(prompt=[CANARY] * 5000)),
    Wrong("too_long_text", NATIVE, full_body(stop=CANARY * 5000)),
    Wrong("unknown_token", "/detokenize", full_body(tokens=[10**6])),
    Wrong("not_supported", CHAT, full_body(grammar=CANARY)),
    Wrong("only_text", CHAT, wrong_message(content=[{"type": CANARY, CANARY: CANARY}])),
    Wrong("bad_message", CHAT, wrong_message(content=[CANARY])),
    Wrong("bad_message", CHAT, wrong_message(role=CANARY * 9)),
    Wrong("too_many_logprobs", NATIVE, full_body(prompt=[CANARY] * 60, n_probs=99, n_predict=250)),
    Wrong("conflict", CHAT, full_body(continue_final_message=True, add_generation_prompt=True)),
    Wrong("needs_field", CHAT, full_body(top_logprobs=2)),
    Wrong("empty_prompt", TEXT, full_body(prompt=[[]])),
    Wrong("context_length_exceeded", NATIVE, full_body(prompt=CANARY * 500)),
    Wrong("too_many_values", CHAT, full_body(**{CANARY: [CANARY] * 100_000})),
    Wrong("too_much_text", "/tokenize", full_body(content=CANARY * 100_000)),
    Wrong("bad_text", CHAT, b'{"user":"%s\xff"}' % CANARY.encode()),
    Wrong("bad_text", NATIVE, b'{"%s":1,"prompt":["\\udc00"]}' % CANARY.encode()),
    Wrong("bad_json", CHAT, b'{"%s":"\xff"}' % CANARY.encode()),
)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(autojump_clock: Any, recorder: Recorder, stream: bool) -> None:
    """Each way to be refused for what was sent."""
    async with recorder.serving(max_body_bytes=64 << 20) as server:
        for wrong in WRONG:
            body = wrong.body if isinstance(wrong.body, bytes) else wrong.body | {"stream": stream}
            reply = recorder.look(await server.post(wrong.path, body, headers=HEADERS))
            assert reply.status == 400, wrong.code
            assert reply.error["kvtrio"]["code"] == wrong.code
    assert {wrong.code for wrong in WRONG} == recorder.codes


async def test_a_text_too_long_for_any_model(autojump_clock: Any, recorder: Recorder) -> None:
    """Where the context would hold it, the tokenizer says no."""
    body = full_body(prompt=CANARY * (MAX_TEXT_CHARS // 12 + 1))
    async with recorder.serving(n_ctx=10**7) as server:
        reply = recorder.look(await server.post(NATIVE, body, headers=HEADERS))
        assert reply.error["kvtrio"]["code"] == "text_too_long"


async def test_a_model_that_there_is_not(autojump_clock: Any, recorder: Recorder) -> None:
    """Its name is not repeated."""
    async with recorder.serving() as server:
        reply = recorder.look(await server.get(f"/v1/models/{CANARY}"))
        assert reply.error["kvtrio"]["code"] == "no_model"


async def test_templates_that_refuse(autojump_clock: Any, recorder: Recorder) -> None:
    """A template may raise with the user's words; they stay inside."""
    sources = {
        "template_failed": "{{ raise_exception(messages[0].content) }}",
        "template_error": "{% for m in messages %}{{ raise_exception(m.content) }}{% endfor %}",
    }
    for source in sources.values():
        async with recorder.serving(model=served_model(source)) as server:
            for path in (CHAT, "/apply-template"):
                recorder.look(await server.post(path, full_body(), headers=HEADERS))
    assert recorder.codes <= sources.keys()
    assert recorder.codes


async def test_states_of_the_server(autojump_clock: Any, recorder: Recorder) -> None:
    """Wrong key, too large, too slow, full, late, draining: nothing of the request is repeated."""
    sim = SimSettings(num_places=1, max_waiting=2, max_waiting_tokens=60)
    async with recorder.serving(
        sim=sim, api_keys=("right",), max_body_bytes=5000, body_timeout_s=3.0
    ) as server:
        right = HEADERS | {"authorization": "Bearer right"}
        recorder.look(await server.post(CHAT, full_body(), headers=HEADERS))
        recorder.look(await server.post(CHAT, full_body(user=CANARY * 999), headers=right))
        recorder.look(await server.post(TEXT, full_body(n_predict=1, id_slot=9), headers=right))
        await slow_body(server, recorder)

        long = full_body(max_tokens=100, stop=[])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.post(TEXT, long, headers=right))
            await trio.sleep(0.1)
            late = long | {"kvtrio": {"session": CANARY, "deadline_ms": 50, "predict": True}}
            for stream in (False, True):
                reply = await server.post(TEXT, late | {"stream": stream}, headers=right)
                if reply.status == 200:
                    recorder.see(reply.events[-1]["error"])
                else:
                    recorder.look(reply)
            nursery.start_soon(lambda: server.post(TEXT, long, headers=right))
            await trio.sleep(0.01)
            heavy = long | {"prompt": f"{CANARY} " * 5}
            recorder.look(await server.post(TEXT, heavy, headers=right))
            nursery.start_soon(lambda: server.post(TEXT, long, headers=right))
            await trio.sleep(0.01)
            recorder.look(await server.post(TEXT, long, headers=right))
            slots = await server.get("/slots", **right)
            recorder.look(slots, about_server=True)
            assert slots.json[0]["is_processing"]
            full = await server.get(f"/slots?fail_on_no_slot=1&x={CANARY}", **right)
            recorder.look(full)
            server.stack.engine.drain()
            recorder.look(await server.post(TEXT, long, headers=right))
    assert recorder.codes == {
        "unauthorized",
        "body_too_large",
        "body_timeout",
        "out_of_range",
        "queue_full",
        "queue_tokens",
        "deadline",
        "no_slot",
        "draining",
    }


async def slow_body(server: Serving, recorder: Recorder) -> None:
    """A request that begins and never ends."""
    stream = server.http.connect()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: {CANARY}\r\ncontent-length: 99\r\n"
    await stream.send_all(f"{head}authorization: Bearer right\r\n\r\n{CANARY}".encode())
    data = b""
    while b"body_timeout" not in data:
        data += bytes(await stream.receive_some(65536))
    assert_clean(data.decode())
    recorder.codes.add("body_timeout")
    await stream.aclose()


@pytest.mark.parametrize("stream", [False, True])
async def test_faults_of_ours(
    autojump_clock: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """An exception that quotes the user: before the answer, in the middle of it, and elsewhere."""

    def fail(*_: Any) -> Any:
        raise ValueError(f"cannot handle {CANARY}")

    monkeypatch.setattr("kvtrio.serve.info.models", fail)
    monkeypatch.setattr("kvtrio.serve.native_answer.stop_type", fail)
    for module in ("chat_answer", "text_answer"):
        monkeypatch.setattr(f"kvtrio.serve.{module}.finish_reason", fail)
    async with recorder.serving() as server:
        recorder.look(await server.get("/v1/models", **HEADERS))
        for path in GENERATING:
            reply = await server.post(path, full_body(stream=stream), headers=HEADERS)
            if stream:
                recorder.see(reply.events[-1]["error"])
            else:
                recorder.look(reply)
    assert recorder.codes == {"internal"}
    notes = [json.loads(line) for line in recorder.out.getvalue().splitlines()]
    errors = [line for line in notes if line["event"] == "library.note"]
    assert {line["error"] for line in errors} == {"builtins.ValueError"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", ["not_finite", "no_memory"])
async def test_steps_that_fail(
    autojump_clock: Any, recorder: Recorder, stream: bool, code: str
) -> None:
    """A model without a token for a prompt, or without memory, says so in its own words."""

    def token(moment: Moment) -> int | None:
        if code == "no_memory":
            raise MemoryError(CANARY)
        return None

    sim = SimSettings(token_function=token)
    async with recorder.serving(sim=sim) as server:
        for path in GENERATING:
            reply = await server.post(path, full_body(stream=stream), headers=HEADERS)
            if stream:
                recorder.see(reply.events[-1]["error"])
            else:
                recorder.look(reply)
    assert recorder.codes == {code}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_ends_and_clients_leave(
    autojump_clock: Any, recorder: Recorder, stream: bool
) -> None:
    """Hanging up at any moment, and an engine that gives up: the log knows only numbers."""
    async with recorder.serving() as server:
        body = json.dumps(full_body(stream=stream, max_tokens=50)).encode()
        call = Call(target=CHAT, method="POST", body=body, headers=HEADERS)
        for after_s in (0.0, 0.01, 0.05, 0.2):
            await server.call(evolve(call, hang_up_after_s=after_s))

        async def ask() -> None:
            reply = await server.call(evolve(call, target=TEXT))
            if stream:
                recorder.see(reply.events[-1]["error"])
            else:
                recorder.look(reply)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.05)
            server.stack.engine._hub.stop()
    assert recorder.codes == {"stopped"}


async def test_tokens_that_are_no_text(autojump_clock: Any, recorder: Recorder) -> None:
    """Bytes that are no UTF-8, a stop in the middle, the end token: all without a word."""
    tokens = (0xFF, *CANARY.encode(), EOS)
    async with recorder.serving(tokens) as server:
        for path in GENERATING:
            for stream in (False, True):
                body = full_body(stream=stream, max_tokens=40, logprobs=path == CHAT or 2)
                recorder.look(await server.post(path, body, headers=HEADERS))
        recorder.look(await server.get("/slots"), about_server=True)
        recorder.look(await server.get("/props"), about_server=True)


def test_every_error_is_driven() -> None:
    """What the tests above ask for is the whole catalogue; a new entry must be added to one."""
    driven = {wrong.code for wrong in WRONG} | {
        "template_error",
        "text_too_long",
        "no_model",
        "template_failed",
        "unauthorized",
        "body_too_large",
        "body_timeout",
        "queue_full",
        "queue_tokens",
        "deadline",
        "no_slot",
        "draining",
        "internal",
        "not_finite",
        "no_memory",
        "stopped",
        "not_found",
        "method_not_allowed",
    }
    driven |= {  # by test_canary_state
        "unknown_adapter",
        "repeated_adapter",
        "adapter_refused",
        "no_adapter_room",
        "adapters_full",
        "adapters_too_large",
        "taken_name",
        "no_adapter",
        "no_adapter_dir",
        "unknown_purpose",
    }
    driven |= {  # by test_canary_sessions
        "no_session_dir",
        "bad_slot",
        "bad_action",
        "empty_slot",
        *(spec.code for spec in FAULTS.values()),
    }
    assert CATALOGUE.keys() - driven == {"bad_request"}, "bad_request: what only quart refuses"
