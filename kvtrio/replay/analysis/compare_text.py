"""The comparison for people: in a terminal and, with ``compare_page``, on a page."""

from kvtrio.replay.analysis.bootstrap import CONFIDENCE, NUM_ROUNDS
from kvtrio.replay.analysis.compare import LABELS, Comparison, Difference
from kvtrio.replay.analysis.table import Column, Kind, Table, shown, text
from kvtrio.replay.analysis.text import text_head, text_table


def text_comparison(comparison: Comparison) -> str:
    heads = [
        f"{label}: {text_head(report)}"
        for label, report in zip(LABELS, comparison.reports, strict=True)
    ]
    tables = [shown_differences(comparison), *comparison.tables]
    return "\n\n".join([*heads, *map(text_table, tables)])


def shown_differences(comparison: Comparison) -> Table:
    """Each number in its own unit."""
    right = Kind.COUNT
    columns = (
        text("measure", ""),
        *(Column(label.lower(), label, right) for label in LABELS),
        Column("difference", "B - A", right),
        Column("noise", f"in {CONFIDENCE:.0%} of rounds", right),
        text("verdict", "B is"),
    )
    rows = tuple(_cells(each) for each in comparison.differences)
    return Table(
        key="differences",
        title="Differences and their noise",
        columns=columns,
        rows=rows,
        note=explanation(comparison),
    )


def explanation(comparison: Comparison) -> str:
    drawn = (
        "Both replay one scenario: the same sessions are drawn for both."
        if comparison.is_paired
        else "Sessions are drawn for each side alone: other traffic is part of the noise."
    )
    rule = (
        " A server does not tell why it reused no more, so that for both a later turn counts as "
        "missed if it reused less than its session's prompt before had."
        if comparison.is_untold
        else ""
    )
    return (
        f"Noise: whole sessions drawn again with repetition, {NUM_ROUNDS:,} rounds with a fixed "
        f"seed. {drawn}{rule}"
    )


def _cells(each: Difference) -> tuple[str, ...]:
    noise = each.noise
    between = "-" if noise is None else " to ".join(_signed(end, each.kind) for end in noise)
    return (
        each.name,
        shown(each.a, each.kind),
        shown(each.b, each.kind),
        _signed(each.difference, each.kind),
        between,
        each.verdict,
    )


def _signed(value: float, kind: Kind) -> str:
    """Differences of shares are points of a hundred."""
    size = f"{100 * abs(value):.1f} pp" if kind is Kind.SHARE else shown(abs(value), kind)
    is_nothing = not any(digit in size for digit in "123456789")
    return size if is_nothing else f"{'+' if value > 0 else '-'}{size}"
