"""Which compiled library is loaded, and which is refused."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.native import chosen_isa, isas, library
from kvtrio.kernels import cpu_library
from kvtrio.kernels.cpu_digest import source_digest
from kvtrio.kernels.cpu_library import (
    ABI_VERSION,
    LibraryMissing,
    LibraryStale,
    LibraryUnfit,
    load_library,
)

SOURCE = """
extern "C" int kvt_abi_version() {{ return {abi}; }}
extern "C" unsigned kvt_features() {{ return {features}; }}
extern "C" const char* kvt_digest() {{ return "{digest}"; }}
"""
AVX2, AVX512 = (cpu_library.NEEDED_FEATURES[isa] for isa in ("avx2", "avx512"))
Build = Callable[..., None]


@pytest.fixture
def whole() -> bytes:
    """The portable library; asked for before ``folder`` takes its place."""
    return library("portable").path.read_bytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpu_library, "FOLDER", tmp_path)
    monkeypatch.delenv("KVTRIO_ISA", raising=False)
    return tmp_path


@pytest.fixture
def build(folder: Path) -> Build:
    """Compile small libraries with answers of the test's choice."""

    def run(
        *names: str, features: int = AVX2 | AVX512, abi: int = ABI_VERSION, digest: str = ""
    ) -> None:
        if shutil.which("c++") is None:
            pytest.skip("no C++ compiler")
        text = SOURCE.format(abi=abi, features=features, digest=digest)
        for name in names:
            subprocess.run(
                ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", folder / f"_{name}.so"],
                input=text.encode(),
                check=True,
            )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("isa", isas())
def test_the_libraries_here_belong_to_these_sources(isa: str) -> None:
    """Every instruction set of this machine has its library, up to date with the sources."""
    assert library(isa).isa == isa


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "built", "isa"),
    [
        (AVX2 | AVX512, ("portable", "avx2", "avx512"), "avx512"),
        (AVX2, ("portable", "avx2", "avx512"), "avx2"),
        (0, ("portable", "avx2", "avx512"), "portable"),
        (AVX2 | AVX512, ("portable", "avx2"), "avx2"),
    ],
)
def test_the_best_library_that_can_run_is_loaded(
    build: Build, features: int, built: tuple[str, ...], isa: str
) -> None:
    """The CPU decides, and what was built."""
    build(*built, features=features)
    assert load_library().isa == isa


@pytest.mark.slow
def test_the_variable_chooses(build: Build) -> None:
    """KVTRIO_ISA names a library by its instruction set."""
    build("portable", "avx2", "avx512")
    with chosen_isa("avx2"):
        assert load_library().isa == "avx2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "says"),
    [("sse9", "none of"), ("avx512", "does not support"), ("avx2", "not built")],
)
def test_what_the_variable_cannot_have_is_refused(build: Build, isa: str, says: str) -> None:
    """An instruction set that is unknown, that the CPU lacks or whose library is not there."""
    build("portable", features=AVX2)
    with chosen_isa(isa), pytest.raises(LibraryUnfit, match=says):
        load_library()


def test_no_library_is_told_apart(folder: Path) -> None:
    """Whoever installed without a compiler gets a reason, not a fault."""
    with pytest.raises(LibraryMissing, match="not built"):
        load_library()


def test_a_file_that_is_no_library_counts_as_none(folder: Path) -> None:
    """For example one of another machine, in a shared folder."""
    (folder / "_portable.so").write_bytes(b"not ELF")
    with pytest.raises(LibraryMissing, match="no library for this machine"):
        load_library()


@pytest.mark.parametrize("num_bytes", [1000, 300_000, -1])
def test_a_library_that_was_cut_short_is_refused(
    whole: bytes, folder: Path, num_bytes: int
) -> None:
    """One line instead of the signal that ends a process which maps such a file."""
    (folder / "_portable.so").write_bytes(whole[:num_bytes])
    with pytest.raises(LibraryUnfit, match="cut short"):
        load_library()


@pytest.mark.slow
def test_a_library_of_other_sources_is_refused(build: Build, folder: Path) -> None:
    """The message has the command that helps."""
    (folder / "library.cpp").write_text("// one", encoding="utf-8")
    build("portable", features=0, digest=source_digest(folder))
    assert load_library().isa == "portable"
    (folder / "library.cpp").write_text("// two", encoding="utf-8")
    with pytest.raises(LibraryStale, match="make native"):
        load_library()


@pytest.mark.slow
def test_without_sources_nothing_can_be_stale(build: Build) -> None:
    """An installed wheel has no sources to compare with."""
    build("portable", features=0, digest="whatever it was")
    assert load_library().isa == "portable"


@pytest.mark.slow
def test_another_interface_is_refused(build: Build) -> None:
    """A library with another version of the interface is not called any further."""
    build("portable", abi=ABI_VERSION + 1)
    with pytest.raises(LibraryUnfit, match="another version"):
        load_library()


def test_the_digest_sees_names_and_contents(tmp_path: Path) -> None:
    """Moving a line from one file to another changes the digest; other files do not."""
    first, second = tmp_path / "a.cpp", tmp_path / "b.hpp"
    seen = set()
    for texts in (("x", "y"), ("xy", ""), ("", "xy")):
        first.write_text(texts[0], encoding="utf-8")
        second.write_text(texts[1], encoding="utf-8")
        seen.add(source_digest(tmp_path))
    second.rename(tmp_path / "c.hpp")
    seen.add(source_digest(tmp_path))
    assert len(seen) == 4
    (tmp_path / "notes.py").write_text("", encoding="utf-8")
    assert source_digest(tmp_path) in seen
