"""Plug-ins by name: built-in schedulers and backends come through the same door as anybody's."""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

SCHEDULERS = "kvtrio.schedulers"
BACKENDS = "kvtrio.backends"


class PluginError(ValueError):
    """There is no such plug-in, or it cannot be loaded; the message is one clear line."""


def names(group: str) -> list[str]:
    """Names that are installed in a group, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def load(group: str, name: str) -> Any:
    """Return the class that is installed under ``name``.

    Raises ``PluginError`` if there is none, several, or its module cannot be imported.
    """
    found = list({entry.value: entry for entry in entry_points(group=group, name=name)}.values())
    kind = group.rpartition(".")[2].removesuffix("s")
    if not found:
        raise PluginError(f"no {kind} {name!r}; installed are: {', '.join(names(group))}")
    if len(found) > 1:
        owners = ", ".join(sorted(map(_owner, found)))
        raise PluginError(f"{kind} {name!r} is installed by several packages: {owners}")
    try:
        return found[0].load()
    except ImportError as error:
        missing = error.name or "a module"
        raise PluginError(f"{kind} {name!r} cannot be loaded: {missing} is missing") from error


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value
