"""SIGINT and SIGTERM before the server serves: a stop as asked, exit code 0."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtrio.cli import exits

pytestmark = pytest.mark.slow

LIMIT_S = 30.0
WAIT = """
import sys, time
from pathlib import Path
from kvtrio.cli import main
def wait(*_, **__):
    try:
        print("here", flush=True)
        time.sleep(30)
    finally:
        print("cleaned up", flush=True)
"""
IMPORTING = """
class Finder:
    def find_spec(self, name, *_):
        if name == "trio":
            wait()
sys.meta_path.insert(0, Finder())
"""
FETCHING = """
import kvtrio.model.fetch as models
models.fetch_entry = wait
"""
LOADING = """
from kvtrio.backends.sim import SimBackend
SimBackend.load = wait
"""
RUN = "\nsys.exit(main(sys.argv[1:]))"


def stopped(code: str, number: signal.Signals, *arguments: str) -> tuple[int, str, str]:
    """Send a signal once the process says where it is; return code, output and errors."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", WAIT + code + RUN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        first = process.stdout.readline()
        process.send_signal(number)
        rest, err = process.communicate(timeout=LIMIT_S)
        limit.cancel()
    return process.returncode, first + rest, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("code", "out"),
    [
        (IMPORTING, "here\n"),
        (FETCHING, "here\ncleaned up\n"),
        (LOADING, "here\n"),
    ],
)
def test_a_stop_while_the_server_starts(
    shared: Path, code: str, out: str, number: signal.Signals
) -> None:
    """At once and silent; a download that is under way is cleaned up."""
    model = "smollm2" if code == FETCHING else str(shared / "tiny" / "models" / "qwen3.gguf")
    arguments = ["serve", model, "--port", "0", "--backend", "sim"]
    assert stopped(code, number, *arguments) == (exits.OK, out, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_fetch_that_is_cut_short(number: signal.Signals) -> None:
    """It cleans up, and the shell sees that there is no model."""
    answer = stopped(FETCHING, number, "fetch", "smollm2")
    assert answer == (exits.INTERRUPTED, "here\ncleaned up\n", "")
