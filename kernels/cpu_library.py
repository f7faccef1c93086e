"""The compiled kernels: finds the library that suits this CPU, and makes sure that it is current.

One library per instruction set lies in ``cpu/``, all with the interface of ``cpu/kvt.h``. The
environment variable KVTRIO_ISA (portable, avx2 or avx512) chooses another than the best.
"""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from struct import unpack_from

from kvtrio.kernels.cpu_digest import source_digest

ABI_VERSION = 4
"""Of ``kvt.h``; both sides change it together."""

FOLDER = Path(__file__).parent / "cpu"
ISA_VARIABLE = "KVTRIO_ISA"
PORTABLE = "portable"
ELF64 = b"\x7fELF\x02\x01"
"""How little-endian ELF files for 64 bits begin."""
ELF_HEADER_BYTES = 64
NEEDED_FEATURES = {"avx512": 1 << 1, "avx2": 1 << 0, PORTABLE: 0}
"""By instruction set, best first: the bits of ``kvt_features`` that it needs."""


class LibraryMissing(Exception):
    """There are no compiled kernels here; ``reason`` is one clear line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LibraryUnfit(Exception):
    """The wanted library cannot be used; the message is one clear line."""


class LibraryStale(LibraryUnfit):
    """It was made from other sources than those beside it."""


@dataclass(frozen=True)
class Library:
    """A loaded library; its functions still have ctypes' default types."""

    cdll: ctypes.CDLL
    isa: str
    path: Path


def load_library() -> Library:
    """Load the best library that is there and that this CPU can run, or what KVTRIO_ISA names.

    Raises ``LibraryMissing`` where none was built, ``LibraryStale`` if it does not belong to these
    sources, ``LibraryUnfit`` if KVTRIO_ISA asks for what is unknown, not built or not supported.
    """
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted and wanted not in NEEDED_FEATURES:
        raise LibraryUnfit(f"{ISA_VARIABLE} is none of {', '.join(NEEDED_FEATURES)}")
    portable = _open(PORTABLE)
    supported = supported_isas(portable)
    if wanted and wanted not in supported:
        raise LibraryUnfit(f"{ISA_VARIABLE} is {wanted}, which this CPU does not support")
    if wanted and not _path(wanted).exists():
        raise LibraryUnfit(f"{ISA_VARIABLE} is {wanted}, whose library is not built")
    isa = wanted or next(isa for isa in supported if _path(isa).exists())
    return portable if isa == PORTABLE else _open(isa)


def supported_isas(portable: Library) -> tuple[str, ...]:
    """Instruction sets that this CPU and its operating system can run, best first."""
    features = portable.cdll.kvt_features
    features.restype = ctypes.c_uint32
    has = features()
    return tuple(isa for isa, needed in NEEDED_FEATURES.items() if needed & ~has == 0)


def _path(isa: str) -> Path:
    return FOLDER / f"_{isa}.so"


def _open(isa: str) -> Library:
    path = _path(isa)
    if not path.exists():
        raise LibraryMissing("the compiled kernels are not built")
    if not _is_whole(path):
        raise LibraryUnfit(f"{path.name} was cut short; rebuild it with: make native")
    try:
        cdll = ctypes.CDLL(str(path))
    except OSError:
        raise LibraryMissing(f"{path.name} is no library for this machine") from None
    _check_sources(cdll, path)
    if cdll.kvt_abi_version() != ABI_VERSION:
        raise LibraryUnfit(f"{path.name} belongs to another version of kvtrio; install it again")
    return Library(cdll, isa, path)


def _is_whole(path: Path) -> bool:
    """Whether a 64-bit ELF file reaches to the end of its section headers, which come last.

    A full disk can cut one short, and to load that kills the process. Of other files the loader
    says what they are.
    """
    with path.open("rb") as file:
        head = file.read(ELF_HEADER_BYTES)
    if len(head) < ELF_HEADER_BYTES or not head.startswith(ELF64):
        return True
    (start,) = unpack_from("<Q", head, 40)
    size, count = unpack_from("<HH", head, 58)
    return int(start + size * count) <= path.stat().st_size


def _check_sources(cdll: ctypes.CDLL, path: Path) -> None:
    """Only where the sources lie beside the library, as in an editable install."""
    if not (path.parent / "library.cpp").exists():
        return
    built_from = cdll.kvt_digest
    built_from.restype = ctypes.c_char_p
    if built_from() != source_digest(path.parent).encode():
        raise LibraryStale(f"{path.name} is older than its sources; rebuild it with: make native")
