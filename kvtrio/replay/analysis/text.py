"""The report for a terminal: tables in columns, nothing that is empty."""

from collections.abc import Iterable

from kvtrio.replay.analysis.report import Report
from kvtrio.replay.analysis.table import Kind, Table, duration, shown

WIDTH = 100


def text_report(report: Report) -> str:
    parts = [text_head(report), *map(text_table, _said(report.tables))]
    return "\n\n".join(parts)


def _said(tables: Iterable[Table]) -> list[Table]:
    return [table for table in tables if table.rows]


def text_head(report: Report) -> str:
    source = report.source
    size = f"{source.num_lines:,} lines, {source.num_bytes / 1e6:,.1f} MB"
    lines = [f"{', '.join(source.names)}: {size}"]
    if report.first:
        lines.append(f"{report.first} to {report.last} UTC, {duration(report.span_s)}")
    return "\n".join([*lines, *report.remarks])


def text_table(table: Table) -> str:
    """Title, aligned columns, note."""
    kinds = [column.kind for column in table.columns]
    head = [column.label for column in table.columns]
    body = [
        [shown(cell, kind) for cell, kind in zip(row, kinds, strict=True)] for row in table.rows
    ]
    body = _without_repeats(body, table.labels)
    widths = [max(len(line[index]) for line in (head, *body)) for index in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if kind is Kind.TEXT else cell.rjust(width)
            for cell, width, kind in zip(line, widths, kinds, strict=True)
        ).rstrip()
        for line in (head, *body)
    ]
    rule = "  ".join("-" * width for width in widths)
    note = [*_wrapped(table.note)] if table.note else []
    return "\n".join([table.title, "=" * len(table.title), lines[0], rule, *lines[1:], *note])


def _without_repeats(body: list[list[str]], num_labels: int) -> list[list[str]]:
    """A label that is the same as above, and all left of it, is left out."""
    result = []
    above: list[str] = []
    for row in body:
        same = 0
        while same < num_labels - 1 and above and row[same] == above[same]:
            same += 1
        result.append([""] * same + row[same:])
        above = row
    return result


def _wrapped(note: str) -> Iterable[str]:
    line = ""
    for word in note.split():
        if len(line) + len(word) >= WIDTH:
            yield line
            line = ""
        line = f"{line} {word}" if line else word
    yield line
