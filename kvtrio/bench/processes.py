"""A server started from a command: its port, its memory, and that nothing of it stays behind."""

import os
import shlex
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

import trio
from attrs import frozen

from kvtrio.bench.errors import BenchError

PORT = "{port}"
PATIENCE_S = 10.0
"""After SIGTERM, until SIGKILL."""
POLL_S = 0.05
TAIL_BYTES = 2000
PROC = Path("/proc")
SESSION = 3
"""Field of /proc/PID/stat after the command's name: proc_pid_stat(5), field 6."""


@frozen(eq=False)
class ServerProcess:
    """A running command, the leader of a session of its own: all that it starts is found by it."""

    process: subprocess.Popen[bytes]
    port: int
    log: IO[bytes]

    @classmethod
    def start(cls, command: str) -> Self:
        """Run ``command`` with a free port in place of ``{port}``. Raises ``BenchError``."""
        port = free_port()
        log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        try:
            words = [word.replace(PORT, str(port)) for word in shlex.split(command)]
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            log.close()
            raise BenchError(f"cannot run {command!r}: {error}") from None
        return cls(process, port, log)

    def check(self) -> None:
        """Raises ``BenchError`` with the end of its output if the server is no longer there."""
        code = self.process.poll()
        if code is not None:
            raise BenchError(f"the server ended with code {code}; its output ends: {self._tail()}")

    def _tail(self) -> str:
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - TAIL_BYTES))
        lines = self.log.read().decode("utf-8", "replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "(nothing)"

    def resident_bytes(self) -> int | None:
        """Memory of all its processes together; what they share counts in each. None: unknown."""
        sizes = [_resident(pid) for pid in self.members()]
        return sum(sizes) or None

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to whatever does not end in time. Cannot be cancelled."""
        with trio.CancelScope(shield=True):
            self._signal(signal.SIGTERM)
            with trio.move_on_after(PATIENCE_S):
                # Nothing tells when processes end that are not this one's children.
                while self.process.poll() is None or any(self.members()):  # noqa: ASYNC110
                    await trio.sleep(POLL_S)
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.log.close()

    def _signal(self, number: signal.Signals) -> None:
        """To each once: at a second SIGTERM some servers cut their answers off."""
        members = list(self.members())
        with suppress(ProcessLookupError):
            if not members and self.process.poll() is None:
                os.killpg(self.process.pid, number)
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def members(self) -> Iterator[int]:
        """All of its session, also in other process groups; none where there is no /proc."""
        for path in PROC.glob("[0-9]*/stat"):
            if _session(path) == self.process.pid:
                yield int(path.parent.name)


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _session(stat: Path) -> int | None:
    """The session of a process; None if it is gone, or gone but for its exit code."""
    try:
        fields = stat.read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else int(fields[SESSION])


def _resident(pid: int) -> int:
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_bytes().splitlines():
            if line.startswith(b"VmRSS:"):
                return int(line.split()[1]) << 10
    return 0
