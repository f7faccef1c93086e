"""Two logs or runs side by side: each measure of both, the difference, and its noise."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import field, frozen

from kvtrio.replay.analysis import bootstrap
from kvtrio.replay.analysis.bootstrap import FEWEST_GROUPS, NUM_ROUNDS, SEED, Numbers
from kvtrio.replay.analysis.measures import QUANTILES, RATIOS, Sample, sample_of
from kvtrio.replay.analysis.report import Report, plain_table, report_of
from kvtrio.replay.analysis.store import Store
from kvtrio.replay.analysis.table import Cell, Column, Kind, Table, text
from kvtrio.replay.analysis.times import Limits, gap_limit

SCHEMA = "kvtrio.comparison/1"
LABELS = ("A", "B")
PAIRED = {
    "outcomes": ("requests",),
    "rejections": ("requests",),
    "expectations": ("number",),
    "tokens": ("tokens", "share"),
    "hits_should": ("turns", "missed", "miss_rate"),
    "hits_cannot": ("turns", "found", "reused_share"),
    "reasons": ("turns", "computed_tokens"),
    "times": ("p50_s", "p99_s"),
    "goodput": ("share", "tokens_per_s"),
    "stall_causes": ("answers", "total_s"),
    "evictions": ("returns", "evicted", "evictions"),
    "moves": ("blocks",),
    "discards": ("times", "tokens"),
}
"""Tables that have the same rows for both, and the columns that are set side by side."""


@frozen(kw_only=True)
class Difference:
    """One measure. ``noise``: where B - A lies in most rounds; None: too few sessions to say."""

    name: str
    kind: Kind
    is_less_better: bool
    a: float
    b: float
    noise: tuple[float, float] | None

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def verdict(self) -> str:
        """For B."""
        if self.noise is None:
            return "not known"
        if self.noise[0] <= 0 <= self.noise[1]:
            return "within noise"
        return "better" if (self.noise[1] < 0) is self.is_less_better else "worse"


@frozen(kw_only=True)
class Comparison:
    reports: tuple[Report, Report]
    is_paired: bool
    """Replays of one scenario: the same sessions on both sides."""
    is_untold: bool
    """A server does not say why it reused no more, so that misses are counted by tokens."""
    differences: tuple[Difference, ...]
    tables: tuple[Table, ...]

    def plain(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "is_paired": self.is_paired,
            "is_untold": self.is_untold,
            "rounds": NUM_ROUNDS,
            "seed": SEED,
            "differences": [_plain_difference(each) for each in self.differences],
            **dict(zip(("a", "b"), (report.plain() for report in self.reports), strict=True)),
            "tables": {table.key: plain_table(table) for table in self.tables},
        }


def compare(a: Store, b: Store, limits: Limits) -> Comparison:
    """Ask both. With the same limits: those of A, where they were not given."""
    limits = Limits(limits.first_token_s, gap_limit(a, limits))
    is_untold = a.is_untold or b.is_untold
    for store in (a, b):
        store.judge_by_tokens(is_untold)
    scenario = a.scenario
    is_paired = scenario is not None and scenario == b.scenario
    found = differences(sample_of(a, limits), sample_of(b, limits), is_paired)
    reports = report_of(a, limits), report_of(b, limits)
    return Comparison(
        reports=reports,
        is_paired=is_paired,
        is_untold=is_untold,
        differences=tuple(found),
        tables=tuple(paired_tables(*reports)),
    )


def _plain_difference(each: Difference) -> dict[str, Any]:
    return {
        "name": each.name,
        "unit": each.kind.value,
        "a": each.a,
        "b": each.b,
        "difference": each.difference,
        "noise": each.noise,
        "verdict": each.verdict,
    }


def differences(a: Sample, b: Sample, is_paired: bool) -> Iterator[Difference]:
    """Measures that both sides have."""
    rounds = _Rounds.of(a, b, is_paired)
    ratios = rounds.ratios()
    for index, ratio in enumerate(RATIOS):
        values = a.ratio(index), b.ratio(index)
        if values[0] is not None and values[1] is not None:
            yield Difference(
                name=ratio.name,
                kind=ratio.kind,
                is_less_better=ratio.is_less_better,
                a=values[0],
                b=values[1],
                noise=rounds.noise(ratios[:, index]),
            )
    for quantile, left, right in zip(QUANTILES, a.exact, b.exact, strict=True):
        if left is not None and right is not None:
            yield Difference(
                name=quantile.name,
                kind=Kind.SECONDS,
                is_less_better=True,
                a=left,
                b=right,
                noise=rounds.noise(rounds.quantiles(quantile.column, quantile.share)),
            )


@frozen(eq=False)
class _Rounds:
    """Both sides' draws."""

    a: Sample
    b: Sample
    weights: tuple[Numbers, Numbers] | None
    """None: too few groups."""
    heights: dict[str, tuple[Numbers, Numbers]] = field(factory=dict)
    """Of one column at a time."""

    @classmethod
    def of(cls, a: Sample, b: Sample, is_paired: bool) -> "_Rounds":
        rng = np.random.default_rng(SEED)
        present = [sample.sums.under.any(axis=1) for sample in (a, b)]
        if min(groups.sum() for groups in present) < FEWEST_GROUPS:
            return cls(a, b, None)  # one of them may have been stopped early
        if is_paired:
            present = [present[0] | present[1]] * 2
        first = _spread(present[0], rng)
        return cls(a, b, (first, first if is_paired else _spread(present[1], rng)))

    def ratios(self) -> Numbers:
        if self.weights is None:
            return np.full((1, len(RATIOS)), np.nan)
        left, right = self.weights
        return bootstrap.ratios(self.b.sums, right) - bootstrap.ratios(self.a.sums, left)

    def quantiles(self, column: str, share: float) -> Numbers:
        if self.weights is None:
            return np.full(1, np.nan)
        a, b = self._heights(column, self.weights)
        return bootstrap.quantiles(b, share) - bootstrap.quantiles(a, share)

    def _heights(self, column: str, weights: tuple[Numbers, Numbers]) -> tuple[Numbers, Numbers]:
        """Kept for the column's other quantiles: most of the work."""
        if column not in self.heights:
            self.heights.clear()
            histograms = self.a.histograms[column], self.b.histograms[column]
            a, b = map(bootstrap.heights_of, histograms, weights)
            self.heights[column] = a, b
        return self.heights[column]

    def noise(self, found: Numbers) -> tuple[float, float] | None:
        return None if self.weights is None else bootstrap.interval(found)


