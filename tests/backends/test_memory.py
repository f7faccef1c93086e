"""What fits into memory, whatever backend asks."""

from pathlib import Path

import pytest
from attrs import evolve

from kvtrio.backends import memory
from kvtrio.backends.base import BackendError


def test_memory_is_compared_with_what_is_available():
    """Exactly enough is enough, and where nobody knows, nothing is refused."""
    needs = memory.Needs(weights=3, pools=5, host=2)
    memory.require_memory(needs, 10)
    memory.require_memory(needs, None)
    with pytest.raises(BackendError):
        memory.require_memory(evolve(needs, host=3), 10)


@pytest.mark.parametrize(
    ("available", "taken"),
    [(None, 100), (1000, 100), (208, 100), (108, 50), (9, 0), (8, 0), (7, 0)],
)
def test_ram_that_nobody_asked_for_shrinks(available: int | None, taken: int):
    """To half of what weights and pools leave, if that is less."""
    needs = memory.Needs(weights=3, pools=5, host=100)
    assert memory.shrunk_host_bytes(needs, available) == taken


def test_available_memory_is_read_from_the_system(tmp_path: Path):
    """The kernel's own estimate counts, in bytes; without it the answer is unknown."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:   42 kB\n", encoding="ascii")
    assert memory.meminfo_available(meminfo) == 42 * 1024
    meminfo.write_text("MemTotal: 100 kB\n", encoding="ascii")
    assert memory.meminfo_available(meminfo) is None
    assert memory.meminfo_available(tmp_path / "absent") is None


def test_an_adapter_that_does_not_fit_is_refused():
    """With its size and what there is; where nobody knows, nothing is refused."""
    memory.require_room(10, 10)
    memory.require_room(10, None)
    with pytest.raises(BackendError, match="not enough memory for an adapter of 3 MiB"):
        memory.require_room(3 << 20, 2 << 20)
