"""Recurrent layers against plain float64 recurrences, row by row."""

import itertools

import numpy as np
import pytest
import torch

from kvtrio.kernels import reference_recurrent as kernels
from kvtrio.kernels.reference_delta_net import delta_rule, spread_heads, unit_length
from kvtrio.kernels.reference_mamba2 import state_space

RNG = np.random.default_rng(17)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CHUNKS, HEADS, KEY, VALUE, GROUPS = 2, 4, 6, 5, 2
LENGTHS = [1, 2, 63, 64, 200]


def tensor(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape)).float()


def wide(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 9])
def test_causal_conv_sums_over_rows_before(num_rows, has_bias):
    """Each channel sees its own last rows, across the border of chunks; the history moves on."""
    x, history, weight = tensor(2, num_rows, 5), tensor(2, 3, 5), tensor(5, 4)
    bias = tensor(5) if has_bias else None
    out, left = kernels.causal_conv(x, weight, bias, history)
    joined = np.concatenate((wide(history), wide(x)), 1)
    for chunk, row, channel in np.ndindex(2, num_rows, 5):
        terms = [wide(weight)[channel, j] * joined[chunk, row + j, channel] for j in range(4)]
        expected = sum(terms) + (wide(bias)[channel] if bias is not None else 0.0)
        assert float(out[chunk, row, channel]) == pytest.approx(expected, abs=1e-5)
    np.testing.assert_array_equal(wide(left), joined[:, -3:])


def test_a_convolved_row_has_the_same_bits_in_any_chunk():
    """Its sum has one order, whatever comes with it."""
    x, weight, history = tensor(1, 40, 7), tensor(7, 4), torch.zeros(1, 3, 7)
    whole, _ = kernels.causal_conv(x, weight, None, history)
    parts = []
    for first, last in itertools.pairwise((0, 1, 2, 9, 40)):
        out, history = kernels.causal_conv(x[:, first:last], weight, None, history)
        parts.append(out)
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize(
    ("start", "num_rows", "expected"),
    [
        (0, 1, (1,)),
        (0, 64, (64,)),
        (0, 65, (64, 1)),
        (63, 1, (1,)),
        (63, 2, (1, 1)),
        (64, 64, (64,)),
        (70, 200, (58, 64, 64, 14)),
    ],
)
def test_pieces_end_at_fixed_positions(start, num_rows, expected):
    """Borders do not depend on where a chunk starts."""
    assert kernels.pieces(start, num_rows) == expected


def test_decays_are_products_of_what_each_row_leaves():
    """From row i to row t all that comes after i up to t is multiplied, and nothing from t on."""
    log_decay = -torch.rand(1, 1, 5)
    left, between = kernels.decays(log_decay)
    rates = np.exp(wide(log_decay)[0, 0])
    for t, i in np.ndindex(5, 5):
        expected = np.prod(rates[i + 1 : t + 1]) if i <= t else 0.0
        assert float(between[0, 0, t, i]) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(wide(left)[0, 0], np.cumprod(rates), rtol=1e-5)


def test_decays_stay_numbers_when_nothing_is_left():
    """A head that forgets all at once gives zeros, not the ratio of two zeros."""
    left, between = kernels.decays(torch.full((1, 1, 64), -1e4))
    assert left.eq(0).all()
    assert torch.equal(between[0, 0], torch.eye(64))


def delta_inputs(num_rows: int) -> tuple[torch.Tensor, ...]:
    shape = (CHUNKS, num_rows, HEADS)
    q, k = (unit_length(tensor(*shape, KEY), 1e-6) for _ in range(2))
    log_decay, beta = -torch.rand(shape) * 0.2, torch.rand(shape)
    return q, k, tensor(*shape, VALUE), log_decay, beta


def naive_delta_rule(inputs: tuple[torch.Tensor, ...], state: torch.Tensor):
    q, k, v, log_decay, beta = map(wide, inputs)
    states, out = wide(state).copy(), np.empty(v.shape)
    for chunk, row, head in np.ndindex(v.shape[:3]):
        at = (chunk, row, head)
        s = states[chunk, head] * np.exp(log_decay[at])
        s = s + np.outer(k[at], beta[at] * (v[at] - k[at] @ s))
        states[chunk, head], out[at] = s, q[at] @ s
    return out, states


