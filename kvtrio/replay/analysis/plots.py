"""The plots of a report, each of one part of its figures; empty text where there is nothing."""

from collections import defaultdict
from collections.abc import Sequence

from kvtrio.replay.analysis.figures import BINS_PER_DECADE, CLASSES, LATE, Figures, decades
from kvtrio.replay.analysis.svg import (
    WIDTH,
    Box,
    Scale,
    bottom_axis,
    curve,
    left_axis,
    legend,
    line,
    plot,
    rect,
    ticks,
    time_ticks,
    words,
)
from kvtrio.replay.analysis.table import duration

PARTS = {
    "device": ("device", "reused, on the device"),
    "ram": ("ram", "reused, from RAM"),
    "disk": ("disk", "reused, from disk"),
    "reused_elsewhere": ("device", "reused"),
    "nothing_missed": ("new", "computed: the last token"),
    "new_tokens": ("new", "computed: new in a later turn"),
    "first_turn": ("cannot", "computed: first turns"),
    "below_minimum": ("cannot", "computed: little in common"),
    "diverged": ("diverged", "computed: rewritten"),
    "adapter_mismatch": ("missed", "computed: other adapters"),
    "evicted": ("missed", "computed: evicted"),
    "no_checkpoint": ("missed", "computed: no checkpoint"),
    "caching_off": ("apart", "computed: no reuse wanted"),
    "not_started": ("apart", "computed: never started"),
}
CAUSES = ("step", "prefill", "move", "preempted", "reader", "unknown")
CLASS_LABELS = {"hit": "hit", "missed": "missed", "cannot": "cannot hit", "apart": "no turn"}


def waterfall(figures: Figures) -> str:
    """All prompt tokens at the top, then what was taken off them, down to nothing."""
    total = sum(tokens for _, tokens in figures.waterfall)
    if not total:
        return ""
    height, box = 26, Box(230, 8, WIDTH - 150, 0)
    x = Scale(0, total, box.left, box.right)
    parts = [_waterfall_row(box, 0, ("prompt tokens", 0, total, "total"), x, total)]
    at = 0
    for row, (name, tokens) in enumerate(figures.waterfall, 1):
        kind, label = _part(name)
        parts.append(_waterfall_row(box, row * height, (label, at, tokens, kind), x, total))
        at += tokens
        parts.append(line(x(at), (row + 0.2) * height, x(at), (row + 1.4) * height, "grid"))
    parts.pop()
    whole = (len(figures.waterfall) + 1) * height + 12
    return plot(whole, "Where prompt tokens came from", parts)


def _part(name: str) -> tuple[str, str]:
    if name.startswith(LATE):
        kind, label = _part(name.removeprefix(LATE))
        return ("cannot" if kind == "missed" else kind), f"{label}, after a rest"
    return PARTS.get(name, ("apart", "computed: no reason told"))


def _waterfall_row(
    box: Box, y: float, part: tuple[str, int, int, str], x: Scale, total: int
) -> str:
    label, start, tokens, kind = part
    share = f"{tokens:,} · {100 * tokens / total:.1f} %" if tokens < total else f"{tokens:,}"
    return "".join(
        (
            words(box.left - 12, y + 22, label, "end"),
            rect(x(start), y + 8, x(start + tokens) - x(start), 19, kind, f"{label}: {share}"),
            words(box.right + 10, y + 22, share, "start", "soft"),
        )
    )


def turns_over_time(figures: Figures) -> str:
    """Stacked columns: hit, missed, cannot hit."""
    slices, width_s = figures.slices, figures.slice_s
    if not slices:
        return ""
    most = max(sum(each.turns) for each in slices)
    box = Box(64, 34, WIDTH - 20, 200)
    x = Scale(0, width_s * len(slices), box.left, box.right)
    y = Scale(0, most, box.bottom, box.top)
    parts = left_axis(box, y, ticks(most, 4), lambda number: f"{number:,.0f}")
    for each in slices:
        base = 0
        for kind, number in zip(CLASSES, each.turns, strict=True):
            if number:
                left, top = x(each.at_s), y(base + number)
                title = f"{number:,} {CLASS_LABELS[kind]}, from {duration(each.at_s)}"
                wide = (box.right - box.left) / len(slices)
                parts.append(rect(left, top, wide - 0.7, y(base) - top, kind, title))
                base += number
    parts += bottom_axis(box, x, time_ticks(x.high), duration)
    shown = [kind for index, kind in enumerate(CLASSES) if any(e.turns[index] for e in slices)]
    parts += legend(box.left, 16, [(kind, CLASS_LABELS[kind]) for kind in shown])
    return plot(232, "Turns over time, by whether they hit", parts)


