"""Compiles attention.cpp for an instruction set and runs it: attention against the machine's peaks.

python tests/bench/attention.py [--isa avx512|avx2|portable] [-t THREADS]
"""

import argparse
import os
import shlex
import subprocess
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests/bench/attention.cpp"
FLAGS = ("-O3", "-std=c++17", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-w")


def isa_flags(isa: str) -> list[str]:
    """What the extension of that instruction set is compiled with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extensions = project["tool"]["setuptools"]["ext-modules"]
    (found,) = (each for each in extensions if each["name"].endswith(f"._{isa}"))
    return list(found.get("extra-compile-args", ()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--isa", default="avx512")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "attention"
        flags = [*FLAGS, *isa_flags(options.isa)]
        subprocess.run([*compiler, *flags, str(SOURCE), "-o", str(program)], check=True)
        subprocess.run([str(program), str(options.threads)], check=True)


if __name__ == "__main__":
    main()
