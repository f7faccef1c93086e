"""What the plots show: as many numbers as a page can, however long the log."""

from math import floor, log10
from typing import Any

from attrs import frozen

from kvtrio.replay.analysis.hits import REASONS, UNKNOWN
from kvtrio.replay.analysis.overview import token_sums
from kvtrio.replay.analysis.store import Store
from kvtrio.replay.analysis.times import Limits

NUM_SLICES = 120
NUM_BARS = 64
NUM_MOMENTS = 260
"""In which a window is cut, to show its steps."""
BINS_PER_DECADE = 8
LATE = "late:"
"""Before the reason of a turn that came back after a long rest."""
CLASSES = ("hit", "missed", "cannot", "apart")
_CLASS = """CASE WHEN class = 'should' AND is_missed THEN 'missed' WHEN class = 'should' THEN 'hit'
    ELSE class END"""


@frozen
class Bar:
    """One request in its place; seconds from the window's start."""

    lane: int
    start_s: float
    first_token_s: float
    end_s: float
    kind: str
    """Of ``CLASSES``."""
    prompt: int
    cached: int


@frozen
class Chunks:
    """What the step that read most, of those in a moment, read and wrote."""

    at_s: float
    num_prefill_tokens: int
    num_decode_rows: int


@frozen(kw_only=True)
class Window:
    """A short time in full detail: around the longest pause."""

    start: str
    """UTC."""
    length_s: float
    num_lanes: int
    bars: tuple[Bar, ...]
    steps: tuple[Chunks, ...]
    """Those that the log has: a sample, unless it is at level debug."""
    is_placed: bool
    """False: the lanes are not the server's places, which were not told."""


@frozen(kw_only=True)
class Slice:
    """A part of the whole time."""

    at_s: float
    turns: tuple[int, ...]
    """Per member of ``CLASSES``."""
    device_share: float | None = None
    """Of its blocks, at the most."""
    ram_share: float | None = None
    num_running: float | None = None
    num_waiting: float | None = None


@frozen(kw_only=True)
class Figures:
    waterfall: tuple[tuple[str, int], ...]
    """Parts of all prompt tokens: where they came from, and in turns of which reason the others
    were computed."""
    gaps: tuple[tuple[float, str, int], ...]
    """Lower end of a class of longest gaps, cause, answers; classes of ``BINS_PER_DECADE``."""
    gap_limit_s: float
    slice_s: float
    slices: tuple[Slice, ...]
    window: Window | None


def figures_of(store: Store, limits: Limits) -> Figures:
    slice_s, slices = _slices(store)
    return Figures(
        waterfall=_waterfall(store),
        gaps=_gaps(store),
        gap_limit_s=limits.gap_s or 0.0,
        slice_s=slice_s,
        slices=slices,
        window=_window(store),
    )


def _waterfall(store: Store) -> tuple[tuple[str, int], ...]:
    sums = token_sums(store)
    tiers = ("device", "ram", "disk", "reused_elsewhere")
    computed = store.rows(
        f"""SELECT class = 'cannot' AND turn = 'after_gap' AS is_late,
                coalesce(miss_reason::VARCHAR, '{UNKNOWN}') AS why, sum(computed)
            FROM requests WHERE NOT is_copy AND computed > 0 GROUP BY 1, 2"""
    )
    computed.sort(key=lambda row: (bool(row[0]), REASONS.index(row[1])))
    parts = [(name, sums[name]) for name in tiers]
    parts += [(LATE + why if is_late else why, int(n)) for is_late, why, n in computed]
    return tuple(part for part in parts if part[1])


def _gaps(store: Store) -> tuple[tuple[float, str, int], ...]:
    rows = store.rows(
        f"""SELECT CAST(floor(log10(greatest(longest_gap_s, 1e-4)) * {BINS_PER_DECADE}) AS INT) AS
                bin, coalesce(longest_gap_cause::VARCHAR, '{UNKNOWN}') AS cause, count(*)
            FROM requests WHERE longest_gap_s IS NOT NULL GROUP BY 1, 2 ORDER BY 1, 2"""
    )
    return tuple((10 ** (bin_ / BINS_PER_DECADE), cause, number) for bin_, cause, number in rows)


