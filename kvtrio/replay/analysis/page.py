"""The report as one HTML page that needs nothing else: no script, no font, no picture."""

from collections.abc import Callable, Iterable
from html import escape

from kvtrio.replay.analysis import lanes, plots
from kvtrio.replay.analysis.figures import Figures
from kvtrio.replay.analysis.report import Report
from kvtrio.replay.analysis.style import STYLE
from kvtrio.replay.analysis.table import Kind, Table, duration, shown

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
SHORT = 16
"""Tables of so many rows are not split between sheets of paper."""
SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("What was reused", ("tokens", "hits_should", "hits_cannot", "hits_apart", "reasons")),
    ("What was lost", ("divergence", "evictions", "intervals", "discards", "moves")),
    ("How long people waited", ("times", "goodput", "queue")),
    ("Who waited for whom", ("stall_causes", "stall_pairs", "stall_worst")),
    ("Who got what", ("by_adapters", "by_tenant", "by_purpose")),
    ("Requests", ("outcomes", "rejections", "expectations")),
)
Plot = Callable[[Figures], str]
PLOTS: dict[str, tuple[tuple[Plot, str], ...]] = {
    "What was reused": (
        (plots.waterfall, "Prompt tokens: what was reused, and in which turns the rest was read."),
        (plots.turns_over_time, "Turns by the time at which they ended."),
    ),
    "What was lost": (
        (
            plots.tier_usage,
            "Blocks in use at the fullest moment of each interval, and on average "
            "requests that run and wait.",
        ),
    ),
    "How long people waited": (
        (plots.gap_distribution, "Answers by their longest gap, and what it was spent on."),
    ),
    "Who waited for whom": (
        (
            lanes.places,
            "Around the longest pause. A lane is a place: reading the prompt in full colour, "
            "writing the answer pale. Below: the steps that were logged.",
        ),
    ),
}


def report_page(report: Report) -> str:
    title = f"Report: {', '.join(report.source.names)}"
    return document(title, [_head(report, title), *_sections(report)])


def document(title: str, parts: Iterable[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{''.join(parts)}</body></html>\n"
    )


def _head(report: Report, title: str) -> str:
    source = report.source
    times = (
        f"{report.first} to {report.last} UTC, {duration(report.span_s)}. " if report.first else ""
    )
    size = f"{source.num_lines:,} lines, {source.num_bytes / 1e6:,.1f} MB."
    remarks = "".join(f"<p>{escape(remark)}</p>" for remark in report.remarks)
    return (
        f'<h1>{escape(title)}</h1><p class="soft">{times}{size}</p>'
        + (f'<div class="remarks">{remarks}</div>' if remarks else "")
        + facts(report.headline)
    )


def facts(headline: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
        for label, value in headline
    )
    return f'<div class="facts">{cells}</div>'


def _sections(report: Report) -> Iterable[str]:
    tables = {table.key: table for table in report.tables if table.rows}
    for heading, keys in SECTIONS:
        figures = [
            figure(draw(report.figures), caption) for draw, caption in PLOTS.get(heading, ())
        ]
        parts = [*figures, *(html_table(tables[key]) for key in keys if key in tables)]
        if any(parts):
            yield f"<section><h2>{escape(heading)}</h2>{''.join(parts)}</section>\n"


def figure(picture: str, caption: str) -> str:
    if not picture:
        return ""
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>\n"


def html_table(table: Table) -> str:
    kinds = [column.kind for column in table.columns]
    head = "".join(
        f'<th scope="col"{_css(column.kind)}>{escape(column.label)}</th>'
        for column in table.columns
    )
    short = " short" if len(table.rows) <= SHORT else ""
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<h3>{escape(table.title)}</h3>{note}"
        f'<div class="scroll{short}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(_rows(table, kinds))}</tbody></table></div>\n"
    )


def _rows(table: Table, kinds: list[Kind]) -> Iterable[str]:
    """A label that is the same as above is not said again; a new first label starts a group."""
    above: tuple[object, ...] = ()
    for row in table.rows:
        same = 0
        while same < table.labels - 1 and above and row[same] == above[same]:
            same += 1
        cells = "".join(
            f"<td{_css(kind)}>{'' if index < same else escape(shown(cell, kind))}</td>"
            for index, (cell, kind) in enumerate(zip(row, kinds, strict=True))
        )
        is_group = table.labels > 1 and above and not same
        yield f"<tr{' class=first' if is_group else ''}>{cells}</tr>"
        above = row


def _css(kind: Kind) -> str:
    return ' class="text"' if kind is Kind.TEXT else ""
