"""What was lost, when, and whether its conversation still came back."""

from kvtrio.replay.analysis.hits import integers
from kvtrio.replay.analysis.store import Store
from kvtrio.replay.analysis.table import Cell, Table, count, duration, seconds, share, text

BOUNDS_S = (0, 5, 15, 30, 60, 120, 300, 600, 1800, 3600)
RETURNS = """
    SELECT epoch(arrived) - epoch(before) AS gap_s, class, miss_reason FROM (
        SELECT arrived, class, miss_reason,
            lag(ended) OVER (PARTITION BY session ORDER BY ended) AS before
        FROM requests WHERE session IS NOT NULL AND NOT is_copy)
    WHERE before IS NOT NULL"""
"""Each request of a session after its first: seconds since the one before ended."""


def eviction_tables(store: Store) -> list[Table]:
    return [_intervals(store), _summary(store), _discards(store), _moves(store)]


def _bucket(column: str) -> str:
    cases = " ".join(
        f"WHEN {column} < {upper} THEN {number}" for number, upper in enumerate(BOUNDS_S[1:])
    )
    return f"CASE {cases} ELSE {len(BOUNDS_S) - 1} END"


def _label(number: int) -> str:
    lower = duration(BOUNDS_S[number])
    if number + 1 == len(BOUNDS_S):
        return f"over {lower}"
    return f"{lower} to {duration(BOUNDS_S[number + 1])}"


def _intervals(store: Store) -> Table:
    turns = {
        bucket: (number, evicted)
        for bucket, number, evicted in store.rows(
            f"""SELECT {_bucket("gap_s")}, count(*), count(*) FILTER (miss_reason = 'evicted')
                FROM ({RETURNS}) GROUP BY 1"""
        )
    }
    needed = _counts(store, "evicted_age_s", "requests WHERE evicted_age_s IS NOT NULL")
    lost = _counts(
        store, "longest_idle_s", "good WHERE event = 'cache.evict' AND num_dropped_blocks > 0"
    )
    rows: list[tuple[Cell, ...]] = []
    for number in range(len(BOUNDS_S)):
        come, evicted = turns.get(number, (0, 0))
        cells = (come, evicted, evicted / come if come else None)
        rows.append((_label(number), *cells, needed.get(number, 0), lost.get(number, 0)))
    columns = (
        text("interval", "interval"),
        count("returns", "turns that came after it"),
        count("evicted", "of these evicted"),
        share("evicted_share", "share"),
        count("needed", "state needed, last used so long before"),
        count("evictions", "evictions, longest idle"),
    )
    is_empty = not (turns or needed or lost)
    return Table(
        key="evictions",
        title="Eviction intervals against turn gaps",
        columns=columns,
        rows=() if is_empty else integers(rows, columns),
        note="State is kept long enough where evictions happen at longer intervals than turns come "
        "back. A gap is the time from the end of a session's request to its next one; requests "
        "without a session have none.",
    )


def _counts(store: Store, column: str, source: str) -> dict[int, int]:
    return dict(store.rows(f"SELECT {_bucket(column)}, count(*) FROM {source} GROUP BY 1"))


def _summary(store: Store) -> Table:
    quantiles = (
        "quantile_disc({0}, 0.1), quantile_disc({0}, 0.5), quantile_disc({0}, 0.9), max({0})"
    )
    sources = {
        "from a session's request to its next": ("gap_s", f"({RETURNS})"),
        "from last use to the turn that needed it": ("evicted_age_s", "requests"),
        "from last use to eviction, at most": (
            "longest_idle_s",
            "(SELECT longest_idle_s FROM good WHERE event = 'cache.evict'"
            " AND num_dropped_blocks > 0)",
        ),
    }
    rows = [
        (name, *row)
        for name, (column, source) in sources.items()
        if (row := store.row(f"SELECT count({column}), {quantiles.format(column)} FROM {source}"))[
            0
        ]
    ]
    columns = (
        text("what", "time"),
        count("number", "number"),
        seconds("p10_s", "p10"),
        seconds("p50_s", "p50"),
        seconds("p90_s", "p90"),
        seconds("max_s", "max"),
    )
    return Table(key="intervals", title="Intervals", columns=columns, rows=integers(rows, columns))


def _discards(store: Store) -> Table:
    rows = store.rows(
        """SELECT coalesce(why::VARCHAR, 'unknown'), count(*), sum(num_tokens)
           FROM good WHERE event = 'cache.discard' GROUP BY 1 ORDER BY 2 DESC, 1"""
    )
    columns = (text("why", "why"), count("times", "times"), count("tokens", "tokens"))
    return Table(
        key="discards",
        title="Discards",
        columns=columns,
        rows=integers(rows, columns),
        note="What was computed, or kept, and given up for a reason other than room.",
    )


def _moves(store: Store) -> Table:
    restored, fetched, demoted, dropped, tokens = store.row(
        """SELECT sum(num_blocks) FILTER (event = 'cache.restore'), sum(num_disk_blocks),
               sum(num_demoted_blocks), sum(num_dropped_blocks), sum(num_dropped_tokens)
           FROM good"""
    )
    rows = [
        ("from the device to RAM", demoted, None),
        ("from RAM to the device", restored, None),
        ("from disk", fetched, None),
        ("lost", dropped, tokens),
    ]
    columns = (text("move", "blocks"), count("blocks", "blocks"), count("tokens", "tokens"))
    moved = [row for row in rows if row[1]]
    return Table(
        key="moves", title="Moves of blocks", columns=columns, rows=integers(moved, columns)
    )
