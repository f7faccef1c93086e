"""How setuptools compiles the kernels; runs when the package is built, and is no part of it.

Each extension of pyproject.toml is one call of the C++ compiler on ``library.cpp``, which includes
all other sources. The result is a plain shared library with a C interface, no Python module, so it
is named without Python's version and compiled without the flags that Python itself was built with.

Environment: CXX (the compiler), CXXFLAGS (added last), KVTRIO_NATIVE=required (a library that
cannot be built is an error; else it is left out, with a warning, and kvtrio computes on torch).
"""

import os
import runpy
import shlex
import sysconfig
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

FOLDER = Path(__file__).resolve().parent
# setuptools loads this file by its path, so its neighbours cannot be imported.
DIGEST = runpy.run_path(str(FOLDER.parent / "cpu_digest.py"))
COMMON_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    # The same bits on every compiler: a product and a sum are fused where the source says so.
    "-ffp-contract=off",
    "-fno-math-errno",
    # Two libraries are loaded in one process; neither may use the other's inline functions.
    "-fvisibility=hidden",
    # Wide vectors are passed between functions of one file only, so nobody else's calls differ.
    "-Wno-psabi",
)
X86_64 = ("x86_64", "amd64")


class BuildNative(build_ext):
    """Compiles the three libraries at once, each for another instruction set."""

    parallel: int | bool | None
    extensions: list[Extension]

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True
        is_x86 = self.plat_name.endswith(X86_64)
        self.extensions = [
            extension
            for extension in self.extensions
            if is_x86 or extension.name.endswith("_portable")
        ]
        for extension in self.extensions:
            extension.depends = [*sources(), f"kernels/cpu/{Path(__file__).name}"]
            extension.optional = os.environ.get("KVTRIO_NATIVE") != "required"

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Raises distutils' ``ExecError`` if the compiler is missing or fails."""
        target = Path(self.get_ext_fullpath(ext.name))
        fresh = target.with_suffix(".new")
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = DIGEST["source_digest"](FOLDER)
        self.spawn(
            [
                *shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"),
                *COMMON_FLAGS,
                *ext.extra_compile_args,
                f'-DKVT_SOURCE_DIGEST="{digest}"',
                *shlex.split(os.environ.get("CXXFLAGS", "")),
                "-shared",
                *ext.sources,
                "-o",
                str(fresh),
            ]
        )
        fresh.replace(target)  # whole or not at all, whatever ends the compiler


def sources() -> list[str]:
    """All sources, relative to the project; setuptools puts them into the source archive."""
    return [f"kernels/cpu/{path.name}" for path in DIGEST["source_files"](FOLDER)]
