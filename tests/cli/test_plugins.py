"""Plug-ins are found by name, and a wrong name says which there are."""

from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from kvtrio import plugins
from kvtrio.schedulers.fcfs import FCFS

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make ``plugins`` see just the given entry points."""

    def use(*pairs: tuple[str, str]) -> None:
        found = [EntryPoint(name, value, plugins.SCHEDULERS) for name, value in pairs]

        def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
            return [e for e in found if e.group == group and name in (None, e.name)]

        monkeypatch.setattr(plugins, "entry_points", entry_points)

    return use


def test_a_built_in_is_found() -> None:
    """fcfs is the class that the module holds."""
    assert plugins.load(plugins.SCHEDULERS, "fcfs") is FCFS
    assert "fcfs" in plugins.names(plugins.SCHEDULERS)


def test_an_unknown_name_lists_the_known_ones(install: Install) -> None:
    """Whoever mistypes sees what to type."""
    install(("b", "x:B"), ("a", "x:A"))
    with pytest.raises(plugins.PluginError, match=r"no scheduler 'c'; installed are: a, b"):
        plugins.load(plugins.SCHEDULERS, "c")


def test_a_name_taken_twice_is_refused(install: Install) -> None:
    """Two packages that claim one name are an error, not a lottery."""
    install(("a", "x:A"), ("a", "y:A"))
    with pytest.raises(plugins.PluginError, match="several packages"):
        plugins.load(plugins.SCHEDULERS, "a")


def test_a_broken_plug_in_names_what_is_missing(install: Install) -> None:
    """An import that fails inside a plug-in is one line."""
    install(("a", "no_such_module_here:A"))
    with pytest.raises(plugins.PluginError, match="no_such_module_here is missing"):
        plugins.load(plugins.SCHEDULERS, "a")
