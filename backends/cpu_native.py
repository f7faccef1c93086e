"""The compiled kernels in use: library, threads, and memory that the kernels read."""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from kvtrio.backends.base import BackendError
from kvtrio.kernels import cpu_abi as abi
from kvtrio.kernels import cpu_single as single
from kvtrio.kernels.cpu_library import LibraryMissing, LibraryUnfit, load_library

ALIGNMENT = 64
MAX_THREADS = 1024
"""Of a ``kvt_team``."""
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@define(eq=False)
class Native:
    """A loaded library with its own threads; all calls come from one thread. ``close`` it last."""

    cdll: ctypes.CDLL
    isa: str
    """The instruction set that it is compiled for."""
    team: int
    """The threads: a ``kvt_team*``."""
    num_threads: int
    _regions: list[tuple[int, int]] = field(factory=list)
    """Address and size of what was allocated."""

    @classmethod
    def open(cls, num_threads: int | None) -> Self:
        """``None``: as many threads as the process has cores.

        Raises BackendError where the library is missing or cannot be used.
        """
        try:
            library = load_library()
            abi.declare(library.cdll)
            single.declare(library.cdll)
        except (LibraryMissing, LibraryUnfit, abi.AbiMismatch) as error:
            raise BackendError(f"the CPU kernels: {error}") from None
        count, team = num_threads or min(num_cores(), MAX_THREADS), ctypes.c_void_p()
        if count > MAX_THREADS:
            raise BackendError(f"{count} threads cannot be had: {MAX_THREADS} is the most")
        result = library.cdll.kvt_team_new(count, ctypes.byref(team))
        try:
            abi.check(library.cdll, result)
        except (MemoryError, RuntimeError) as error:
            raise BackendError(f"{count} threads cannot be had: {error}") from None
        return cls(library.cdll, library.isa, team.value or 0, count)

    def check(self, result: int) -> int:
        """``result`` of a call, if it is no error; see ``cpu_abi.check``."""
        return abi.check(self.cdll, result)

    def allocate(self, num_bytes: int) -> int:
        """Address of zeroed memory that takes no RAM until it is touched; 0 bytes have one too.

        Raises BackendError where there is none.
        """
        address = self.cdll.kvt_alloc(max(num_bytes, 1))
        if not address:
            raise BackendError(f"not enough memory for {num_bytes / (1 << 20):,.0f} MiB")
        self._regions.append((address, max(num_bytes, 1)))
        return int(address)

    def close(self) -> None:
        """Give threads and memory back. Nothing that uses them may be left; idempotent."""
        self.cdll.kvt_team_free(self.team)
        self.team = 0
        for address, num_bytes in self._regions:
            self.cdll.kvt_free(address, num_bytes)
        self._regions.clear()


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def floats_at(address: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A view of the library's memory as float32; it must not outlive that memory."""
    count = int(np.prod(shape))
    raw = (ctypes.c_float * count).from_address(address)
    return np.ctypeslib.as_array(raw).reshape(shape)


def num_cores() -> int:
    """Cores that this process may use: two threads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):  # another system than Linux
        return os.cpu_count() or 1
    return len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(cpu: int) -> str:
    try:
        return Path(SIBLINGS.format(cpu)).read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def address_of(array: NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


def table_of(kind: type[ctypes.Structure], items: Iterable[ctypes.Structure]) -> Any:
    """Structures one behind the other, as the interface takes them."""
    listed = list(items)
    return (kind * len(listed))(*listed)
