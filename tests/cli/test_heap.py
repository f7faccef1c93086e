"""The C library's heap while state is moved."""

import resource
import subprocess
import sys

SOURCE = """
import resource
from kvtrio.cli.heap import keep_freed
assert keep_freed()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [bytes(300_000) + b"x" for _ in range(60)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(), min(faults() for _ in range(3)))
"""


def test_freed_memory_is_used_again() -> None:
    """What was had from the system for some megabytes of state serves the next ones: pages are new
    once."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", SOURCE], check=True, capture_output=True, text=True
    )
    first, later = map(int, done.stdout.split())
    assert first > 60 * 300_000 // resource.getpagesize() // 2
    assert later < first / 10
