"""Memory that is asked for before it is needed."""

import ctypes
import itertools
import mmap
import threading
from pathlib import Path

import pytest
from attrs import define, field

from kvtrio.backends import cpu_ahead
from kvtrio.backends.cpu_ahead import Ahead, Arena, populate_function

BLOCK = 8192


@define(eq=False)
class Asked:
    """A system that notes what it is asked for."""

    answer: bool = True
    parts: list[tuple[int, int]] = field(factory=list)
    is_through: threading.Event = field(factory=threading.Event)
    last: int = 0
    """Where the last part ends that a test waits for."""

    def __call__(self, address: int, size: int) -> bool:
        self.parts.append((address, size))
        if address + size >= self.last:
            self.is_through.set()
        return self.answer


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks ahead, soon."""
    monkeypatch.setattr(cpu_ahead, "FIRST_BYTES", 40 * BLOCK)
    monkeypatch.setattr(cpu_ahead, "AHEAD_BYTES", 40 * BLOCK)
    monkeypatch.setattr(cpu_ahead, "UNIT_BYTES", 4 * BLOCK)
    monkeypatch.setattr(cpu_ahead, "QUIET_S", 0.001)


def test_blocks_are_asked_for_before_they_are_named() -> None:
    """At first, and when steps have come near, but not within a step: each part of each arena once,
    in pieces, and nothing behind an arena's end."""
    asked = Asked(last=BLOCK * (1000 + 20))
    arenas = (Arena(0, BLOCK, 100), Arena(BLOCK * 1000, BLOCK, 100))
    ahead = Ahead(arenas, asked)
    assert asked.is_through.wait(10)
    asked.is_through.clear()
    asked.last = BLOCK * 1100
    ahead.begin(95)
    assert not asked.is_through.wait(0.02)
    ahead.end()
    assert asked.is_through.wait(10)
    ahead.close()
    ahead.close()
    for arena in arenas:
        mine = [part for part in asked.parts if arena.address <= part[0] < arena.address + 10**6]
        assert mine[0][0] == arena.address
        assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(mine))
        assert sum(size for _, size in mine) == 100 * BLOCK
        assert max(size for _, size in mine) == 4 * BLOCK


def test_a_system_that_refuses_is_asked_once() -> None:
    """The thread ends by itself, and steps go on."""
    asked = Asked(answer=False)
    ahead = Ahead((Arena(0, BLOCK, 100),), asked)
    assert asked.is_through.wait(10)
    ahead.begin(50)
    ahead.end()
    ahead.close()
    assert len(asked.parts) == 1


def test_without_arenas_nothing_is_asked_for() -> None:
    """As in a model without attention."""
    asked = Asked()
    ahead = Ahead((), asked)
    ahead.begin(5)
    ahead.end()
    ahead.close()
    assert asked.parts == []


def test_what_was_asked_for_is_there_and_unchanged() -> None:
    """The system's own way, on real memory; it may be too old for it."""
    populate = populate_function()
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as memory:
        memory[5] = 77
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if not populate(address, len(memory)):
            pytest.skip("this system cannot do it")
        assert memory[5] == 77
        pages = Path("/proc/self/smaps").read_text().partition(f"{address:x}-")[2]
        assert f"Rss:                 {len(memory) // 1024} kB" in pages[:600]
