"""The comparison as one HTML page."""

from collections.abc import Iterable
from html import escape

from kvtrio.replay.analysis import plots
from kvtrio.replay.analysis.compare import LABELS, Comparison, Difference
from kvtrio.replay.analysis.compare_text import shown_differences
from kvtrio.replay.analysis.page import document, facts, figure, html_table
from kvtrio.replay.analysis.report import Report
from kvtrio.replay.analysis.svg import (
    WIDTH,
    Box,
    Scale,
    bottom_axis,
    line,
    plot,
    rect,
    ticks,
    words,
)
from kvtrio.replay.analysis.table import duration

ROW = 24
MARKS = {"better": "better", "worse": "worse"}


def comparison_page(comparison: Comparison) -> str:
    names = [", ".join(report.source.names) for report in comparison.reports]
    title = f"A: {names[0]}, B: {names[1]}"
    heads = (_head(label, report) for label, report in zip(LABELS, comparison.reports, strict=True))
    changes = figure(
        _changes(comparison.differences),
        "Change from A to B. The line is the noise: where the change lies in 95 of 100 rounds.",
    )
    return document(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            *heads,
            f"<section><h2>Differences</h2>{changes}",
            html_table(shown_differences(comparison)),
            "</section>\n<section><h2>Side by side</h2>",
            *_figures(comparison.reports),
            *map(html_table, comparison.tables),
            "</section>",
        ],
    )


def _head(label: str, report: Report) -> str:
    times = (
        f"{report.first} to {report.last} UTC, {duration(report.span_s)}" if report.first else ""
    )
    remarks = "".join(f"<p>{escape(remark)}</p>" for remark in report.remarks)
    return f'<h3>{label}</h3><p class="soft">{times}</p>{remarks}{facts(report.headline)}'


def _figures(reports: tuple[Report, Report]) -> Iterable[str]:
    for draw, caption in (
        (plots.waterfall, "Prompt tokens: what was reused, and in which turns the rest was read"),
        (plots.gap_distribution, "Answers by their longest gap"),
        (plots.tier_usage, "How full the tiers were"),
    ):
        for label, report in zip(LABELS, reports, strict=True):
            yield figure(draw(report.figures), f"{label}: {caption}.")


def _changes(differences: tuple[Difference, ...]) -> str:
    """Each measure's relative change with its noise, on one scale."""
    known = [each for each in differences if each.noise is not None and each.a > 0]
    if not known:
        return ""
    ends = [abs(end) / each.a for each in known for end in each.noise or ()]
    most = min(max(*ends, 0.05), 2.0) * 1.05
    box = Box(270, 8, WIDTH - 110, 8 + ROW * len(known))
    x = Scale(-most, most, box.left, box.right)
    parts = [line(x(0), box.top, x(0), box.bottom, "axis")]
    for row, each in enumerate(known):
        parts.append(_change(each, box, box.top + (row + 0.5) * ROW, x))
    up = ticks(most, 2)
    marks = [*(-mark for mark in up[:0:-1]), *up]
    parts += bottom_axis(box, x, marks, _percent)
    return plot(box.bottom + 28, "Change of each measure from A to B", parts)


def _change(each: Difference, box: Box, y: float, x: Scale) -> str:
    low, high = (end / each.a for end in each.noise or (0.0, 0.0))
    change, kind = each.difference / each.a, MARKS.get(each.verdict, "even")
    title = f"{each.name}: {100 * change:+.1f} %, noise {100 * low:+.1f} to {100 * high:+.1f} %"
    return "".join(
        (
            words(box.left - 12, y + 4, each.name, "end"),
            line(x(low), y, x(high), y, f"{kind} noise"),
            rect(x(change) - 4, y - 4, 8, 8, kind, title),
            words(box.right + 10, y + 4, _percent(change), "start", "soft"),
        )
    )


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %" if round(1000 * share) else "0 %"
