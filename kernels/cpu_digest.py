"""One number for all sources of the compiled kernels: in a library, it says what that was made of.

Used by the build (``kernels/cpu/build_native.py``) and by the check at load; standard library only.
"""

from hashlib import blake2b
from pathlib import Path

SUFFIXES = frozenset({".cpp", ".hpp", ".h"})


def source_files(folder: Path) -> list[Path]:
    """Return the C++ sources in ``folder``, by name; it has no folders inside."""
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)


def source_digest(folder: Path) -> str:
    """Return 32 hexadecimal digits over the names and contents of all sources in ``folder``."""
    total = blake2b(digest_size=16)
    for path in source_files(folder):
        content = path.read_bytes()
        total.update(f"{path.name} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()