def _slices(store: Store) -> tuple[float, tuple[Slice, ...]]:
    start, end = store.row("SELECT epoch(min(arrived)), epoch(max(ended)) FROM requests")
    if start is None or end <= start:
        return 0.0, ()
    width = (end - start) / NUM_SLICES
    place = f"least({NUM_SLICES - 1}, CAST(floor((epoch({{}}) - $start) / $width) AS INT))"
    turns: dict[tuple[int, str], int] = {
        (slot, kind): number
        for slot, kind, number in store.rows(
            f"SELECT {place.format('ended')}, {_CLASS}, count(*) FROM requests GROUP BY 1, 2",
            start=start,
            width=width,
        )
    }
    usage = _usage(store, place.format("timestamp"), start, width)
    slices = (
        Slice(
            at_s=slot * width,
            turns=tuple(turns.get((slot, kind), 0) for kind in CLASSES),
            **usage.get(slot, {}),
        )
        for slot in range(NUM_SLICES)
    )
    return width, tuple(slices)


def _usage(store: Store, place: str, start: float, width: float) -> dict[int, dict[str, Any]]:
    rows = store.rows(
        f"""SELECT {place} AS slot, max(num_device_blocks) / nullif(any_value(blocks), 0),
                max(num_host_blocks) / nullif(any_value(host), 0), avg(num_running),
                avg(num_waiting)
            FROM good, (SELECT max(num_blocks) AS blocks, max(num_host_blocks) AS host
                FROM good WHERE event = 'server.start')
            WHERE event = 'tier.usage' AND epoch(timestamp) >= $start
            GROUP BY 1 HAVING slot >= 0""",
        start=start,
        width=width,
    )
    names = ("device_share", "ram_share", "num_running", "num_waiting")
    return {slot: dict(zip(names, values, strict=True)) for slot, *values in rows}


def _window(store: Store) -> Window | None:
    """Around the middle of the longest pause's answer."""
    center = store.rows(
        """SELECT epoch(ended) - coalesce(decode_s, 0) / 2 FROM requests
           WHERE longest_gap_s IS NOT NULL ORDER BY longest_gap_s DESC, ended LIMIT 1"""
    )
    if not center:
        return None
    rows = store.rows(
        f"""SELECT place, epoch(arrived) + coalesce(queue_s, 0) AS start,
                epoch(arrived) + coalesce(first_token_s, total_s) AS first, epoch(ended) AS finish,
                {_CLASS}, prompt, cached
            FROM requests WHERE total_s IS NOT NULL
            ORDER BY abs((start + finish) / 2 - $center), ended, request_id LIMIT {NUM_BARS}""",
        center=center[0][0],
    )
    if not rows:
        return None
    placed = [row for row in rows if row[0] is not None]
    return _windowed(store, sorted(placed or rows, key=lambda row: (row[1], row[3])))


def _windowed(store: Store, rows: list[tuple[Any, ...]]) -> Window:
    starts, ends = sorted(row[1] for row in rows), sorted(row[3] for row in rows)
    # A few long answers would press all others flat.
    start, end = starts[len(starts) // 50], ends[-1 - len(ends) // 50]
    end = max(end, start + 1e-3)
    is_placed = rows[0][0] is not None
    lanes = [row[0] for row in rows] if is_placed else _lanes(rows)
    bars = tuple(
        Bar(lane, row[1] - start, row[2] - start, row[3] - start, *row[4:])
        for lane, row in zip(lanes, rows, strict=True)
        if row[3] > start and row[1] < end
    )
    steps = store.rows(
        f"""SELECT least(floor((epoch(timestamp) - $start) / ($end - $start) * {NUM_MOMENTS}),
                {NUM_MOMENTS - 1}) AS moment,
                coalesce(max(num_prefill_tokens), 0),
                coalesce(arg_max(num_decode_rows, num_prefill_tokens), 0)
            FROM good WHERE event = 'sched.step' AND epoch(timestamp) BETWEEN $start AND $end
            GROUP BY 1 ORDER BY 1""",
        start=start,
        end=end,
    )
    moment_s = (end - start) / NUM_MOMENTS
    (shown,) = store.row(
        "SELECT strftime(make_timestamp(CAST($s * 1e6 AS BIGINT)), '%H:%M:%S')", s=start
    )
    return Window(
        start=shown,
        length_s=end - start,
        num_lanes=1 + max(lanes),
        bars=bars,
        steps=tuple(Chunks(moment * moment_s, *counts) for moment, *counts in steps),
        is_placed=is_placed,
    )


def _lanes(rows: list[tuple[Any, ...]]) -> list[int]:
    """The first lane that is free, for each in order of its start."""
    busy: list[float] = []
    lanes = []
    for row in rows:
        free = next((lane for lane, end in enumerate(busy) if end <= row[1]), len(busy))
        busy[free : free + 1] = [row[3]]
        lanes.append(free)
    return lanes


def decades(low: float, high: float) -> list[float]:
    """Powers of ten from the one below ``low`` to the one above ``high``."""
    return [10.0**power for power in range(floor(log10(low)), floor(log10(high)) + 2)]
