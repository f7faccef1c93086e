"""Who waited for whom: answers that paused, and the prompts that they paused for."""

from kvtrio.replay.analysis.hits import integers
from kvtrio.replay.analysis.store import Store
from kvtrio.replay.analysis.table import Cell, Table, count, seconds, share, text
from kvtrio.replay.analysis.times import Limits, gap_limit

SIZES = (0, 256, 1024, 4096, 16384, 65536)
NUM_WORST = 12


def stall_tables(store: Store, limits: Limits) -> list[Table]:
    limit_s = gap_limit(store, limits)
    return [_causes(store, limit_s), _pairs(store, limit_s), _worst(store), _queue(store)]


def size_class(column: str) -> str:
    """SQL for the number of the class, counted from 0."""
    bounds = " ".join(
        f"WHEN {column} < {upper} THEN {number}" for number, upper in enumerate(SIZES[1:])
    )
    return f"CASE WHEN {column} IS NULL THEN NULL {bounds} ELSE {len(SIZES) - 1} END"


def size_label(number: int | None) -> str:
    if number is None:
        return "-"
    lower = _short(SIZES[number])
    return f"{lower} to {_short(SIZES[number + 1])}" if number + 1 < len(SIZES) else f"over {lower}"


def _short(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 else str(size)


def _causes(store: Store, limit_s: float) -> Table:
    rows = store.rows(
        """SELECT coalesce(longest_gap_cause::VARCHAR, 'unknown') AS cause, count(*),
               count(*) / sum(count(*)) OVER (), quantile_disc(longest_gap_s, 0.5),
               max(longest_gap_s), sum(longest_gap_s)
           FROM requests WHERE longest_gap_s > $limit GROUP BY 1 ORDER BY 6 DESC, 1""",
        limit=limit_s,
    )
    columns = (
        text("cause", "spent on"),
        count("answers", "answers"),
        share("share", "share"),
        seconds("median_s", "median"),
        seconds("max_s", "longest"),
        seconds("total_s", "together"),
    )
    return Table(
        key="stall_causes",
        title=f"Answers that paused for more than {limit_s:g} s",
        columns=columns,
        rows=integers(rows, columns),
        note="The longest gap of each answer. prefill: others' prompts in the same step; step: the "
        "step of the streams themselves; move: state moved between memories; reader: the tokens "
        "lay ready and were not read.",
    )


def _pairs(store: Store, limit_s: float) -> Table:
    rows = store.rows(
        f"""SELECT {size_class("longest_gap_at")} AS own, {size_class("longest_gap_prompt_tokens")}
                AS other, count(*), quantile_disc(longest_gap_at, 0.5),
                quantile_disc(longest_gap_prompt_at, 0.5),
                quantile_disc(longest_gap_prefill_tokens, 0.5), quantile_disc(longest_gap_s, 0.5),
                max(longest_gap_s), sum(longest_gap_s)
            FROM requests
            WHERE longest_gap_s > $limit AND longest_gap_prompt_tokens IS NOT NULL
            GROUP BY 1, 2 ORDER BY own NULLS LAST, other""",
        limit=limit_s,
    )
    named = [(size_label(row[0]), size_label(row[1]), *row[2:]) for row in rows]
    columns = (
        text("waiting_size", "answer at (tokens)"),
        text("prompt_size", "waited for a prompt of"),
        count("answers", "answers"),
        count("waiting_at", "its median position"),
        count("prompt_at", "the prompt's position"),
        count("prefill_tokens", "read in the step"),
        seconds("median_s", "median"),
        seconds("max_s", "longest"),
        seconds("total_s", "together"),
    )
    return Table(
        key="stall_pairs",
        title="Who waited for whom",
        columns=columns,
        rows=integers(named, columns),
        note="Sizes and positions in tokens, in classes; medians within a class. The prompt is the "
        "one that had the largest part of the step.",
        labels=2,
    )


def _worst(store: Store) -> Table:
    rows: list[tuple[Cell, ...]] = store.rows(
        """SELECT strftime(ended, '%Y-%m-%d %H:%M:%S'), request_id, longest_gap_s,
               coalesce(longest_gap_cause::VARCHAR, 'unknown'), longest_gap_at,
               longest_gap_request_id, longest_gap_prompt_tokens, longest_gap_prompt_at,
               longest_gap_prefill_tokens
           FROM requests WHERE longest_gap_s IS NOT NULL
           ORDER BY longest_gap_s DESC, ended, request_id LIMIT $number""",
        number=NUM_WORST,
    )
    columns = (
        text("ended", "answer ended (UTC)"),
        text("request_id", "request"),
        seconds("gap_s", "paused"),
        text("cause", "spent on"),
        count("at", "at position"),
        text("prompt_request_id", "for request"),
        count("prompt_tokens", "with a prompt of"),
        count("prompt_at", "read from"),
        count("prefill_tokens", "in the step"),
    )
    shown = [(a, str(b), *rest[:3], _id(rest[3]), *rest[4:]) for a, b, *rest in rows]
    return Table(
        key="stall_worst",
        title="The longest pauses",
        columns=columns,
        rows=integers(shown, columns),
    )


def _id(number: Cell) -> str | None:
    return None if number is None else str(number)


def _queue(store: Store) -> Table:
    rows = store.rows(
        f"""SELECT {size_class("prompt")} AS size, count(*), quantile_disc(queue_s, 0.5),
                quantile_disc(queue_s, 0.9), quantile_disc(queue_s, 0.99), max(queue_s),
                sum(queue_s)
            FROM requests WHERE queue_s IS NOT NULL GROUP BY 1 ORDER BY 1"""
    )
    columns = (
        text("prompt_size", "prompt of (tokens)"),
        count("requests", "requests"),
        seconds("p50_s", "p50"),
        seconds("p90_s", "p90"),
        seconds("p99_s", "p99"),
        seconds("max_s", "max"),
        seconds("total_s", "together"),
    )
    return Table(
        key="queue",
        title="Waiting for a place",
        columns=columns,
        rows=integers([(size_label(row[0]), *row[1:]) for row in rows], columns),
    )
