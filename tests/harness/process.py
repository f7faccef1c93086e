"""A real ``kvtrio serve`` in a process of its own, on a free port."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from attrs import define, field

START_S = 120.0
"""Loading a small model takes seconds; a loaded machine gets a good deal more."""
STOP_S = 60.0


@define(eq=False)
class ServerProcess:
    """A running server; its log, which goes to stderr, is kept line by line."""

    process: subprocess.Popen[bytes]
    lines: list[bytes] = field(factory=list)
    _has_ended: bool = False
    _changed: threading.Condition = field(factory=threading.Condition)
    _reader: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,))
        self._reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def wait_for_events(self, name: str, count: int) -> list[dict[str, Any]]:
        """Return the log lines of one kind once there are ``count`` of them."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_ended or len(self.events(name)) >= count, START_S
            )
        assert len(self.events(name)) >= count, b"".join(self.lines).decode()
        return self.events(name)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of one kind, so far."""
        parsed = [json.loads(line) for line in self.lines if line.startswith(b"{")]
        return [line for line in parsed if line["event"] == name]

    @property
    def url(self) -> str:
        port = self.events("server.start")[0]["port"]
        return f"http://127.0.0.1:{port}"

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Exit code; all log lines have arrived afterwards."""
        code = self.process.wait(STOP_S)
        self._reader.join(STOP_S)
        return code


def command(*arguments: str) -> list[str]:
    # -P: the checkout's own folder must not shadow the installed package.
    return [sys.executable, "-P", "-m", "kvtrio", *arguments]


@contextmanager
def running_server(*arguments: str) -> Iterator[ServerProcess]:
    """``kvtrio serve ARGUMENTS`` on a free port; stopped at the end if it still runs."""
    environment = {k: v for k, v in os.environ.items() if k != "KVTRIO_API_KEY"}
    process = subprocess.Popen(
        command("serve", *arguments, "--port", "0"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )
    with process:
        server = ServerProcess(process)
        try:
            server.wait_for_events("server.start", 1)
            yield server
        finally:
            process.kill()
            server.wait()
