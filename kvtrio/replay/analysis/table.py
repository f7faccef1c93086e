"""A table of the report, before anybody decides how it looks."""

from enum import Enum

from attrs import field, frozen

Cell = str | int | float | None
"""None: there is nothing to say, such as the share of nothing."""


class Kind(Enum):
    """What the numbers of a column are."""

    TEXT = "text"
    COUNT = "count"
    SHARE = "share"
    """0 to 1."""
    SECONDS = "seconds"
    RATE = "per second"
    NUMBER = "number"


@frozen
class Column:
    """``key`` is for programs, ``label`` for people."""

    key: str
    label: str
    kind: Kind


@frozen(kw_only=True)
class Table:
    """Rows of cells, one for each column."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """How to read it: what counts, and in which denominator."""
    labels: int = field(default=1)
    """So many columns at the left say what the row is about."""

    def records(self) -> list[dict[str, Cell]]:
        """Each row with the columns' keys."""
        keys = [column.key for column in self.columns]
        return [dict(zip(keys, row, strict=True)) for row in self.rows]


def text(key: str, label: str) -> Column:
    return Column(key, label, Kind.TEXT)


def count(key: str, label: str) -> Column:
    return Column(key, label, Kind.COUNT)


def share(key: str, label: str) -> Column:
    return Column(key, label, Kind.SHARE)


def seconds(key: str, label: str) -> Column:
    return Column(key, label, Kind.SECONDS)


def rate(key: str, label: str) -> Column:
    return Column(key, label, Kind.RATE)


def shown(cell: Cell, kind: Kind) -> str:
    """The cell as people read it."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if kind is Kind.SHARE:
        return f"{100 * cell:.1f} %"
    if kind is Kind.SECONDS:
        return duration(cell)
    if kind is Kind.COUNT:
        return f"{cell:,.0f}"
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"


def duration(seconds: float) -> str:
    """With the unit that gives two or three digits."""
    size = abs(seconds)
    if size < 5e-7:
        return "0 s"
    if size < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if size < 0.9995:
        return f"{seconds * 1e3:.2g} ms" if size < 0.01 else f"{seconds * 1e3:.0f} ms"
    if size < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if size < 7200 else f"{seconds / 3600:.1f} h"
