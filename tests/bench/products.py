"""Compile products.cpp for this machine and run it: the speed of the CPU backend's products.

Usage: python tests/bench/products.py [models|shapes] [--threads N] [--rounds N] [--isa NAME]
"""

import argparse
import os
import shlex
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("-O3", "-std=c++17", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")


def isa_flags(isa: str) -> list[str]:
    """What pyproject.toml compiles the kernels of an instruction set with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extensions = project["tool"]["setuptools"]["ext-modules"]
    (found,) = (each for each in extensions if each["name"].endswith(f"._{isa}"))
    return list(found.get("extra-compile-args", ()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="?", choices=("models", "shapes"), default="models")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isa", choices=("avx512", "avx2", "portable"), default="avx512")
    options = parser.parse_args()
    program = ROOT / "build" / f"products-{options.isa}"
    program.parent.mkdir(exist_ok=True)
    source = ROOT / "tests/bench/products.cpp"
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = [*FLAGS, *isa_flags(options.isa)]
    subprocess.run([*compiler, *flags, str(source), "-o", str(program)], check=True)
    run = [str(program), str(options.threads), str(options.rounds), options.cases]
    subprocess.run(run, check=True)


if __name__ == "__main__":
    main()
