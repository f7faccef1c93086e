"""What a user who installs the wheel gets."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.source_tree import FOLDERS, ROOT, modules


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy of the sources, so that no old ``build`` folder can add to the wheel."""
    source = tmp_path_factory.mktemp("source")
    for name in (*FOLDERS.values(), "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "-w", str(out), str(source)],
        check=True,
        capture_output=True,
    )
    (path,) = out.glob("kvtrio-*.whl")
    return path


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
