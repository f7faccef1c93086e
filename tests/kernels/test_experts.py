"""Experts and gates against naive float64 loops."""

from functools import partial

import numpy as np
import pytest
import torch

from kvtrio.kernels import reference_attention
from kvtrio.kernels import reference_experts as kernels
from kvtrio.kernels.reference import gated, gated_clamped

RNG = np.random.default_rng(23)
NUM_EXPERTS, NUM_USED, HIDDEN, SIZE = 5, 2, 8, 6


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape)).to(dtype)


def wide(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def matrices(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    gate, up = (tensor(NUM_EXPERTS, SIZE, HIDDEN, dtype=dtype) for _ in range(2))
    return gate, up, tensor(NUM_EXPERTS, HIDDEN, SIZE, dtype=dtype)


def test_the_largest_logits_choose_and_weigh():
    """Weights are the softmax over all experts, divided by the sum of the chosen ones'."""
    logits = tensor(7, NUM_EXPERTS)
    experts, weights = kernels.choose_experts(logits, NUM_USED)
    for row in range(7):
        shares = np.exp(wide(logits)[row])
        chosen = np.argsort(-shares)[:NUM_USED]
        assert experts[row].tolist() == chosen.tolist()
        np.testing.assert_allclose(
            wide(weights)[row], shares[chosen] / shares[chosen].sum(), rtol=1e-5
        )


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_each_row_gets_the_weighted_sum_of_its_experts(dtype, atol):
    """Whatever experts the other rows use."""
    x, (gate, up, down) = tensor(9, HIDDEN, dtype=dtype), matrices(dtype)
    choice = kernels.choose_experts(tensor(9, NUM_EXPERTS), NUM_USED)
    active = partial(gated, gelu_tanh=False)
    out = kernels.apply_experts(x, choice, kernels.Matrices(gate, up, down), active)
    assert out.dtype == torch.float32
    for row in range(9):
        expected = np.zeros(HIDDEN)
        for expert, weight in zip(*(part[row].tolist() for part in choice), strict=True):
            inner = wide(gate)[expert] @ wide(x)[row]
            inner = inner * sigmoid(inner) * (wide(up)[expert] @ wide(x)[row])
            expected += weight * (wide(down)[expert] @ inner)
        np.testing.assert_allclose(wide(out)[row], expected, atol=atol)


def test_a_gate_is_one_number_per_row():
    """The sigmoid of a dot product."""
    x, weight = tensor(4, HIDDEN), tensor(HIDDEN)
    out = kernels.gate_row(x, weight)
    np.testing.assert_allclose(wide(out)[:, 0], sigmoid(wide(x) @ wide(weight)), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-8)])
def test_gated_attention_multiplies_by_the_sigmoid(dtype, rtol):
    """Value by value, rounded once."""
    out, gates = tensor(4, 2, 8, dtype=dtype), tensor(4, 2, 8, dtype=dtype)
    result = reference_attention.gate(out, gates)
    assert result.dtype == dtype
    np.testing.assert_allclose(wide(result), wide(out) * sigmoid(wide(gates)), rtol=rtol, atol=1e-6)


def scored(logits: np.ndarray, bias: np.ndarray, scores: kernels.Scores) -> dict[int, float]:
    """Weights by expert of one row, as DeepSeek 3 describes it."""
    own = sigmoid(logits) if scores.is_sigmoid else np.exp(logits) / np.exp(logits).sum()
    ranked, size = own + bias, len(logits) // scores.num_groups
    groups = [sum(sorted(ranked[i : i + size])[-2:]) for i in range(0, len(logits), size)]
    best = np.argsort(groups)[::-1][: scores.num_groups_used]
    allowed = [expert for expert in range(len(logits)) if expert // size in best]
    chosen = sorted(allowed, key=lambda expert: -ranked[expert])[:3]
    total = sum(own[chosen]) if scores.normalised else 1.0
    return {expert: own[expert] / total * scores.scale for expert in chosen}


@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_scores_choose_within_groups_and_weigh_without_bias(is_sigmoid, normalised, groups):
    """The bias decides who is chosen, and only the best groups are chosen from."""
    logits, bias = tensor(20, 12), tensor(12)
    scores = kernels.Scores(is_sigmoid, normalised, 1.5, *groups)
    experts, weights = kernels.choose_scored(logits, bias, 3, scores)
    for row in range(20):
        expected = scored(wide(logits)[row], wide(bias), scores)
        found = dict(zip(experts[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-5)


def test_biases_of_experts_and_clamped_gates():
    """Each matrix of an expert adds its own bias; gate and up are clamped (gpt-oss)."""
    x, (gate, up, down) = 9 * tensor(6, HIDDEN), matrices()
    biases = (tensor(NUM_EXPERTS, SIZE), tensor(NUM_EXPERTS, SIZE), tensor(NUM_EXPERTS, HIDDEN))
    choice = kernels.choose_experts(tensor(6, NUM_EXPERTS), NUM_USED)
    out = kernels.apply_experts(x, choice, kernels.Matrices(gate, up, down, biases), gated_clamped)
    for row in range(6):
        expected = np.zeros(HIDDEN)
        for expert, weight in zip(*(part[row].tolist() for part in choice), strict=True):
            g, u = (
                wide(matrix)[expert] @ wide(x)[row] + wide(bias)[expert]
                for matrix, bias in zip((gate, up), biases, strict=False)
            )
            g, u = np.minimum(g, 7), np.clip(u, -7, 7)
            inner = g * sigmoid(1.702 * g) * (u + 1)
            expected += weight * (wide(down)[expert] @ inner + wide(biases[2])[expert])
        np.testing.assert_allclose(wide(out)[row], expected, rtol=1e-4, atol=1e-4)
