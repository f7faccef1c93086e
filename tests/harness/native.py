"""The compiled kernels as the tests see them: every instruction set that this machine can run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtrio.kernels.cpu_library import (
    ISA_VARIABLE,
    Library,
    LibraryMissing,
    LibraryUnfit,
    load_library,
    supported_isas,
)


@contextmanager
def chosen_isa(isa: str) -> Iterator[None]:
    """Within, the library of one instruction set is the one that loads."""
    before = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = isa
    try:
        yield
    finally:
        del os.environ[ISA_VARIABLE]
        if before is not None:
            os.environ[ISA_VARIABLE] = before


def library(isa: str) -> Library:
    """The library of one instruction set; skips (in CI: fails) where none is built."""
    try:
        with chosen_isa(isa):
            return load_library()
    except LibraryMissing as error:
        pytest.skip(error.reason)


def isas() -> tuple[str, ...]:
    """What to run a test of the kernels for; without a library one, whose tests say so."""
    try:
        with chosen_isa("portable"):
            return supported_isas(load_library())
    except (LibraryMissing, LibraryUnfit):
        return ("portable",)
