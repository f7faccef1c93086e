"""What is compared between two runs, and how it is asked for: per group of sessions."""

from typing import Any

import numpy as np
from attrs import frozen

from kvtrio.replay.analysis.bootstrap import (
    NUM_GROUPS,
    Histogram,
    Sums,
    class_of,
    histogram_of,
)
from kvtrio.replay.analysis.store import Store
from kvtrio.replay.analysis.table import Kind
from kvtrio.replay.analysis.times import Limits

GROUP = f"""CAST(hash(coalesce('s' || session, ended::VARCHAR || '/' || request_id)) % {NUM_GROUPS}
    AS INT)"""
REFUSED = f"""
    SELECT CAST(hash(coalesce('s' || session, timestamp::VARCHAR || '/' || request_id, ''))
        % {NUM_GROUPS} AS INT), count(*)
    FROM good WHERE event = 'request.rejected' OR outcome = 'refused' GROUP BY 1"""
OFFERED = "requests in time"
"""Of all but those whose client left; what was refused is offered and not in time."""


@frozen
class Ratio:
    """A sum over another; ``over`` and ``under`` are SQL for one request's part."""

    name: str
    kind: Kind
    is_less_better: bool
    over: str
    under: str


@frozen
class Quantile:
    """Of seconds; less is better."""

    name: str
    column: str
    share: float


SHOULD = "class = 'should'"
ONCE = "NOT is_copy"
"""A prompt counts with its first answer."""
IN_TIME = """reason IN ('stop', 'length', 'done') AND coalesce(first_token_s <= $first, false)
    AND coalesce(longest_gap_s <= $gap, true)"""
RATIOS = (
    Ratio(
        "miss rate of turns that should hit", Kind.SHARE, True, f"{SHOULD} AND is_missed", SHOULD
    ),
    Ratio(
        "miss rate with adapters",
        Kind.SHARE,
        True,
        f"{SHOULD} AND is_missed AND is_adapted",
        f"{SHOULD} AND is_adapted",
    ),
    Ratio(
        "miss rate without adapters",
        Kind.SHARE,
        True,
        f"{SHOULD} AND is_missed AND NOT is_adapted",
        f"{SHOULD} AND NOT is_adapted",
    ),
    Ratio(
        "reused share of prompt tokens",
        Kind.SHARE,
        False,
        f"CASE WHEN {ONCE} THEN cached END",
        f"CASE WHEN {ONCE} AND computed IS NOT NULL THEN prompt END",
    ),
    Ratio(
        "prompt tokens computed per request",
        Kind.COUNT,
        True,
        f"CASE WHEN {ONCE} THEN computed END",
        f"{ONCE} AND computed IS NOT NULL",
    ),
    Ratio("generated tokens per request", Kind.COUNT, False, "generated", "1"),
    Ratio(
        OFFERED,
        Kind.SHARE,
        False,
        IN_TIME,
        "reason NOT IN ('abort', 'left', 'cut')",
    ),
)
QUANTILES = (
    Quantile("first token, median", "first_token_s", 0.5),
    Quantile("first token, p90", "first_token_s", 0.9),
    Quantile("first token, p99", "first_token_s", 0.99),
    Quantile("longest gap, median", "longest_gap_s", 0.5),
    Quantile("longest gap, p90", "longest_gap_s", 0.9),
    Quantile("longest gap, p99", "longest_gap_s", 0.99),
    Quantile("typical gap, median", "gap_p50_s", 0.5),
    Quantile("whole answer, median", "total_s", 0.5),
    Quantile("whole answer, p90", "total_s", 0.9),
)


@frozen(eq=False)
class Sample:
    """One side: sums and histograms per group, exact quantiles, and how many sessions there are."""

    sums: Sums
    histograms: dict[str, Histogram]
    exact: tuple[float | None, ...]
    """As ``QUANTILES``."""
    num_requests: int
    num_sessions: int

    def ratio(self, index: int) -> float | None:
        under = self.sums.under[:, index].sum()
        return float(self.sums.over[:, index].sum() / under) if under else None


def sample_of(store: Store, limits: Limits) -> Sample:
    requests, sessions = store.row(
        """SELECT count(*), count(DISTINCT session) + count(*) FILTER (session IS NULL)
           FROM requests"""
    )
    columns = dict.fromkeys(each.column for each in QUANTILES)
    return Sample(
        sums=_sums(store, limits),
        histograms={column: _histogram(store, column) for column in columns},
        exact=tuple(_exact(store, each) for each in QUANTILES),
        num_requests=requests,
        num_sessions=sessions,
    )


def _sums(store: Store, limits: Limits) -> Sums:
    parts = ", ".join(
        f"sum(CAST({each.over} AS DOUBLE)), sum(CAST({each.under} AS DOUBLE))" for each in RATIOS
    )
    values: dict[str, Any] = {"first": limits.first_token_s, "gap": limits.gap_s}
    rows = store.rows(f"SELECT {GROUP}, {parts} FROM requests GROUP BY 1", **values)
    sums = np.zeros((NUM_GROUPS, 2 * len(RATIOS)))
    for group, *numbers in rows:
        sums[group] = [number or 0.0 for number in numbers]
    offered = 2 * [each.name for each in RATIOS].index(OFFERED) + 1
    for group, number in store.rows(REFUSED):
        sums[group, offered] += number
    return Sums(sums[:, ::2], sums[:, 1::2])


def _histogram(store: Store, column: str) -> Histogram:
    rows = store.rows(
        f"""SELECT {GROUP}, {class_of(column)}, count(*) FROM requests
            WHERE {column} IS NOT NULL GROUP BY 1, 2"""
    )
    return histogram_of(rows, NUM_GROUPS)


def _exact(store: Store, measure: Quantile) -> float | None:
    (value,) = store.row(f"SELECT quantile_disc({measure.column}, {measure.share}) FROM requests")
    return None if value is None else float(value)
