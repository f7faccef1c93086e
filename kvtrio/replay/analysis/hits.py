"""Hits and misses: by path, adapters and turn, each class of turns with its own denominator."""

from collections.abc import Sequence
from typing import Any

from kvtrio.core.explain import CachePath, MissReason, TurnClass
from kvtrio.replay.analysis.store import Store
from kvtrio.replay.analysis.table import Cell, Column, Table, count, share, text

ALL = "all"
WITH, WITHOUT = "with", "without"
UNKNOWN = "unknown"
PATHS = (ALL, *(path.value for path in CachePath), UNKNOWN)
TURNS = (ALL, *(turn.value for turn in TurnClass), UNKNOWN)
REASONS = (*(reason.value for reason in MissReason), UNKNOWN)
ADAPTERS = (ALL, WITH, WITHOUT)
_LABELS = (text("adapters", "adapters"), text("turn", "turn"), text("path", "found in"))
_TOKENS = (
    count("prompt_tokens", "prompt tokens"),
    count("reused_tokens", "reused"),
    share("reused_share", "reused share"),
)
_COLUMNS = {
    "should": (
        *_LABELS,
        count("turns", "turns"),
        count("missed", "missed"),
        share("miss_rate", "miss rate"),
        *_TOKENS,
    ),
    "cannot": (
        *_LABELS,
        count("turns", "turns"),
        count("found", "reused some"),
        share("found_rate", "share"),
        *_TOKENS,
    ),
}
_COUNTED = {"should": "is_missed", "cannot": "cached > 0"}
_CELLS = f"""
    SELECT CASE WHEN is_adapted THEN '{WITH}' ELSE '{WITHOUT}' END AS adapters,
        coalesce(turn, '{UNKNOWN}') AS turn, coalesce(path::VARCHAR, '{UNKNOWN}') AS path,
        {{}} AS is_counted, prompt, cached
    FROM requests WHERE class = $class"""
_GROUPED = f"""
    SELECT coalesce(adapters, '{ALL}'), coalesce(turn, '{ALL}'), coalesce(path, '{ALL}'),
        count(*), count(*) FILTER (is_counted), count(*) FILTER (is_counted) / count(*),
        sum(prompt), sum(cached), sum(cached) / nullif(sum(prompt), 0)
    FROM ({_CELLS})
    GROUP BY GROUPING SETS ((), (adapters), (adapters, turn), (adapters, turn, path))"""


def hit_tables(store: Store) -> list[Table]:
    """The tables of turns, and those of reasons."""
    return [
        _turns(
            store,
            "should",
            "Turns that should hit",
            "Their conversation was there: a continuation, or the same prompt again. Missed: "
            "something that had been known was computed again, all of it where nothing was found.",
        ),
        _turns(
            store,
            "cannot",
            "Turns that cannot hit, or need not",
            "First turns; rewrites, which differ from what is known from some position on; and "
            "what came back after a long rest. In no miss rate of the table above.",
        ),
        _apart(store),
        _reasons(store),
        _divergence(store),
    ]


def _turns(store: Store, key: str, title: str, note: str) -> Table:
    rows = store.rows(_GROUPED.format(_COUNTED[key]), **{"class": key})
    rows.sort(key=lambda row: (ADAPTERS.index(row[0]), TURNS.index(row[1]), PATHS.index(row[2])))
    shown = rows if rows and rows[0][3] else []
    return Table(
        key=f"hits_{key}",
        title=title,
        columns=_COLUMNS[key],
        rows=integers(shown, _COLUMNS[key]),
        note=note,
        labels=3,
    )


def _apart(store: Store) -> Table:
    rows = store.rows(
        f"""SELECT CASE WHEN is_copy THEN 'further_answer'
                WHEN origin = 'replay' AND reason NOT IN ('done', 'left') THEN reason
                WHEN computed IS NULL THEN 'not_told'
                ELSE miss_reason::VARCHAR END AS why, count(*), sum(prompt)
            FROM requests WHERE class = 'apart' GROUP BY 1 ORDER BY coalesce(why, '{UNKNOWN}')"""
    )
    columns = (text("why", "why"), count("requests", "requests"), count("tokens", "prompt tokens"))
    return Table(
        key="hits_apart",
        title="Requests that count as no turn",
        columns=columns,
        rows=integers(rows, columns),
        note="Further answers to one prompt; those that never started or asked for no reuse; and "
        "those of which a replayed server did not tell what it reused.",
    )


def _reasons(store: Store) -> Table:
    rows = store.rows(
        f"""SELECT class, coalesce(miss_reason::VARCHAR, '{UNKNOWN}') AS why, count(*),
                count(*) / sum(count(*)) OVER (PARTITION BY class),
                sum(computed), sum(computed) / nullif(sum(sum(prompt)) OVER (), 0)
            FROM requests WHERE class <> 'apart' GROUP BY 1, 2"""
    )
    rows.sort(key=lambda row: (row[0] != "should", REASONS.index(row[1])))
    columns = (
        text("class", "turns that"),
        text("reason", "why not more was reused"),
        count("turns", "turns"),
        share("share", "of the class"),
        count("computed_tokens", "computed"),
        share("computed_share", "of the turns' prompt tokens"),
    )
    words = {"should": "should hit", "cannot": "cannot hit"}
    named = [(words[row[0]], *row[1:]) for row in rows]
    return Table(
        key="reasons",
        title="Reasons",
        columns=columns,
        rows=integers(named, columns),
        note="As the server gave them.",
        labels=2,
    )


def _divergence(store: Store) -> Table:
    rows = store.rows(
        """SELECT coalesce(section::VARCHAR, 'unknown'), coalesce(miss_reason::VARCHAR, 'unknown'),
               count(*), quantile_disc(position, 0.5), max(position)
           FROM good WHERE event = 'cache.divergence' GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2"""
    )
    columns = (
        text("section", "part of the prompt"),
        text("reason", "why"),
        count("requests", "requests"),
        count("median_position", "median position"),
        count("last_position", "last position"),
    )
    return Table(
        key="divergence",
        title="Where reuse ended",
        columns=columns,
        rows=integers(rows, columns),
        note="The message of the conversation in which it did; positions in tokens.",
        labels=2,
    )


def integers(
    rows: Sequence[tuple[Any, ...]], columns: tuple[Column, ...]
) -> tuple[tuple[Cell, ...], ...]:
    """Sums as whole numbers where the column counts: the database adds up in wider types."""
    counted = [column.kind.value == "count" for column in columns]
    return tuple(
        tuple(
            int(cell) if is_count and cell is not None else cell
            for cell, is_count in zip(row, counted, strict=True)
        )
        for row in rows
    )
