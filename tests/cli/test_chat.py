"""kvtrio chat, against a server that plays a script."""

import http.server
import io
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from kvtrio.cli import main
from kvtrio.cli.client import ChatClient, ChatError, Message


def delta(text: str | None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


ANSWER = b":\n\n" + delta(None) + delta("Hel") + delta("lo") + b"data: [DONE]\n\n"


class Script(http.server.BaseHTTPRequestHandler):
    """Answers every POST with ``status`` and ``body``, and keeps what it was sent."""

    status: ClassVar[int] = 200
    body: ClassVar[bytes] = ANSWER
    seen: ClassVar[list[tuple[str, dict[str, str], dict[str, Any]]]] = []

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        request = json.loads(self.rfile.read(length))
        self.seen.append((self.path, dict(self.headers), request))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of the scripted server."""
    monkeypatch.setattr(Script, "seen", [])
    with http.server.HTTPServer(("127.0.0.1", 0), Script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_piped_input_gives_the_answer_alone(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal the whole input is one message and stdout holds the answer."""
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nthere\n"))
    assert main(["chat", "--url", url, "--system", "Be brief", "--api-key", "k1"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    ((path, headers, request),) = Script.seen
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer k1"
    assert request["stream"] is True
    assert request["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi\nthere"},
    ]


def test_the_conversation_is_kept(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a terminal each turn carries those before it; /new forgets them and /quit leaves."""
    lines = iter(["one", "two", "", "/new", "three", "/quit", "never read"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["chat", "--url", url]) == 0
    assert capsys.readouterr().out == "Hello\n" * 3
    sent = [[m["content"] for m in request["messages"]] for _, _, request in Script.seen]
    assert sent == [["one"], ["one", "Hello", "two"], ["three"]]


def test_a_refusal_does_not_end_the_conversation(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's reason is shown, and the failed message is not part of the next turn."""

    def lines() -> Iterator[str]:
        monkeypatch.setattr(Script, "status", 429)
        monkeypatch.setattr(Script, "body", b'{"error": {"message": "queue is full"}}')
        yield "one"
        monkeypatch.setattr(Script, "status", 200)
        monkeypatch.setattr(Script, "body", ANSWER)
        yield "two"
        yield "/quit"

    source = lines()
    monkeypatch.setattr("builtins.input", lambda _: next(source))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["chat", "--url", url]) == 0
    captured = capsys.readouterr()
    assert "the server answered 429: queue is full" in captured.err
    assert captured.out.endswith("Hello\n")
    assert [m["content"] for m in Script.seen[-1][2]["messages"]] == ["two"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (delta("Hel") + b'data: {"error": {"message": "it broke"}}\n\n', "it broke"),
        (delta("Hel"), "too early"),
        (delta("Hel") + b"data: nonsense\n\n", "no sense"),
        (delta("Hel") + b'data: {"error": "it broke"}\n\n', "no sense"),
    ],
)
def test_a_stream_that_breaks_is_reported(
    url: str, monkeypatch: pytest.MonkeyPatch, body: bytes, reason: str
) -> None:
    """What arrived is passed on; then one clear error follows."""
    monkeypatch.setattr(Script, "body", body)
    pieces: list[str] = []
    stream = ChatClient.for_url(url).stream([Message("user", "x")])
    with pytest.raises(ChatError, match=reason):
        pieces.extend(stream)
    assert pieces == ["Hel"]


def test_no_server_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says how to start one."""
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["chat", "--url", f"http://127.0.0.1:{port}"]) == 2
    assert "start one with `kvtrio serve`" in capsys.readouterr().err


def test_a_key_that_no_header_can_hold(url: str) -> None:
    """One clear line, which does not repeat it."""
    for key in ("a\nb", "\u2603"):
        stream = ChatClient.for_url(url, key).stream([Message("user", "x")])
        with pytest.raises(ChatError, match="cannot be sent"):
            next(stream)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("127.0.0.1:8080", "/v1/chat/completions"),
        ("http://a/v1/", "/v1/chat/completions"),
        ("http://a/base", "/base/v1/chat/completions"),
    ],
)
def test_addresses(url: str, path: str) -> None:
    """With or without scheme, with or without /v1."""
    assert ChatClient.for_url(url).path == path
