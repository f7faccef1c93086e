"""The kernels under the compiler's sanitizers: races, memory, undefined behaviour.

One native program (``native/stress.cpp``) drives the thread pool and a tiny model with all kinds of
operations; its own checks and the sanitizer's end it with an error.
"""

import os
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from harness.native import isas
from harness.source_tree import ROOT

PROGRAM = ROOT / "tests/kernels/native/stress.cpp"
FLAGS = (
    "-O1",
    # Lines of calls and no more: whole debugging information takes half as long again to compile.
    "-g1",
    "-fno-var-tracking",
    "-std=c++17",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-w",
    "-Wno-psabi",
)
SANITIZERS = {
    "thread": ("-fsanitize=thread",),
    # gcc 12 cannot check shifts of vectors of bytes: it takes the check's constant for an error.
    "memory": ("-fsanitize=address,undefined", "-fno-sanitize=shift", "-fno-sanitize-recover=all"),
}


def compiler() -> list[str]:
    """The C++ compiler; skips where there is none."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(command[0]) is None:
        pytest.skip("there is no C++ compiler")
    return command


def isa_flags(isa: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extensions = project["tool"]["setuptools"]["ext-modules"]
    (found,) = (each for each in extensions if each["name"].endswith(f"._{isa}"))
    return list(found.get("extra-compile-args", ()))


@pytest.mark.slow
@pytest.mark.parametrize("isa", sorted({isas()[0], "portable"}))
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_kernels_are_clean(sanitizer: str, isa: str, tmp_path: Path) -> None:
    """No race, no access out of bounds, no undefined behaviour; equal bits in any batch."""
    program = tmp_path / "stress"
    flags = [*FLAGS, *SANITIZERS[sanitizer], *isa_flags(isa)]
    include = f"-I{ROOT / 'kernels/cpu'}"
    subprocess.run([*compiler(), *flags, include, str(PROGRAM), "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
