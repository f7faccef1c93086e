"""Everything that is said about one body of traffic."""

from collections.abc import Iterable
from typing import Any

from attrs import asdict, frozen

from kvtrio.replay.analysis.evictions import eviction_tables
from kvtrio.replay.analysis.figures import Figures, figures_of
from kvtrio.replay.analysis.hits import hit_tables
from kvtrio.replay.analysis.overview import overview_tables, remarks, span_s
from kvtrio.replay.analysis.shares import share_tables
from kvtrio.replay.analysis.stalls import stall_tables
from kvtrio.replay.analysis.store import Source, Store
from kvtrio.replay.analysis.table import Table, shown
from kvtrio.replay.analysis.times import Limits, gap_limit, time_tables

SCHEMA = "kvtrio.analysis/1"
HEADLINE = (
    ("hits_should", "turns that should hit", ("all", "all", "all"), "turns"),
    ("hits_should", "of them missed", ("all", "all", "all"), "miss_rate"),
    ("hits_cannot", "turns that cannot hit", ("all", "all", "all"), "turns"),
    ("times", "first token, median", ("first token", "all"), "p50_s"),
    ("times", "first token, p99", ("first token", "all"), "p99_s"),
    ("times", "longest gap, median", ("longest gap", "all"), "p50_s"),
    ("times", "longest gap, p99", ("longest gap", "all"), "p99_s"),
    ("goodput", "of all requests in time", ("both",), "share"),
)
"""Table, words, first cells of the row, column."""


@frozen(kw_only=True)
class Report:
    """Tables in the order in which they are read, and what the plots show."""

    source: Source
    first: str | None
    """UTC, to the second; None: no request."""
    last: str | None
    span_s: float
    limits: Limits
    remarks: tuple[str, ...]
    headline: tuple[tuple[str, str], ...]
    """The few numbers that people ask for first: what, and how much."""
    tables: tuple[Table, ...]
    figures: Figures

    def plain(self) -> dict[str, Any]:
        """For JSON: one object with everything but the plots."""
        return {
            "schema": SCHEMA,
            "source": asdict(self.source),
            "first": self.first,
            "last": self.last,
            "span_s": self.span_s,
            "limits": asdict(self.limits),
            "remarks": list(self.remarks),
            "tables": {table.key: plain_table(table) for table in self.tables},
        }


def plain_table(table: Table) -> dict[str, Any]:
    columns = [
        {"key": column.key, "label": column.label, "unit": column.kind.value}
        for column in table.columns
    ]
    return {
        "title": table.title,
        "note": table.note,
        "columns": columns,
        "rows": table.records(),
    }


def report_of(store: Store, limits: Limits) -> Report:
    """Ask everything."""
    exact = Limits(limits.first_token_s, gap_limit(store, limits))
    first, last = store.row(
        """SELECT strftime(min(arrived), '%Y-%m-%d %H:%M:%S'),
               strftime(max(ended), '%Y-%m-%d %H:%M:%S') FROM requests"""
    )
    tables = tuple(_tables(store, exact))
    return Report(
        source=store.source,
        first=first,
        last=last,
        span_s=span_s(store),
        limits=exact,
        remarks=tuple(remarks(store)),
        headline=tuple(headline(tables)),
        tables=tables,
        figures=figures_of(store, exact),
    )


def _tables(store: Store, limits: Limits) -> Iterable[Table]:
    yield from overview_tables(store)
    yield from hit_tables(store)
    yield from eviction_tables(store)
    yield from time_tables(store, limits)
    yield from stall_tables(store, limits)
    yield from share_tables(store)


def headline(tables: Iterable[Table]) -> Iterable[tuple[str, str]]:
    """Cells of the tables, with words that stand alone."""
    cells = {table.key: table for table in tables}
    for key, label, wanted, number in HEADLINE:
        table = cells[key]
        row = next((row for row in table.rows if row[: len(wanted)] == wanted), None)
        if row is not None:
            index = [column.key for column in table.columns].index(number)
            yield label, shown(row[index], table.columns[index].kind)
