"""What a user who installs the wheel gets."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from harness.source_tree import FOLDERS, ROOT, modules

LIBRARIES = ("_avx2.so", "_avx512.so", "_portable.so")


def copied_sources(folder: Path) -> Path:
    """A tree of its own, so that nothing that was built before can add to what is built."""
    not_sources = shutil.ignore_patterns("__pycache__", "*.so")
    for name in FOLDERS.values():
        shutil.copytree(ROOT / name, folder / name, ignore=not_sources)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def built_wheel(source: Path, out: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "-w", str(out), str(source)],
        check=True,
        capture_output=True,
        env=os.environ | environment,
    )
    (path,) = out.glob("kvtrio-*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With kernels that compile quickly and run slowly."""
    source = copied_sources(tmp_path_factory.mktemp("source"))
    return built_wheel(source, tmp_path_factory.mktemp("wheel"), CXXFLAGS="-O0")


@pytest.mark.slow
def test_wheel_holds_only_the_package(wheel: Path) -> None:
    """Nothing but ``kvtrio`` and its metadata lands in site-packages."""
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"kvtrio", f"{wheel.name.split('-')[0]}-{wheel.name.split('-')[1]}.dist-info"}


@pytest.mark.slow
def test_wheel_holds_every_module(wheel: Path) -> None:
    """Each module of the four folders is there under its import name, with the type marker."""
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        "/".join(module.split(".")) + ("/__init__.py" if path.stem == "__init__" else ".py")
        for module, path in modules()
    }
    assert wanted | {"kvtrio/py.typed"} <= names


@pytest.mark.slow
def test_wheel_imports_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """The wheel alone is enough: the checkout plays no part."""
    code = "import kvtrio.core, kvtrio.schedulers.fcfs as m; print(m.__file__)"
    answer = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {site_paths(wheel)!r}; {code}"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert wheel.name in answer.stdout


def site_paths(wheel: Path) -> list[str]:
    """The wheel, then the installed libraries; -S leaves out editable installs."""
    return [str(wheel), *(path for path in sys.path if path.endswith("site-packages"))]


def libraries_in(wheel: Path) -> list[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return sorted(Path(name).name for name in names if name.startswith("kvtrio/kernels/cpu/"))


@pytest.mark.slow
def test_wheel_holds_the_compiled_kernels(wheel: Path) -> None:
    """One library per instruction set, and neither sources nor the script that builds them."""
    on_x86 = "x86_64" in wheel.name
    assert libraries_in(wheel) == sorted(LIBRARIES if on_x86 else ["_portable.so"])


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["false", "/no/such/compiler"])
def test_install_without_a_compiler(tmp_path: Path, compiler: str) -> None:
    """The package still builds, and says at load that it has no compiled kernels."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    wheel = built_wheel(copied_sources(source), out, CXX=compiler, KVTRIO_NATIVE="optional")
    assert libraries_in(wheel) == []
    code = "import kvtrio.kernels.cpu_library as m; m.load_library()"
    answer = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {site_paths(wheel)!r}; {code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert answer.stderr.splitlines()[-1].startswith("kvtrio.kernels.cpu_library.LibraryMissing")


@pytest.mark.slow
def test_required_kernels_fail_the_build(tmp_path: Path) -> None:
    """KVTRIO_NATIVE=required, which CI sets, lets no failed compilation pass."""
    source = copied_sources(tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        built_wheel(source, tmp_path / "out", CXX="false", KVTRIO_NATIVE="required")


@pytest.mark.slow
def test_source_archive_can_be_built_from(tmp_path: Path) -> None:
    """It holds the C++ sources, their headers and the script that builds them."""
    source = copied_sources(tmp_path)
    code = "from setuptools import build_meta; print(build_meta.build_sdist('.'))"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=source)
    (archive,) = source.glob("kvtrio-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = {f"kernels/cpu/{path.name}" for path in (source / "kernels/cpu").iterdir()}
    assert wanted | {"pyproject.toml", "kernels/cpu_digest.py"} <= names
