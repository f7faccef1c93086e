"""The plot of places: who ran where, when, and what the steps read meanwhile."""

from kvtrio.replay.analysis.figures import CLASSES, NUM_MOMENTS, Bar, Figures, Window
from kvtrio.replay.analysis.plots import CLASS_LABELS
from kvtrio.replay.analysis.svg import (
    WIDTH,
    Box,
    Scale,
    bottom_axis,
    left_axis,
    legend,
    plot,
    rect,
    ticks,
    time_ticks,
    words,
)
from kvtrio.replay.analysis.table import duration

MAX_HEIGHT = 480
STEPS_HEIGHT = 110


def places(figures: Figures) -> str:
    """A lane for each place: reading the prompt in full colour, writing the answer pale."""
    window = figures.window
    if window is None:
        return ""
    lane = min(20.0, MAX_HEIGHT / window.num_lanes)
    box = Box(64, 34, WIDTH - 20, 34 + lane * window.num_lanes)
    x = Scale(0, window.length_s, box.left, box.right)
    every = max(1, round(14 / lane))
    parts = [
        words(box.left - 8, box.top + (number + 0.72) * lane, str(number), "end", "soft")
        for number in range(0, window.num_lanes, every)
    ]
    parts += [_bar(bar, box, x, lane) for bar in window.bars]
    height = box.bottom + 24
    if window.steps:
        parts += _steps(window, Box(64, box.bottom + 30, box.right, box.bottom + STEPS_HEIGHT), x)
        height = box.bottom + STEPS_HEIGHT + 28
    else:
        parts += bottom_axis(box, x, time_ticks(window.length_s), duration)
    kinds = [kind for kind in CLASSES if any(bar.kind == kind for bar in window.bars)]
    parts += legend(box.left, 16, [(kind, CLASS_LABELS[kind]) for kind in kinds])
    note = "" if window.is_placed else "the server does not tell places; "
    parts.append(words(box.right, 16, f"{note}0 s is {window.start} UTC", "end", "soft"))
    return plot(height, "Places and chunks over time", parts)


def _bar(bar: Bar, box: Box, x: Scale, lane: float) -> str:
    top, height = box.top + bar.lane * lane + 1, lane - 2
    start, first, end = x(bar.start_s), x(bar.first_token_s), x(bar.end_s)
    title = (
        f"{CLASS_LABELS[bar.kind]}: prompt {bar.prompt:,}, reused {bar.cached:,}, first token "
        f"after {duration(max(0.0, bar.first_token_s - bar.start_s))}"
    )
    return rect(start, top, first - start, height, bar.kind, title) + rect(
        first, top, end - first, height, f"{bar.kind} pale", title
    )


def _steps(window: Window, box: Box, x: Scale) -> list[str]:
    """Of each moment the step that read most: prompt tokens, and rows that it wrote."""
    most = max(max(step.num_prefill_tokens + step.num_decode_rows for step in window.steps), 1)
    y = Scale(0, most, box.bottom, box.top)
    parts = left_axis(box, y, ticks(most, 2), lambda number: f"{number:,.0f}")
    wide = (box.right - box.left) / NUM_MOMENTS
    for step in window.steps:
        left, middle = x(step.at_s), y(step.num_decode_rows)
        if step.num_decode_rows:
            parts.append(rect(left, middle, wide, box.bottom - middle, "step"))
        if step.num_prefill_tokens:
            top = y(step.num_decode_rows + step.num_prefill_tokens)
            title = f"{step.num_prefill_tokens:,} tokens of prompts in a step"
            parts.append(rect(left, top, wide, middle - top, "prefill", title))
    parts += bottom_axis(box, x, time_ticks(window.length_s), duration)
    names = [("prefill", "tokens of prompts in a step"), ("step", "rows that decode")]
    return [*parts, *legend(box.left, box.top - 8, names)]