@pytest.mark.parametrize("start", [0, 30])
@pytest.mark.parametrize("num_rows", LENGTHS)
def test_the_delta_rule_equals_its_recurrence(num_rows, start):
    """In pieces from any position, and row by row, with the state before and behind."""
    inputs, state = delta_inputs(num_rows), tensor(CHUNKS, HEADS, KEY, VALUE)
    expected, behind = naive_delta_rule(inputs, state)
    for sizes in (kernels.pieces(start, num_rows), (1,) * num_rows):
        out, left = kernels.in_pieces(delta_rule, inputs, state, sizes)
        np.testing.assert_allclose(wide(out), expected, **CLOSE)
        np.testing.assert_allclose(wide(left), behind, **CLOSE)


def test_the_delta_rule_with_equal_keys_stays_exact():
    """The hardest case of the triangular system: each row corrects what all others wrote."""
    q, k, v, _, _ = delta_inputs(64)
    k = k[:, :1].expand_as(k)
    shape = v.shape[:3]
    inputs = (q, k, v, torch.zeros(shape), torch.ones(shape))
    state = tensor(CHUNKS, HEADS, KEY, VALUE)
    expected, behind = naive_delta_rule(inputs, state)
    out, left = delta_rule(inputs, state)
    np.testing.assert_allclose(wide(out), expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(wide(left), behind, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("tiled", "expected"), [(True, [0, 1, 0, 1]), (False, [0, 0, 1, 1])])
def test_value_heads_share_key_heads(tiled, expected):
    """In turns or one after the other, as the architecture has it."""
    x = tensor(3, 1, 2, 6)
    out = spread_heads(x, 4, tiled)
    assert out.shape == (3, 1, 4, 6)
    for head, source in enumerate(expected):
        assert torch.equal(out[:, :, head], x[:, :, source])


def test_unit_length_adds_epsilon_under_the_root():
    """A tiny vector is damped and zero stays zero."""
    x = torch.tensor([[3.0, 4.0], [3e-4, 4e-4], [0.0, 0.0]])
    expected = wide(x) / np.sqrt((wide(x) ** 2).sum(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(wide(unit_length(x, 1e-6)), expected, rtol=1e-5)


def naive_state_space(inputs: tuple[torch.Tensor, ...], state: torch.Tensor):
    x, b, c, log_decay = map(wide, inputs)
    states, out = wide(state).copy(), np.empty(x.shape)
    for chunk, row, head in np.ndindex(x.shape[:3]):
        at, group = (chunk, row, head), head // (HEADS // GROUPS)
        s = states[chunk, head] * np.exp(log_decay[at]) + np.outer(x[at], b[chunk, row, group])
        states[chunk, head], out[at] = s, s @ c[chunk, row, group]
    return out, states


@pytest.mark.parametrize("start", [0, 30])
@pytest.mark.parametrize("num_rows", LENGTHS)
def test_the_state_space_equals_its_recurrence(num_rows, start):
    """In pieces from any position, and row by row, with the state before and behind."""
    shape = (CHUNKS, num_rows)
    x, log_decay = tensor(*shape, HEADS, VALUE), -torch.rand(*shape, HEADS) * 0.2
    inputs = (x, tensor(*shape, GROUPS, KEY), tensor(*shape, GROUPS, KEY), log_decay)
    state = tensor(CHUNKS, HEADS, VALUE, KEY)
    expected, behind = naive_state_space(inputs, state)
    for sizes in (kernels.pieces(start, num_rows), (1,) * num_rows):
        out, left = kernels.in_pieces(state_space, inputs, state, sizes)
        np.testing.assert_allclose(wide(out), expected, **CLOSE)
        np.testing.assert_allclose(wide(left), behind, **CLOSE)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * weight


def test_gated_norms_gate_before_or_after():
    """Mamba gates what it norms, per group; the delta net gates what it has normed, per head."""
    x, gate = tensor(3, 2, 8), tensor(3, 2, 8)
    per_group, per_head = tensor(2, 8), tensor(8)
    before = kernels.gate_then_norm(x, gate, per_group, 1e-3)
    expected = normed(wide(x) * silu(wide(gate)), wide(per_group))
    np.testing.assert_allclose(wide(before), expected, **CLOSE)
    after = kernels.norm_then_gate(x, gate, per_head, 1e-3)
    np.testing.assert_allclose(wide(after), normed(wide(x), wide(per_head)) * silu(wide(gate)),
                               **CLOSE)  # fmt: skip
