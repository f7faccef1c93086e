"""Recorded runs of another engine, and any backend along the same paths."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, frozen

from harness.torch_models import Driver

CHUNK = 256
"""Long prompts come in pieces of this size."""
CLEAR = 1e-3
"""Recorded lead of the best token below which another best token is no error."""
# fmt: off
TYPES = [
    "bf16", "f16", "iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs",
    "iq4_nl", "iq4_xs", "mxfp4", "q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1",
    "q5_k", "q6_k", "q8_0", "tq1_0", "tq2_0",
]
# fmt: on

Top = list[tuple[int, float]]


@frozen
class Case:
    """A recorded prompt; ``top10[i]`` was best before ``greedy_tokens[i]``."""

    prompt: list[int]
    greedy_tokens: list[int]
    top10: list[Top]


@define
class Forced:
    """What a case's steps gave along the recorded path."""

    best: list[int]
    logprobs: list[dict[int, float]]
    """Of the ids recorded for the step."""


def read_cases(path: Path) -> list[Case]:
    """All cases, the long one last."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    return [
        Case(
            case["prompt_tokens"],
            case["greedy_tokens"],
            [[(int(token), float(value)) for token, value in top] for top in case["top10"]],
        )
        for case in [*recorded["cases"], recorded["long"]]
    ]


def force(backend: Any, cases: Sequence[Case]) -> list[Forced]:
    """Run all cases side by side, each along its own recorded path."""
    driver = Driver(backend)
    paths = [case.prompt + case.greedy_tokens[:-1] for case in cases]
    computed = [0] * len(cases)
    results = [Forced([], []) for _ in cases]
    while active := [i for i, path in enumerate(paths) if computed[i] < len(path)]:
        chunks = []
        for i in active:
            rest = len(cases[i].prompt) - computed[i]
            size = min(rest, CHUNK) if rest > 0 else 1
            chunks.append(driver.chunk(i, computed[i], paths[i][computed[i] : computed[i] + size]))
            computed[i] += size
        for i, row in zip(active, driver.logprobs(*chunks), strict=True):
            if computed[i] >= len(cases[i].prompt):
                add(results[i], cases[i], row)
    return results


def add(result: Forced, case: Case, row: torch.Tensor) -> None:
    step = len(result.best)
    top = case.top10[step] if case.top10 else []
    result.best.append(int(row.argmax()))
    result.logprobs.append({token: float(row[token]) for token, _ in top})


def check(case: Case, forced: Forced, tolerance: float) -> None:
    """The best ids agree where the recorded lead is clear, and all ten log-probabilities do."""
    assert len(case.top10) == len(case.greedy_tokens) == len(forced.best)
    assert all(len(top) == 10 for top in case.top10)
    steps = zip(case.top10, forced.best, forced.logprobs, strict=True)
    for step, (top, best, logprobs) in enumerate(steps):
        lead = top[0][1] - top[1][1]
        assert best == top[0][0] or lead < CLEAR, f"step {step}"
        worst = max(abs(logprobs[token] - value) for token, value in top)
        assert worst <= tolerance, f"step {step}: {worst}"


def divergence(recorded: Sequence[float], computed: Sequence[float]) -> float:
    """sum p log(p / q) over ten ids and one bucket for everything else."""
    p, q = ([*map(math.exp, side), rest(side)] for side in (recorded, computed))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def rest(logprobs: Sequence[float]) -> float:
    return max(1.0 - sum(map(math.exp, logprobs)), 1e-12)


def mean_divergence(tops: Sequence[Top], computed: Sequence[Sequence[float]]) -> float:
    pairs = zip(tops, computed, strict=True)
    parts = [divergence([value for _, value in top], values) for top, values in pairs]
    return sum(parts) / len(parts)
