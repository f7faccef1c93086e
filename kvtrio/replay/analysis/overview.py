"""What was read, what became of the requests, and whether the sums add up."""

from collections.abc import Iterator
from typing import Any

from kvtrio.replay.analysis.hits import integers
from kvtrio.replay.analysis.store import Source, Store
from kvtrio.replay.analysis.table import Cell, Table, count, share, text


def overview_tables(store: Store) -> list[Table]:
    return [_outcomes(store), _rejections(store), _tokens(store), *_expectations(store)]


def span_s(store: Store) -> float:
    """Seconds from the first arrival to the last end."""
    return float(
        store.row("SELECT coalesce(epoch(max(ended)) - epoch(min(arrived)), 0) FROM requests")[0]
    )


def remarks(store: Store) -> list[str]:
    """What a reader has to know before any table."""
    return [*_about_lines(store.source), *_about_runs(store), *_about_sums(store)]


def _about_lines(source: Source) -> Iterator[str]:
    if not source.num_lines:
        yield "There are no lines."
    if source.num_bad:
        yield f"{source.num_bad:,} of {source.num_lines:,} lines are damaged and left out."
    if source.num_foreign:
        yield f"{source.num_foreign:,} lines are of another version's format and left out."
    if source.num_unknown:
        yield f"{source.num_unknown:,} lines are of a kind that this version does not know."


def _about_runs(store: Store) -> Iterator[str]:
    starts, stops, lost, is_cut, runs, logged = store.row(
        """SELECT count(*) FILTER (event = 'server.start'), count(*) FILTER (event = 'server.stop'),
               coalesce(sum(num_lost_lines) FILTER (event = 'server.stop'), 0),
               bool_or(NOT is_complete) FILTER (kind = 'end'),
               count(*) FILTER (kind = 'run'), count(*) FILTER (event = 'request.done')
           FROM good"""
    )
    if starts > 1:
        yield f"{starts} starts of a server, {stops} clean stops."
    if lost:
        yield f"{lost:,.0f} lines could not be written by the server."
    if runs > 1:
        yield f"{runs} replays are read as one."
    if runs and logged:
        yield "Logs and replays are read as one; --compare puts two side by side."
    if is_cut:
        yield "The replay was stopped before its end."


def _about_sums(store: Store) -> Iterator[str]:
    """Each prompt token is computed or reused; a client that left early is the one exception."""
    (wrong,) = store.row(
        """SELECT count(*) FROM requests WHERE origin = 'log' AND reason IN ('stop', 'length')
           AND prompt <> cached + computed"""
    )
    if wrong:
        yield f"Prompt tokens do not add up for {wrong:,} requests."


def _outcomes(store: Store) -> Table:
    rows = store.rows(
        """SELECT coalesce(reason, 'unknown') AS reason, count(*), count(*) / sum(count(*)) OVER (),
               sum(prompt), sum(generated)
           FROM requests GROUP BY 1 ORDER BY 2 DESC, 1"""
    )
    columns = (
        text("end", "ended by"),
        count("requests", "requests"),
        share("share", "share"),
        count("prompt_tokens", "prompt tokens"),
        count("generated_tokens", "generated"),
    )
    return Table(key="outcomes", title="Requests", columns=columns, rows=integers(rows, columns))


def _rejections(store: Store) -> Table:
    rows = store.rows(
        """SELECT coalesce(reason::VARCHAR, 'refused') AS reason, count(*), sum(num_prompt_tokens)
           FROM good WHERE event = 'request.rejected' OR outcome = 'refused'
           GROUP BY 1 ORDER BY 2 DESC, 1"""
    )
    columns = (
        text("reason", "not admitted because"),
        count("requests", "requests"),
        count("prompt_tokens", "prompt tokens"),
    )
    return Table(key="rejections", title="Refused", columns=columns, rows=integers(rows, columns))


def token_sums(store: Store) -> dict[str, int]:
    """Prompt tokens by where they came from, each prompt once; and what was written."""
    tiers = ("device", "ram", "disk", "reused_elsewhere")
    names = ("prompt", *tiers, "computed", "unread", "untold", "again")
    row = store.row(
        """SELECT sum(prompt), sum(device), sum(ram), sum(coalesce(disk, 0)),
               sum(cached - device - ram - coalesce(disk, 0)), sum(coalesce(computed, 0)),
               sum(greatest(prompt - cached - computed, 0)),
               sum(prompt) FILTER (computed IS NULL), sum(again)
           FROM requests WHERE NOT is_copy"""
    )
    (written,) = store.row("SELECT sum(generated) FROM requests")
    sums = {name: int(value or 0) for name, value in zip(names, row, strict=True)}
    return sums | {"written": int(written or 0)}


def _tokens(store: Store) -> Table:
    sums = token_sums(store)
    labels = {
        "prompt": "prompt tokens",
        "device": "reused from the device",
        "ram": "reused from RAM",
        "disk": "reused from disk",
        "reused_elsewhere": "reused, the server does not say from where",
        "computed": "computed",
        "unread": "never read: the request ended before",
        "untold": "reused or computed, the server does not say which",
        "again": "computed again after a preemption, in no sum above",
        "written": "generated",
    }
    total = sums["prompt"]
    rows: list[tuple[Any, ...]] = [
        (label, sums[name], sums[name] / total if total and name != "written" else None)
        for name, label in labels.items()
        if sums[name] or name in ("prompt", "computed")
    ]
    columns = (
        text("what", "of the prompts"),
        count("tokens", "tokens"),
        share("share", "share"),
    )
    return Table(
        key="tokens",
        title="Tokens",
        columns=columns,
        rows=integers(rows, columns),
        note="A prompt counts once, however many answers it has.",
    )


def _expectations(store: Store) -> list[Table]:
    rows: list[tuple[Cell, ...]] = store.rows(
        """SELECT CASE WHEN is_met THEN 'met' WHEN is_met IS NULL THEN 'not known' ELSE 'failed' END
               AS what, count(*) FROM good WHERE kind = 'verdict' GROUP BY 1 ORDER BY 1"""
    )
    columns = (text("what", "expectations"), count("number", "number"))
    table = Table(
        key="expectations",
        title="What the scenario expects",
        columns=columns,
        rows=integers(rows, columns),
    )
    return [table] if rows else []
