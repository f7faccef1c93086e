"""How much of the machine others took while something was measured; from proc(5)."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

PROC = Path("/proc")
BUSY = (1, 2, 3, 6, 7, 8)
"""Words of the first line of /proc/stat: user, nice, system, irq, softirq, steal."""
USED = (11, 12)
"""Fields of /proc/PID/stat after the command's name: utime, stime."""


@frozen
class Load:
    """Processor seconds since the machine started."""

    at_s: float
    all_s: float
    own_s: float
    """Of the processes that are measured, and of this one."""

    @classmethod
    def of(cls, pids: Iterable[int]) -> "Load | None":
        """``None`` where there is no /proc."""
        try:
            words = (PROC / "stat").read_bytes().split(maxsplit=9)
        except OSError:
            return None
        own_s = time.process_time() + sum(map(_used_s, pids))
        return cls(time.monotonic(), _seconds(words[i] for i in BUSY), own_s)

    def others_since(self, before: "Load") -> float:
        """The share of all processors that went to others."""
        others_s = (self.all_s - before.all_s) - (self.own_s - before.own_s)
        return max(0.0, others_s) / ((self.at_s - before.at_s) * (os.cpu_count() or 1))


def _used_s(pid: int) -> float:
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return _seconds(fields[i] for i in USED)


def _seconds(ticks: Iterable[bytes]) -> float:
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
