"""The forward pass against what llama.cpp recorded, step by step along its greedy path."""

import json

import pytest

from harness.golden import TYPES, check, force, mean_divergence, read_cases
from harness.torch_models import load

pytestmark = pytest.mark.slow
# fmt: off
TINY = [
    "qwen3", "qwen2.dequant", "llama3", "llama256", "gemma3", "qwen3-fullvocab-q8_0.dequant",
    "qwen3moe", "llama-moe", "qwen35", "qwen3next", "lfm2", "mamba2", "granitehybrid", "phi3",
    "phi3-short", "gpt-oss", "gpt-oss-mxfp4.dequant", "glm4moe", "deepseek2",
]
# fmt: on
CONTEXTS = {"phi3-short": 1024}
"""As the recording server had it, where that decides something."""
SMOLLM2_WITHOUT_TOP10 = 4
"""The one case that was recorded without its log-probabilities."""


@pytest.mark.parametrize("name", [*TINY, *(f"llama256-{kind}.dequant" for kind in TYPES)])
def test_tiny_models_match_their_recordings(shared, name):
    """Each architecture and each weight type computes llama.cpp's log-probabilities in float32."""
    folder = shared / "tiny"
    cases = read_cases(folder / "golden" / f"{name}.json")
    stem = name.removesuffix(".dequant").removesuffix("-short")
    context = CONTEXTS.get(name, 2048)
    backend = load(folder / "models" / f"{stem}.gguf", max_context=context)
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
