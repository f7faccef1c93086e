"""The result as a table for people, and as plain data for programs."""

import os
import platform
from pathlib import Path
from statistics import median
from typing import Any

from kvtrio.bench.compare import Comparison, Plan, Row
from kvtrio.bench.measures import TOKENS_PER_S

NOTHING = "-"


def table(comparison: Comparison, labels: tuple[str, str]) -> str:
    """Medians and ratios, in Markdown with aligned columns."""
    a, b = labels
    head = ["", a, b, f"{a} is better"]
    body = [
        [f"{row.name}, {row.unit}", *map(_median, row.values), _ratio(row)]
        for row in comparison.rows
        if any(row.values)
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(line, widths) for line in (head, rule, *body))


def _line(cells: list[str], widths: list[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return f"| {' | '.join(padded)} |"


def _median(values: list[float]) -> str:
    if not values:
        return NOTHING
    value = median(values)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(row: Row) -> str:
    value = ratio(row)
    return NOTHING if value is None else f"{value:.2f}x"


def ratio(row: Row) -> float | None:
    """How many times better A is: its rate over B's, or B's time or memory over its."""
    if not all(row.values):
        return None
    a, b = map(median, row.values)
    return a / b if row.unit == TOKENS_PER_S else b / a


def plain_data(comparison: Comparison, plan: Plan) -> dict[str, Any]:
    """All values of all rounds, what was compared, and where."""
    return {
        "machine": machine(),
        "rounds": plan.rounds,
        "servers": {
            target.label: {"given": target.given, "version": version}
            for target, version in zip(plan.targets, comparison.versions, strict=True)
        },
        "rows": [
            {
                "name": row.name,
                "unit": row.unit,
                **{t.label: v for t, v in zip(plan.targets, row.values, strict=True)},
                "ratio": ratio(row),
            }
            for row in comparison.rows
        ],
        "notes": comparison.notes,
    }


def machine() -> str:
    """The processor, and how many of it."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return f"{name}, {os.cpu_count()} cores"
