"""Bounds the work of one template render without a clock, so that the bound is the same everywhere.

1. A unit is about a microsecond of Python: one loop turn, one call, sixteen syntax nodes.
2. Whatever makes or walks through values pays for their size before it runs; sixty-four characters
   are one unit.
3. No value is worth more than the budget, however often a part occurs in it: each container pays
   for its parts when it is built. So no single operation inside Python can run away.
"""

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from typing import Any

from attrs import define

CHARS_PER_UNIT = 64
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_ATOMS = (int, float, bool, type(None))


class LimitExceeded(Exception):
    """A render used up its budget."""


@define(eq=False)
class Meter:
    """One render's budget, in units."""

    left: int

    def spend(self, units: int) -> None:
        """Raises LimitExceeded when the budget does not cover ``units``."""
        self.left -= units
        if self.left < 0:
            raise LimitExceeded

    def spend_shallow(self, value: Any) -> None:
        """Pay for a string's characters or a container's places."""
        if isinstance(value, str | bytes):
            self.spend(1 + len(value) // CHARS_PER_UNIT)
        elif isinstance(value, (*_CONTAINERS, Mapping, range)):
            self.spend(1 + len(value))

    def spend_deep(self, value: Any) -> None:
        """Pay for all that ``value`` holds, as often as it holds it."""
        if isinstance(value, _ATOMS):
            return
        stack = [value]
        while stack:
            item = stack.pop()
            self.spend(1)
            self.spend_shallow(item)
            if isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, _CONTAINERS):
                stack.extend(item)


def weight(value: Any) -> int:
    """Units that ``spend_deep`` would take; ``value`` must be finite."""
    meter = Meter(1 << 62)
    meter.spend_deep(value)
    return (1 << 62) - meter.left
