"""Memory for coming blocks, asked of the system while nobody is served.

The arenas of K and V take no RAM until they are written, and then page by page, for which the first
to write there waits: on a virtual machine whose host gives memory late, 4 ms for 2 MiB, in all a
twentieth of the time in which a long prompt is read. So a thread asks for what comes next whenever
no step has run for a moment. New blocks are taken in ascending order; where they are not, or where
the system cannot do it, nothing is lost.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

FIRST_BYTES, AHEAD_BYTES = 96 << 20, 144 << 20
"""So much over all arenas together: before the first request, and behind what was used. Pages may
be large, and are had whole."""
UNIT_BYTES = 2 << 20
"""At most so much of an arena at once: whoever maps memory meanwhile waits for it."""
QUIET_S = 0.05
"""Without a step for so long, nobody is served."""
PAGE = 4096
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), Linux 5.14."""

Populate = Callable[[int, int], bool]
"""Have (address, size in bytes) in RAM, unchanged; False: that is not to be had."""


@frozen
class Arena:
    """Blocks of one layer, one behind the other."""

    address: int
    block_bytes: int
    num_blocks: int

    def part(self, first: int, last: int) -> tuple[int, int]:
        """Address and size of the pages of blocks first .. last - 1."""
        start = self.address + min(first, self.num_blocks) * self.block_bytes
        end = self.address + min(last, self.num_blocks) * self.block_bytes
        start = start // PAGE * PAGE
        return start, end - start


@define(eq=False)
class Ahead:
    """``begin`` and ``end`` each step, from one thread; ``close`` before the arenas go."""

    _arenas: Sequence[Arena]
    _populate: Populate
    _num_first: int = field(init=False)
    _num_ahead: int = field(init=False)
    """Blocks."""
    _num_had: int = field(init=False, default=0)
    """Blocks that were asked for."""
    _reached: int = field(init=False, default=0)
    """Blocks up to the last one that a step named."""
    _num_steps: int = field(init=False, default=0)
    _is_busy: bool = field(init=False, default=False)
    _is_wanted: threading.Event = field(init=False, factory=threading.Event)
    _is_closing: threading.Event = field(init=False, factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        each = sum(arena.block_bytes for arena in self._arenas)
        self._num_first, self._num_ahead = (
            total // each if each else 0 for total in (FIRST_BYTES, AHEAD_BYTES)
        )
        self._thread = threading.Thread(target=self._work, name="kvtrio memory", daemon=True)
        self._is_wanted.set()
        self._thread.start()

    def begin(self, reached: int) -> None:
        """A step begins, and blocks before ``reached`` have been named so far."""
        self._num_steps += 1
        self._is_busy, self._reached = True, reached
        # Half of it at a time: every block anew would be a call per arena for every block.
        if reached + self._num_ahead // 2 > self._num_had and not self._is_wanted.is_set():
            self._is_wanted.set()

    def end(self) -> None:
        """It has ended."""
        self._is_busy = False

    def close(self) -> None:
        """Wait for the thread. Idempotent."""
        self._is_closing.set()
        self._is_wanted.set()
        self._thread.join()

    def _work(self) -> None:
        while self._is_wanted.wait():
            num_steps = self._num_steps
            if self._is_closing.wait(QUIET_S):
                return
            if self._is_busy or num_steps != self._num_steps:
                continue
            self._is_wanted.clear()
            target = self._reached + self._num_ahead if self._reached else self._num_first
            if self._have(target, num_steps):
                self._num_had = target
            elif num_steps == self._num_steps:
                return  # not to be had
            else:
                self._is_wanted.set()

    def _have(self, target: int, num_steps: int) -> bool:
        """Whether all of it could be had before a step began, or the end."""
        for arena in self._arenas:
            start, size = arena.part(self._num_had, target)
            for offset in range(0, size, UNIT_BYTES):
                if num_steps != self._num_steps or self._is_closing.is_set():
                    return False
                if not self._populate(start + offset, min(UNIT_BYTES, size - offset)):
                    return False
        return True


def populate_function() -> Populate:
    """The system's, if it has one."""
    if not sys.platform.startswith("linux"):
        return lambda address, size: False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda address, size: madvise(address, size, POPULATE_WRITE) == 0
