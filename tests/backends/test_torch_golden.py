"""The forward pass against what llama.cpp recorded, step by step along its greedy path."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from attrs import define, frozen

from harness.torch_models import Driver, load
from kvtrio.backends.torch_backend import TorchBackend

pytestmark = pytest.mark.slow
CHUNK = 256
"""Long prompts come in pieces of this size."""
CLEAR = 1e-3
"""Recorded lead of the best token below which another best token is no error."""
# fmt: off
TINY = [
    "qwen3", "qwen2.dequant", "llama3", "llama256", "gemma3", "qwen3-fullvocab-q8_0.dequant",
    "qwen3moe", "llama-moe", "qwen35", "qwen3next", "lfm2", "mamba2", "granitehybrid",
]
TYPES = [
    "bf16", "f16", "iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs",
    "iq4_nl", "iq4_xs", "mxfp4", "q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1",
    "q5_k", "q6_k", "q8_0", "tq1_0", "tq2_0",
]
# fmt: on
SMOLLM2_WITHOUT_TOP10 = 4
"""The one case that was recorded without its log-probabilities."""

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


def force(backend: TorchBackend, cases: Sequence[Case]) -> list[Forced]:
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


@pytest.mark.parametrize("name", [*TINY, *(f"llama256-{kind}.dequant" for kind in TYPES)])
def test_tiny_models_match_their_recordings(shared, name):
    """Each architecture and each weight type computes llama.cpp's log-probabilities in float32."""
    folder = shared / "tiny"
    cases = read_cases(folder / "golden" / f"{name}.json")
    backend = load(folder / "models" / f"{name.removesuffix('.dequant')}.gguf")
    for case, forced in zip(cases, force(backend, cases), strict=True):
        check(case, forced, 2e-2 if name == "gemma3" else 1e-3)


@pytest.mark.models
def test_smollm2_matches_in_float32(shared, smollm2):
    """SmolLM2, all cases and the long prompt; one case has greedy tokens only."""
    cases = read_cases(shared / "golden" / "smollm2-135m-f32.json")
    for i, (case, forced) in enumerate(zip(cases, force(load(smollm2), cases), strict=True)):
        if i == SMOLLM2_WITHOUT_TOP10:
            assert forced.best == case.greedy_tokens
        else:
            check(case, forced, 2e-3)


@pytest.mark.models
def test_gemma3_matches_in_float32(shared, gemma3):
    """Gemma 3, where the other engine rounds its activation through a table."""
    cases = read_cases(shared / "golden" / "gemma3-270m-f32.json")
    for case, forced in zip(cases, force(load(gemma3), cases), strict=True):
        check(case, forced, 2e-2)


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


@pytest.mark.models
@pytest.mark.parametrize(
    ("model", "golden", "quantised"),
    [
        ("smollm2", "smollm2-135m-f32", "smollm2-135m-q4_1-forced"),
        ("gemma3", "gemma3-270m-f32", "gemma3-270m-q4_k_m-forced"),
    ],
)
def test_bfloat16_stays_as_close_as_the_other_engine(shared, request, model, golden, quantised):
    """In the default type, divergence from float32 is at most 1.15 of what llama.cpp's int8
    activations cost; the recorded figure is computed again, so both sides mean the same."""
    folder = shared / "golden"
    cases = read_cases(folder / f"{golden}.json")[:-1]
    other = json.loads((folder / f"{quantised}.json").read_text(encoding="utf-8"))
    tops = [top for case in cases for top in case.top10]
    theirs = [[value for _, value in top] for steps in other["steps"] for top in steps]
    assert mean_divergence(tops, theirs) == pytest.approx(other["mean_kl"], abs=1e-5)
    results = force(load(request.getfixturevalue(model), dtype="bf16"), cases)
    ours = [list(step.values()) for forced in results for step in forced.logprobs if step]
    assert mean_divergence(tops, ours) <= 1.15 * other["mean_kl"]
