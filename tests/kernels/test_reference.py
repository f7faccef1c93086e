"""The row-wise kernels against naive float64 loops."""

import math

import numpy as np
import pytest
import torch

from kvtrio.kernels import reference as kernels

RNG = np.random.default_rng(7)
EXACT = {"rtol": 1e-5, "atol": 1e-6}
ROUNDED = {"rtol": 2.0**-8, "atol": 1e-6}
"""One rounding to bfloat16."""
TYPES = [(torch.float32, EXACT), (torch.bfloat16, ROUNDED)]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape)).to(dtype)


def wide(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def test_embed_takes_rows_and_scales_them_in_float32():
    """Each token gets its row of the table, times the scale, unrounded."""
    table = tensor(10, 6, dtype=torch.bfloat16)
    out = kernels.embed(torch.tensor([3, 0, 3]), table, 25.3)
    assert out.dtype == torch.float32
    np.testing.assert_allclose(wide(out), wide(table)[[3, 0, 3]] * 25.3, **EXACT)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_rms_norm_divides_by_the_root_of_the_mean_square(dtype, tolerance):
    """Every row, and every head of a row, is normed over its last axis alone."""
    x, weight = tensor(4, 3, 16, dtype=dtype), tensor(16)
    expected = np.empty(x.shape)
    for row in np.ndindex(4, 3):
        values = wide(x)[row]
        expected[row] = values / math.sqrt(np.mean(values**2) + 1e-3) * wide(weight)
    out = kernels.rms_norm(x, weight, 1e-3, dtype)
    assert out.dtype == dtype
    np.testing.assert_allclose(wide(out), expected, **tolerance)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_layer_norm_takes_the_mean_off(dtype, tolerance, has_bias):
    """Values over the last axis have mean 0 and variance 1 before weight and bias."""
    x, weight, bias = tensor(4, 16, dtype=dtype), tensor(16), tensor(16) if has_bias else None
    centred = wide(x) - wide(x).mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * wide(weight)
    expected += 0.0 if bias is None else wide(bias)
    out = kernels.layer_norm(x, weight, bias, 1e-5, dtype)
    assert out.dtype == dtype
    np.testing.assert_allclose(wide(out), expected, rtol=tolerance["rtol"], atol=1e-5)


def test_rms_norm_of_huge_bfloat16_values_stays_finite():
    """Squares are summed in float32, where the residual stream of large models would overflow."""
    out = kernels.rms_norm(torch.full((1, 8), 1e15).bfloat16(), torch.ones(8), 1e-6, torch.bfloat16)
    np.testing.assert_allclose(wide(out), 1.0, **ROUNDED)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_sums_over_inputs(dtype, tolerance, has_bias):
    """Output o of a row is the dot product with weight row o, plus bias o."""
    x, weight = tensor(3, 40, dtype=dtype), tensor(5, 40, dtype=dtype)
    bias = tensor(5) if has_bias else None
    expected = wide(x) @ wide(weight).T + (wide(bias) if bias is not None else 0.0)
    out = kernels.linear(x, weight, bias)
    assert out.dtype == dtype
    np.testing.assert_allclose(wide(out), expected, rtol=4 * tolerance["rtol"], atol=0.05)
    if dtype == torch.float32:
        np.testing.assert_allclose(wide(out), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_factors", [True, False])
def test_rope_angles_follow_the_formula_far_out(has_factors):
    """At position 100,000 the angle is still exact, with scale and factors applied."""
    factors = torch.tensor([1.0, 2.0, 8.0]) if has_factors else None
    positions = torch.tensor([0, 1, 100_000])
    angles = kernels.rope_angles(positions, 6, 10000.0, 0.5, factors)
    for n, position in enumerate(positions.tolist()):
        for i in range(3):
            angle = position * 0.5 * 10000.0 ** (-2 * i / 6)
            angle /= float(factors[i]) if factors is not None else 1.0
            assert float(angles[n, i]) == pytest.approx(angle, rel=1e-14)


@pytest.mark.parametrize("adjacent", [True, False])
def test_rope_turns_each_pair_and_leaves_the_rest(adjacent):
    """Pairs are turned by their angle; values beyond the rotated part stay as they are."""
    x, angles = tensor(3, 2, 10), wide(tensor(3, 3))
    cos, sin = torch.from_numpy(np.cos(angles)).float(), torch.from_numpy(np.sin(angles)).float()
    expected = wide(x).copy()
    for n, h, i in np.ndindex(3, 2, 3):
        a, b = (2 * i, 2 * i + 1) if adjacent else (i, i + 3)
        turned = complex(wide(x)[n, h, a], wide(x)[n, h, b]) * np.exp(1j * angles[n, i])
        expected[n, h, a], expected[n, h, b] = turned.real, turned.imag
    np.testing.assert_allclose(wide(kernels.rope(x, cos, sin, adjacent)), expected, **EXACT)


def test_rope_of_whole_heads():
    """A head that is rotated as a whole keeps its norm."""
    x, angles = tensor(5, 2, 8), tensor(5, 4)
    out = kernels.rope(x, angles.cos(), angles.sin(), False)
    np.testing.assert_allclose(wide(out.norm(dim=-1)), wide(x.norm(dim=-1)), **EXACT)


def test_write_cache_fills_the_named_slots_only():
    """Row n lands in slot n's block and place, rounded to the cache's type."""
    cache = torch.zeros(4, 3, 2, 5, dtype=torch.bfloat16)
    values = tensor(3, 2, 5)
    kernels.write_cache(cache, torch.tensor([11, 0, 4]), values)
    expected = torch.zeros_like(cache)
    for row, (block, place) in enumerate([(3, 2), (0, 0), (1, 1)]):
        expected[block, place] = values[row].bfloat16()
    assert torch.equal(cache, expected)


def test_copy_places_copies_the_first_places_of_all_layers():
    """Only the asked places of the target change, in every layer."""
    cache = tensor(2, 4, 3, 1, 2)
    before = cache.clone()
    kernels.copy_places(cache[:, 1], cache[:, 3], 2)
    assert torch.equal(cache[:, 3, :2], before[:, 1, :2])
    assert torch.equal(cache[:, 3, 2:], before[:, 3, 2:])
    assert torch.equal(cache[:, :3], before[:, :3])


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("gelu_tanh", [True, False])
def test_gated_applies_the_activation_to_the_gate(dtype, tolerance, gelu_tanh):
    """SiLU and tanh-GELU by their formulas, times up, rounded once."""
    gate, up = tensor(4, 9, dtype=dtype), tensor(4, 9, dtype=dtype)
    expected = np.empty((4, 9))
    for place in np.ndindex(4, 9):
        g = float(gate[place])
        inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
        active = g / 2 * (1 + math.tanh(inner)) if gelu_tanh else g / (1 + math.exp(-g))
        expected[place] = active * float(up[place])
    out = kernels.gated(gate, up, gelu_tanh)
    assert out.dtype == dtype
    np.testing.assert_allclose(wide(out), expected, **tolerance)


def test_softcap_bounds_and_keeps_small_values():
    """Nothing passes the cap, and far below it values hardly change."""
    x = torch.tensor([-1e4, -1.0, 0.0, 0.01, 40.0])
    expected = [30 * math.tanh(v / 30) for v in x.tolist()]
    np.testing.assert_allclose(wide(kernels.softcap(x, 30.0)), expected, **EXACT)


def test_head_tells_close_logits_apart_that_bfloat16_would_tie():
    """The best of each row are exact to float32, whatever the other rows are."""
    x, weight = tensor(3, 64, dtype=torch.bfloat16), tensor(1000, 64, dtype=torch.bfloat16)
    x, weight = x * 4, weight * 4
    exact = x.double() @ weight.double().T
    out = kernels.head(x, weight)
    best = exact.topk(20, dim=-1).indices
    close = (out.double() - exact).gather(-1, best).abs().max()
    rounded = (torch.nn.functional.linear(x, weight).double() - exact).gather(-1, best).abs().max()
    assert close < 1e-2 < rounded
    alone = kernels.head(x[1:2], weight).gather(-1, best[1:2])
    torch.testing.assert_close(alone, out[1:2].gather(-1, best[1:2]))
