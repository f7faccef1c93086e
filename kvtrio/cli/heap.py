"""The C library's heap: memory that was freed stays with the process.

State goes to files and comes from there as bytes of some hundred kilobytes each, many megabytes at
a time. The GNU C library gives such memory back to the system as soon as it is free; the next piece
gets it anew, and the system clears every page again. On the two-core machine 140 MB took 61 ms to
read into memory that was new and 6 ms into memory that was used before; a session of that size
is restored in 120 ms of processor time instead of 160.
"""

import ctypes

KEPT_BYTES = 64 << 20
"""At the end of a heap, of which there is one for each thread that moves state."""
_IN_HEAP_BYTES = 16 << 20
"""Larger pieces are memory of their own, as ever; half of a heap is the most that is taken."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3), malloc.h


def keep_freed() -> bool:
    """For the rest of the process; False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_TRIM_THRESHOLD, KEPT_BYTES), (_MMAP_THRESHOLD, _IN_HEAP_BYTES))
    return all(mallopt(name, value) == 1 for name, value in settings)
