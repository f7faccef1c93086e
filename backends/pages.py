"""Memory that is given back place by place, so that several pools can share one limit.

1. A place can be given back if all its pieces are whole pages.
2. Such pools have small pages: of a large one nothing is had back until all its places are free.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

NO_RESERVE = 0x4000
"""MAP_NORESERVE of mmap(2) on Linux: address space alone, for each pool as much as for all."""


def can_give_back(sizes: Iterable[int]) -> bool:
    """``sizes``: bytes of the pieces that lie apart from each other, of any place."""
    return sys.platform.startswith("linux") and not any(size % mmap.PAGESIZE for size in sizes)


def whole(num_bytes: int) -> int:
    """As many as so many bytes need, in whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def give_back(address: int, num_bytes: int) -> None:
    """Whole pages of private memory: zeros, and none of RAM until they are written again."""
    if _advise(address, num_bytes, mmap.MADV_DONTNEED):
        raise OSError("memory cannot be given back")


def keep_small(address: int, num_bytes: int) -> None:
    """From now on these pages are had one by one; where there are no others, that is so anyway."""
    _advise(address, num_bytes, mmap.MADV_NOHUGEPAGE)


def _advise(address: int, num_bytes: int, advice: int) -> int:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(address, num_bytes, advice)) if num_bytes else 0


def zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Small pages, untouched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    pages = np.frombuffer(memory, np.uint8, num_bytes)
    keep_small(pages.ctypes.data, num_bytes)
    return pages
