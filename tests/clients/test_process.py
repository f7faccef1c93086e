"""The life of the process: drain, exit codes, damaged files."""

import http.client
import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness.process import ServerProcess, command, running_server

pytestmark = [pytest.mark.slow, pytest.mark.models]


def post(server: ServerProcess, **body: Any) -> http.client.HTTPResponse:
    """POST /v1/completions; the caller reads the answer and closes it."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    return (line.strip() for line in response if line.startswith(b"data: "))


def test_sigterm_lets_running_answers_finish(smollm2: Path) -> None:
    """After SIGTERM the running stream comes to its end, a new request gets 503, and the exit
    code is 0."""
    with running_server(str(smollm2), "-c", "512") as server:
        asked = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True}
        with closing(post(server, stream=True, **asked)) as stream:
            running = events(stream)
            first = next(running)
            # One connection made before the signal, to ask on when no new one is accepted.
            server.terminate()
            late = late_status(server)
            rest = list(running)
        assert first != rest[-1] == b"data: [DONE]"
        assert server.wait() == 0
    assert late == 503
    (done,) = server.events("request.done")
    assert (done["reason"], done["num_generated_tokens"]) == ("length", 480)
    (stop,) = server.events("server.stop")
    assert (stop["num_requests"], stop["num_lost_lines"]) == (1, 0)
    assert server.events("server.crash") == []


@pytest.mark.parametrize(("drain_s", "num_signals"), [("0.5", 1), ("600", 2)])
def test_answers_that_are_cut_off_say_so(smollm2: Path, drain_s: str, num_signals: int) -> None:
    """When the drain is over, or at a second SIGTERM, a running stream ends by an error event, not
    in the middle of nothing; the exit code is 0."""
    arguments = (str(smollm2), "-c", "8192", "--drain-s", drain_s)
    with running_server(*arguments) as server:
        asked = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True}
        with closing(post(server, stream=True, **asked)) as stream:
            running = events(stream)
            next(running)
            server.terminate()
            if num_signals > 1:
                # Two signals at once would be one.
                assert late_status(server) == 503
                server.terminate()
            *_, last = running
        assert json.loads(last.removeprefix(b"data: "))["error"]["kvtrio"]["code"] == "stopped"
        assert server.wait() == 0
    assert "abort" in {done["reason"] for done in server.events("request.done")}
    assert server.events("server.crash") == []


def late_status(server: ServerProcess) -> int:
    """Ask until the signal has arrived: the kernel promises no moment. Bounded by the stream."""
    for _ in range(100):
        with closing(post(server, prompt="x", max_tokens=1)) as response:
            response.read()
            if response.status != 200:
                return response.status
    return 200


def test_sigint_on_an_idle_server(smollm2: Path) -> None:
    """Ctrl-C stops a server that has nothing to do at once, with exit code 0."""
    with running_server(str(smollm2), "--backend", "sim") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
    assert len(server.events("server.stop")) == 1


def test_log_goes_to_a_private_file(smollm2: Path, tmp_path: Path) -> None:
    """--log-file takes the log; stderr, which is no terminal here, stays empty."""
    path = tmp_path / "log.jsonl"
    process = subprocess.Popen(
        command("serve", str(smollm2), "--backend", "sim", "--port", "0", "--log-file", str(path)),
        stderr=subprocess.PIPE,
    )
    with process:
        watch_for(path, b'"server.start"', process)
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert path.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    # A busy machine may have held up the event loop before it listened.
    events = [line["event"] for line in lines if line["event"] != "loop.stall"]
    assert [events[0], events[-1]] == ["server.start", "server.stop"]


def watch_for(path: Path, text: bytes, process: subprocess.Popen[bytes]) -> None:
    """Return when ``text`` is in the file."""
    while text not in (path.read_bytes() if path.exists() else b""):
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(0.1)
            raise AssertionError(f"the server ended with {code} before it started")


def serve_and_fail(*arguments: str) -> str:
    """Run a server that must refuse to start; return its one line."""
    answer = subprocess.run(
        command("serve", *arguments, "--port", "0"), capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 2, answer.stderr
    (line,) = answer.stderr.splitlines()
    assert line.startswith("kvtrio: ")
    return line


def cut(data: bytes) -> bytes:
    return data[:100_000]


def huge_count(data: bytes) -> bytes:
    return data[:8] + (1 << 60).to_bytes(8, "little") + data[16:]


def offset_outside(data: bytes) -> bytes:
    """The last tensor's offset is the eight bytes before the padding of the head."""
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8 + 4
    return data[:at] + (1 << 50).to_bytes(8, "little") + data[at + 8 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "empty"),
        (lambda data: b"PK\x03\x04" + data[4:], "GGUF"),
        (cut, ""),
        (huge_count, ""),
        (offset_outside, "token_embd.weight"),
        (lambda data: data.replace(b"llama", b"llamb"), "llamb"),
    ],
)
def test_damaged_models_are_one_clear_line(
    smollm2: Path, tmp_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    """A hostile or broken file gives exit code 2 and one line: no traceback, no crash."""
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(smollm2.read_bytes()))
    line = serve_and_fail(str(path))
    assert "damaged.gguf" in line
    assert reason in line


def test_what_does_not_fit_into_memory_is_refused_with_the_sum(smollm2: Path) -> None:
    """Pools are never larger than the machine: the line gives weights, pools and what there is."""
    line = serve_and_fail(str(smollm2), "-np", "100000", "-b", "100000")
    assert "not enough memory" in line
    assert all(word in line for word in ("weights", "KV pools", "available"))


def test_a_taken_port_is_refused(smollm2: Path) -> None:
    """Before the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        answer = subprocess.run(
            command("serve", str(smollm2), "--port", port), capture_output=True, text=True
        )
    assert answer.returncode == 2
    assert f"port {port}" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-c", "9000"], "8192"),
        (["--device", "no-such"], "no-such"),
        (["--chat-template", "/no/such/file"], "No such file"),
    ],
)
def test_settings_that_do_not_fit_the_model(
    smollm2: Path, arguments: list[str], reason: str
) -> None:
    """What can only be checked against the model is refused as clearly as a wrong flag."""
    assert reason in serve_and_fail(str(smollm2), *arguments)


def test_chat_command_talks_to_the_server(server: ServerProcess) -> None:
    """kvtrio chat prints the answer to a piped question."""
    answer = subprocess.run(
        command("chat", "--url", server.url),
        input="What is the capital of France? Answer in one word.",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert answer.stdout.strip()
    assert answer.stderr == ""


LONG = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
"""An answer that is there to be looked for."""


def test_the_log_of_a_real_server_has_no_words(server: ServerProcess) -> None:
    """At level debug, with a real tokenizer: neither prompt nor answer is in the log."""
    before = len(server.events("request.done"))
    with closing(post(server, prompt="The zebra's name is Canary7", **LONG)) as response:
        answer = json.loads(response.read())["choices"][0]["text"]
    server.wait_for_events("request.done", before + 1)
    log = b"".join(server.lines).decode()
    assert len(answer) > 10
    assert [text for text in ("zebra", "Canary7", answer) if text in log] == []
