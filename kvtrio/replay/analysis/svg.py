"""Plots as SVG text: scales, axes and shapes. Colours are classes, which the page's style knows."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from math import floor, log10

from attrs import frozen

WIDTH = 860
"""Of every plot, in its own units; a page scales it."""


@frozen
class Box:
    """Where the data goes, between the axes."""

    left: float
    top: float
    right: float
    bottom: float


@frozen
class Scale:
    """Values from ``low`` to ``high`` as positions from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = log10(low), log10(high), log10(max(value, 1e-12))
        share = (at - low) / (high - low) if high > low else 0.0
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def ticks(high: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to ``high``."""
    if high <= 0:
        return [0.0]
    rough = high / about
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * number for number in range(int(high / step + 1e-9) + 1)]


TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)


def time_ticks(high: float, about: int = 6) -> list[float]:
    """The same for seconds, in steps that clocks have."""
    step = next((step for step in TIME_STEPS if step * about >= high), 0)
    if high < TIME_STEPS[0] * about or not step:
        return ticks(high, about)
    return [float(step * number) for number in range(int(high / step + 1e-9) + 1)]


def plot(height: float, label: str, parts: Iterable[str]) -> str:
    """A whole picture; ``label`` says what it shows to those who do not see it."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A filled box, with a text that shows under the pointer."""
    inner = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" '
        f'height="{max(height, 0.5):.1f}" class="{kind}">{inner}</rect>'
    )


def words(x: float, y: float, content: str, anchor: str = "start", kind: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">'
        f"{escape(content)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def curve(points: Sequence[tuple[float, float]], kind: str) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" class="{kind}"/>'


def bottom_axis(
    box: Box, scale: Scale, marks: Iterable[float], label: Callable[[float], str]
) -> list[str]:
    parts = [line(box.left, box.bottom, box.right, box.bottom, "axis")]
    for mark in marks:
        x = scale(mark)
        parts.append(line(x, box.bottom, x, box.bottom + 4, "axis"))
        parts.append(words(x, box.bottom + 17, label(mark), "middle", "soft"))
    return parts


def left_axis(
    box: Box, scale: Scale, marks: Iterable[float], label: Callable[[float], str]
) -> list[str]:
    parts = []
    for mark in marks:
        y = scale(mark)
        parts.append(line(box.left, y, box.right, y, "grid"))
        parts.append(words(box.left - 8, y + 4, label(mark), "end", "soft"))
    return parts


def legend(x: float, y: float, entries: Iterable[tuple[str, str]]) -> list[str]:
    """(class, words) in a row."""
    parts = []
    for kind, content in entries:
        parts.append(rect(x, y - 9, 11, 11, kind))
        parts.append(words(x + 16, y + 1, content))
        x += 34 + 6.6 * len(content)
    return parts