def _spread(present: Any, rng: np.random.Generator) -> Numbers:
    """Draws among the groups that have something, with 0 for the others."""
    weights = np.zeros((NUM_ROUNDS, len(present)))
    weights[:, present] = bootstrap.draws(int(present.sum()), rng)
    return weights


def paired_tables(a: Report, b: Report) -> Iterator[Table]:
    """The same table of both, row by row."""
    of_b = {table.key: table for table in b.tables}
    for table in a.tables:
        other = of_b.get(table.key)
        if table.key in PAIRED and other is not None and (table.rows or other.rows):
            yield _paired(table, other, PAIRED[table.key])


def _paired(a: Table, b: Table, keys: tuple[str, ...]) -> Table:
    kept = [index for index, column in enumerate(a.columns) if column.key in keys]
    columns = [*a.columns[: a.labels]]
    for index in kept:
        column = a.columns[index]
        columns += [
            Column(f"{column.key}_{label.lower()}", f"{column.label} {label}", column.kind)
            for label in LABELS
        ]
    cells = [_by_label(table, kept) for table in (a, b)]
    order = [*cells[0], *(label for label in cells[1] if label not in cells[0])]
    nothing: tuple[Cell, ...] = (None,) * len(kept)
    rows = []
    for label in order:
        pairs = zip(cells[0].get(label, nothing), cells[1].get(label, nothing), strict=True)
        rows.append((*label, *(cell for pair in pairs for cell in pair)))
    return Table(
        key=a.key,
        title=a.title,
        columns=tuple(columns),
        rows=tuple(rows),
        note=a.note,
        labels=a.labels,
    )


def _by_label(table: Table, kept: list[int]) -> dict[tuple[Cell, ...], tuple[Cell, ...]]:
    return {row[: table.labels]: tuple(row[index] for index in kept) for row in table.rows}


def difference_table(found: tuple[Difference, ...]) -> Table:
    """For programs: plain numbers."""
    number = Kind.NUMBER
    columns = (
        text("measure", "measure"),
        text("unit", "unit"),
        Column("a", "A", number),
        Column("b", "B", number),
        Column("difference", "B - A", number),
        Column("noise_low", "from", number),
        Column("noise_high", "to", number),
        text("verdict", "B is"),
    )
    rows = tuple(
        (
            each.name,
            each.kind.value,
            each.a,
            each.b,
            each.difference,
            *(each.noise or (None, None)),
            each.verdict,
        )
        for each in found
    )
    return Table(key="differences", title="Differences", columns=columns, rows=rows)
