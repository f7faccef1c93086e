"""A whole server in this process: how it starts, how it fails, what it then says."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from kvtrio import plugins
from kvtrio.backends.sim import SimBackend
from kvtrio.cli import exits, main
from kvtrio.cli.client import ChatClient, ChatError, Message
from kvtrio.core.batch import Batch, StepResult

CANARY = "canary-in-an-exception"


@define(eq=False)
class Reader:
    """Reads the server's log, a named pipe, in a thread; calls ``on_start`` with the port."""

    path: Path
    on_start: Callable[[int], None]
    lines: list[dict[str, Any]] = field(factory=list)
    _thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        os.mkfifo(self.path)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self.path.open("rb") as pipe:
            for line in pipe:
                self.lines.append(json.loads(line))
                if self.lines[-1]["event"] == "server.start":
                    self.on_start(self.lines[-1]["port"])

    def join(self) -> None:
        self._thread.join(10)


@pytest.fixture
def serve_with(
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Run ``kvtrio serve`` on a small model with a backend class of the test's; return the exit
    code and the log."""

    def run(
        backend: type, on_start: Callable[[int], None] = lambda port: None
    ) -> tuple[int, list[dict[str, Any]]]:
        real = plugins.load

        def load(group: str, name: str) -> Any:
            return backend if group == plugins.BACKENDS else real(group, name)

        monkeypatch.setattr(plugins, "load", load)
        model = shared / "tiny" / "models" / "qwen3.gguf"
        reader = Reader(tmp_path / "log", on_start)
        log = ["--log-file", str(reader.path), "--log-level", "debug"]
        code = main(["serve", str(model), "--port", "0", "-c", "128", *log])
        reader.join()
        return code, reader.lines

    return run


Serve = Callable[..., tuple[int, list[dict[str, Any]]]]


class BrokenAtLoad(SimBackend):
    """Cannot be loaded, for no reason that a user could mend."""

    @classmethod
    def load(cls, *_: Any) -> Any:
        raise RuntimeError(CANARY)


class BrokenAtStep(SimBackend):
    """Loads, and dies at the first step."""

    def step(self, batch: Batch) -> StepResult:
        raise ArithmeticError(CANARY)


def test_a_backend_that_cannot_load_is_a_bug(
    serve_with: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, places on stderr, the class in the log, and no message anywhere."""
    code, log = serve_with(BrokenAtLoad)
    err = capsys.readouterr().err
    assert code == exits.BUG
    assert "builtins.RuntimeError" in err
    assert CANARY not in err + str(log)
    assert [(line["event"], line["error"]) for line in log] == [
        ("server.crash", "builtins.RuntimeError")
    ]


def test_a_step_that_fails_ends_the_server(
    serve_with: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client is told, the process ends with code 1, and the exception's words stay inside."""
    refusals: list[str] = []

    def ask(port: int) -> None:
        client = ChatClient.for_url(f"http://127.0.0.1:{port}")
        try:
            list(client.stream([Message("user", CANARY)]))
        except ChatError as error:
            refusals.append(str(error))
            if "answered 4" in refusals[0]:  # never came to the step: end the server all the same
                os.kill(os.getpid(), signal.SIGTERM)

    code, log = serve_with(BrokenAtStep, ask)
    err = capsys.readouterr().err
    assert code == exits.BUG
    assert "builtins.ArithmeticError" in err
    assert CANARY not in err + str(log) + "".join(refusals)
    assert len(refusals) == 1
    assert log[-1]["error"] == "builtins.ArithmeticError"


def test_a_clean_run_is_told_from_start_to_stop(serve_with: Serve) -> None:
    """Start with sizes, steps at level debug, one line for the request, and the stop."""
    answers: list[str] = []

    def ask(port: int) -> None:
        client = ChatClient.for_url(f"http://127.0.0.1:{port}")
        try:
            answers.append("".join(client.stream([Message("user", "Hi")])))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    code, log = serve_with(SimBackend, ask)
    assert code == exits.OK
    assert len(answers) == 1
    start, *middle, stop = [line for line in log if line["event"] != "loop.stall"]
    steps = [line for line in middle if line["event"] == "sched.step"]
    (done,) = [line for line in middle if line["event"] == "request.done"]
    assert (start["event"], start["num_places"], start["num_groups"]) == ("server.start", 4, 1)
    assert done["num_prompt_tokens"] == done["num_computed_tokens"] + done["num_cached_tokens"]
    assert (stop["event"], stop["num_requests"]) == ("server.stop", 1)
    assert [line["event"] for line in middle].count("cache.match") <= 1
    (cost,) = [line for line in middle if line["event"] == "sched.cost"]
    assert stop["num_steps"] == cost["num_observed"] == len(steps)
    known = {"sched.step", "sched.cost", "request.done", "cache.match"}
    assert {line["event"] for line in middle} <= known
