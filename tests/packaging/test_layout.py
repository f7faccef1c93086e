"""The folders at the top of the repository install as ``kvtrio`` and nothing else."""

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest

import kvtrio
from harness.source_tree import FOLDERS, ROOT, imported, modules


def project_file() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_folder_is_declared() -> None:
    """A sub-package that pyproject.toml forgets would be missing from the wheel."""
    setuptools = project_file()["tool"]["setuptools"]
    found = {
        ".".join((name, *init.parent.relative_to(ROOT / folder).parts))
        for name, folder in setuptools["package-dir"].items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert setuptools["package-dir"] == FOLDERS
    assert found == set(setuptools["packages"])


@pytest.mark.parametrize("folder", ["schedulers", "backends", "kernels"])
def test_plug_in_folders_are_flat(folder: str) -> None:
    """A plug-in is one file, so that nobody has to search for it."""
    nested = [path for path in (ROOT / folder).rglob("__init__.py") if path.parent != ROOT / folder]
    assert nested == []


def test_generic_names_are_not_importable(tmp_path: Path) -> None:
    """Two copies of one class would make isinstance and entry points disagree."""
    code = (
        "import importlib.util as u;"
        "print([n for n in ('schedulers', 'backends', 'kernels', 'tests') if u.find_spec(n)])"
    )
    assert python(code, tmp_path) == "[]"


def test_entry_point_and_import_give_one_class() -> None:
    """Built-in plug-ins come through the same door as anybody's."""
    from kvtrio.schedulers.fcfs import FCFS

    (entry,) = (e for e in entry_points(group="kvtrio.schedulers") if e.name == "fcfs")
    assert entry.load() is FCFS


@pytest.mark.parametrize("group", ["kvtrio.schedulers", "kvtrio.backends"])
def test_declared_entry_points_load(group: str) -> None:
    """Every name that --scheduler and --backend offer can be loaded."""
    declared = project_file()["project"]["entry-points"][group]
    installed = {entry.name: entry for entry in entry_points(group=group)}
    assert declared.keys() <= installed.keys()
    for name in declared:
        assert isinstance(installed[name].load(), type)


def test_import_is_light(tmp_path: Path) -> None:
    """``import kvtrio`` leaves the heavy libraries alone."""
    code = (
        "import sys, kvtrio;"
        "print(sorted({'torch', 'trio', 'quart', 'numpy', 'attrs'} & sys.modules.keys()))"
    )
    assert python(code, tmp_path) == "[]"


def python(code: str, folder: Path) -> str:
    """Run ``code`` in a fresh interpreter, away from the checkout; return what it prints."""
    answer = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=folder
    )
    return answer.stdout.strip()


def test_versions_agree() -> None:
    """The package, its metadata and the changelog name one version."""
    declared = project_file()["project"]["version"]
    assert kvtrio.__version__ == declared == installed_version("kvtrio")
    assert f"## [{declared}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_requirement_is_pinned() -> None:
    """constraints.txt names a version of everything that pyproject.toml asks for."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = project_file()["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        canonicalize_name(line.partition("==")[0]): line.partition("==")[2]
        for line in lines
        if not line.startswith("#")
    }
    for text in (*project["dependencies"], *project["optional-dependencies"]["test"]):
        requirement = Requirement(text)
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{text} against {pin}"


IMPORT_NAMES = {"prometheus-client": "prometheus_client", "quart-trio": "quart_trio"}


def test_dependencies_are_what_is_imported() -> None:
    """Nothing is asked for that no module uses, and nothing used that is not asked for."""
    from packaging.requirements import Requirement

    project = project_file()["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["cuda"]
    names = {Requirement(text).name for text in asked}
    used = {name.partition(".")[0] for _, path in modules() for name in imported(path)}
    used -= sys.stdlib_module_names | {"kvtrio"}
    assert {IMPORT_NAMES.get(name, name) for name in names} == used
