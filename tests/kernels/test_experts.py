"""Experts and gates against naive float64 loops."""

from functools import partial

import numpy as np
import pytest
import torch

from kvtrio.kernels import reference_attention
from kvtrio.kernels import reference_experts as kernels
from kvtrio.kernels.reference import gated

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
