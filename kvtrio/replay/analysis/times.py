"""How long people waited: first tokens, gaps, the queue; and how many were served in time."""

from attrs import frozen

from kvtrio.replay.analysis.hits import integers
from kvtrio.replay.analysis.overview import span_s
from kvtrio.replay.analysis.store import Store
from kvtrio.replay.analysis.table import Cell, Table, count, rate, seconds, share, text

QUANTILES = (0.5, 0.9, 0.95, 0.99)
MEASURES = {
    "first token": "first_token_s",
    "queue": "queue_s",
    "typical gap": "gap_p50_s",
    "longest gap": "longest_gap_s",
    "whole answer": "total_s",
}
"""What people call it, and the column. A request has one of each; its typical gap is its median."""
GROUPS = {
    "all": "true",
    "turns that hit": "class = 'should' AND NOT is_missed",
    "turns that missed": "class = 'should' AND is_missed",
    "turns that cannot hit": "class = 'cannot'",
    "with adapters": "is_adapted",
    "without adapters": "NOT is_adapted",
}
DEFAULT_FIRST_TOKEN_S = 1.0
DEFAULT_GAP_S = 0.1
"""As the server's, where no log names its own."""


@frozen
class Limits:
    """What counts as served in time. Seconds."""

    first_token_s: float = DEFAULT_FIRST_TOKEN_S
    gap_s: float | None = None
    """Of the longest gap; None: the bound that the server had."""


def gap_limit(store: Store, limits: Limits) -> float:
    if limits.gap_s is not None:
        return limits.gap_s
    (bound,) = store.row("SELECT max(max_gap_s) FROM good WHERE event = 'server.start'")
    return float(bound or DEFAULT_GAP_S)


def time_tables(store: Store, limits: Limits) -> list[Table]:
    return [_times(store), _goodput(store, limits)]


def _times(store: Store) -> Table:
    columns = (
        text("measure", "time"),
        text("group", "of"),
        count("requests", "requests"),
        *(seconds(f"p{100 * q:g}_s", f"p{100 * q:g}") for q in QUANTILES),
        seconds("max_s", "max"),
    )
    rows = [
        row
        for measure, column in MEASURES.items()
        for group, condition in GROUPS.items()
        if (row := _time_row(store, measure, column, (group, condition)))
    ]
    return Table(
        key="times",
        title="Times",
        columns=columns,
        rows=integers(rows, columns),
        note="Percentiles over requests; each is a time that happened. Typical and longest gap: "
        "the median and the longest time between two tokens of one answer. Queue is part of the "
        "first token's time.",
        labels=2,
    )


def _time_row(
    store: Store, measure: str, column: str, group: tuple[str, str]
) -> tuple[Cell, ...] | None:
    """One query each: the database holds the values of one column and group at a time."""
    number, quantiles, longest = store.row(
        f"""SELECT count({column}), quantile_disc({column}, {list(QUANTILES)}), max({column})
            FROM requests WHERE {group[1]}"""
    )
    return (measure, group[0], number, *quantiles, longest) if number else None


def _goodput(store: Store, limits: Limits) -> Table:
    gap_s, first_s = gap_limit(store, limits), limits.first_token_s
    span = span_s(store)
    conditions = {
        f"first token within {first_s:g} s": "is_quick",
        f"no gap above {gap_s:g} s": "is_steady",
        "both": "is_quick AND is_steady",
    }
    offered, *good = store.row(_goodput_sql(list(conditions.values())), first=first_s, gap=gap_s)
    rows = [
        (
            name,
            offered,
            good[2 * index],
            good[2 * index] / offered,
            good[2 * index] / span if span else None,
            (good[2 * index + 1] or 0) / span if span else None,
        )
        for index, name in enumerate(conditions)
        if offered
    ]
    columns = (
        text("limit", "limit"),
        count("offered", "offered"),
        count("good", "in time"),
        share("share", "share"),
        rate("requests_per_s", "requests/s"),
        rate("tokens_per_s", "generated tokens/s"),
    )
    return Table(
        key="goodput",
        title="Goodput",
        columns=columns,
        rows=integers(rows, columns),
        note="Offered: all requests, also those that were refused, failed or missed a deadline, "
        "but not those whose client left.",
    )


def _goodput_sql(conditions: list[str]) -> str:
    sums = ", ".join(
        f"count(*) FILTER (is_done AND {each}), sum(generated) FILTER (is_done AND {each})"
        for each in conditions
    )
    return f"""
        SELECT count(*), {sums} FROM (
            SELECT generated, reason IN ('stop', 'length', 'done') AS is_done,
                coalesce(first_token_s <= $first, false) AS is_quick,
                coalesce(longest_gap_s <= $gap, true) AS is_steady
            FROM requests WHERE reason NOT IN ('abort', 'left', 'cut')
            UNION ALL SELECT 0, false, false, false FROM good
            WHERE event = 'request.rejected' OR outcome = 'refused')"""