def gap_distribution(figures: Figures) -> str:
    """Longest gaps on a scale of powers of ten, by cause, with the limit."""
    if not figures.gaps:
        return ""
    sums: dict[float, int] = defaultdict(int)
    for low, _, number in figures.gaps:
        sums[low] += number
    marks = decades(min(sums), max(max(sums), figures.gap_limit_s))
    box = Box(64, 34, WIDTH - 20, 230)
    x = Scale(marks[0], marks[-1], box.left, box.right, is_log=True)
    y = Scale(0, max(sums.values()), box.bottom, box.top)
    parts = left_axis(box, y, ticks(y.high, 4), lambda number: f"{number:,.0f}")
    base: dict[float, int] = defaultdict(int)
    for cause in CAUSES:
        for low, _, number in (each for each in figures.gaps if each[1] == cause):
            left, right = x(low), x(low * 10 ** (1 / BINS_PER_DECADE))
            top = y(base[low] + number)
            title = f"{number:,} answers, {cause}, from {duration(low)}"
            parts.append(rect(left, top, right - left - 1, y(base[low]) - top, cause, title))
            base[low] += number
    limit = x(figures.gap_limit_s)
    parts.append(line(limit, box.top, limit, box.bottom, "limit"))
    parts.append(words(limit + 5, box.top + 10, f"limit {duration(figures.gap_limit_s)}"))
    parts += bottom_axis(box, x, marks, duration)
    shown = [cause for cause in CAUSES if any(each[1] == cause for each in figures.gaps)]
    parts += legend(box.left, 16, [(cause, cause) for cause in shown])
    return plot(262, "Longest gap of each answer", parts)


def tier_usage(figures: Figures) -> str:
    """How full device and RAM are; below, requests that run and wait."""
    shares = {"device": "device_share", "ram": "ram_share"}
    names = {"device": "blocks of the device in use", "ram": "blocks of RAM in use"}
    counts = {"running": "num_running", "waiting": "num_waiting"}
    if not any(each.num_running is not None for each in figures.slices):
        return ""
    known = {kind: name for kind, name in shares.items() if any(_values(figures, [name]))}
    upper = Box(64, 34, WIDTH - 20, 170 if known else 0)
    lower = Box(64, upper.bottom + 46, WIDTH - 20, upper.bottom + 130)
    x = Scale(0, figures.slice_s * len(figures.slices), upper.left, upper.right)
    y = Scale(0, 1, upper.bottom, upper.top)
    parts = []
    if known:
        parts = left_axis(upper, y, (0, 0.25, 0.5, 0.75, 1), lambda share: f"{100 * share:.0f} %")
        parts += _curves(figures, known, x, y)
        parts += legend(upper.left, 16, [(kind, names[kind]) for kind in known])
    most = max(_values(figures, [*counts.values()]), default=1.0) or 1.0
    z = Scale(0, most, lower.bottom, lower.top)
    parts += left_axis(lower, z, ticks(most, 3), lambda number: f"{number:,.0f}")
    parts += _curves(figures, counts, x, z)
    parts += bottom_axis(lower, x, time_ticks(x.high), duration)
    parts += legend(lower.left, lower.top - 14, [("running", "running"), ("waiting", "waiting")])
    return plot(lower.bottom + 32, "How full the tiers were", parts)


def _values(figures: Figures, names: Sequence[str]) -> list[float]:
    found = (getattr(each, name) for each in figures.slices for name in names)
    return [value for value in found if value is not None]


def _curves(figures: Figures, names: dict[str, str], x: Scale, y: Scale) -> list[str]:
    parts = []
    for kind, name in names.items():
        middle = figures.slice_s / 2
        points = [
            (x(each.at_s + middle), y(value))
            for each in figures.slices
            if (value := getattr(each, name)) is not None
        ]
        if points:
            parts.append(curve(points, f"curve {kind}-line"))
    return parts
