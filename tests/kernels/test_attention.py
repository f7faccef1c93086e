"""Attention over paged blocks against a naive float64 loop over keys."""

import math

import numpy as np
import pytest
import torch

from kvtrio.kernels import reference_attention as kernels

RNG = np.random.default_rng(11)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape)).to(dtype)


def naive(q, keys, values, visible, scoring):
    """One query head: ``visible`` lists the keys that it sees."""
    scores = [float(np.dot(q, keys[k])) * scoring.scale for k in visible]
    if scoring.softcap is not None:
        scores = [scoring.softcap * math.tanh(s / scoring.softcap) for s in scores]
    weights = [math.exp(s - max(scores)) for s in scores]
    return sum(w * values[k] for w, k in zip(weights, visible, strict=True)) / sum(weights)


def test_gather_blocks_keeps_the_order_of_positions():
    """Keys of a run come out block after block, place after place, whatever the block ids; what is
    not written yet is zero, not what lay there."""
    cache, nothing = tensor(5, 2, 3, 4), torch.tensor([], dtype=torch.int64)
    out = kernels.gather_blocks(cache, torch.tensor([[4, 0], [2, 2]]), nothing)
    assert out.shape == (2, 3, 4, 4)
    last = kernels.gather_blocks(cache, torch.tensor([[4, 0], [2, 2]]), torch.tensor([3, 6]))
    assert torch.equal(last[0, :, :3], out[0, :, :3])
    assert not last[0, :, 3].any()
    assert not last[1, :, 2].any()
    for run, blocks in enumerate([(4, 0), (2, 2)]):
        for key, head in np.ndindex(4, 3):
            assert torch.equal(out[run, head, key], cache[blocks[key // 2], key % 2, head])


@pytest.mark.parametrize("window", [None, 1, 3])
def test_causal_mask_shows_the_past_within_the_window(window):
    """A query sees itself and what lies before it, as far as the window reaches, and no more."""
    queries, first_key = torch.tensor([[4, 5], [9, 10]]), torch.tensor([2, 8])
    mask = kernels.causal_mask(queries, first_key, 6, window)
    assert mask.shape == (2, 1, 2, 6)
    for run, query, key in np.ndindex(2, 2, 6):
        age = int(queries[run, query]) - (int(first_key[run]) + key)
        is_seen = age >= 0 and (window is None or age < window)
        assert float(mask[run, 0, query, key]) == (0.0 if is_seen else -math.inf)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("value_dim", [8, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_is_softmax_over_visible_keys(num_queries, num_heads, value_dim, softcap, dtype):
    """Each head weighs the values of the keys it sees by the softmax of its scaled scores."""
    num_keys, scoring = 12, kernels.Scoring(0.4, softcap)
    q = tensor(3, num_queries, num_heads, 8, dtype=dtype)
    keys, values = (
        tensor(3, 2, num_keys, 8, dtype=dtype),
        tensor(3, 2, num_keys, value_dim, dtype=dtype),
    )
    queries = torch.tensor([[3], [7], [2]]) + torch.arange(num_queries)
    mask = kernels.causal_mask(queries, torch.tensor([0, 0, 0]), num_keys, 4).to(dtype)
    out = kernels.attend(q, keys, values, mask, scoring)
    assert out.shape == (3, num_queries, num_heads, value_dim)
    assert out.dtype == dtype
    for run, query, head in np.ndindex(3, num_queries, num_heads):
        position, group = int(queries[run, query]), head // (num_heads // 2)
        expected = naive(
            q[run, query, head].double().numpy(),
            keys[run, group].double().numpy(),
            values[run, group].double().numpy(),
            range(max(0, position - 3), position + 1),
            scoring,
        )
        atol = 1e-5 if dtype == torch.float32 else 0.02
        np.testing.assert_allclose(out[run, query, head].double().numpy(), expected, atol=atol)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_takes_weight_and_gives_nothing(num_queries, dtype):
    """Each head's sink is one more key, whose value is zero."""
    q, sinks = tensor(2, num_queries, 6, 8, dtype=dtype), tensor(6)
    keys, values = (tensor(2, 2, 9, 8, dtype=dtype) for _ in range(2))
    mask = torch.zeros(2, 1, num_queries, 9, dtype=dtype)
    out = kernels.attend(q, keys, values, mask, kernels.Scoring(0.4, sinks=sinks))
    for run, query, head in np.ndindex(2, num_queries, 6):
        group = head // 3
        scores = keys[run, group].double().numpy() @ q[run, query, head].double().numpy() * 0.4
        weights = np.exp(scores)
        total = weights.sum() + math.exp(sinks[head])
        expected = weights @ values[run, group].double().numpy() / total
        atol = 1e-5 if dtype == torch.float32 else 0.02
        np.testing.assert_allclose(out[run, query, head].double().numpy(), expected, atol=atol)


def test_queries_grow_with_their_position():
    """By a logarithm that steps at multiples of the length."""
    out = kernels.temperature(torch.tensor([0, 9, 10, 35]), 0.2, 10).flatten()
    expected = [1.0, 1.0, 1 + 0.2 * math.log(2), 1 + 0.2 * math.log(4)]
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6)
