"""Triton's row kernels against the reference, in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

from kvtrio.kernels import reference
from kvtrio.kernels.triton_qkv import QkvRows, QkvShape, write_qkv
from kvtrio.kernels.triton_rows import Act, add_norm, gated

pytestmark = pytest.mark.slow  # each program of a grid runs in Python

DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """A rounding of the type, or a few of float32."""
    return {"rtol": 0.01 if dtype is torch.bfloat16 else 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 64])
def test_a_norm_adds_first_what_is_to_be_added(dtype, size):
    """The sum is kept at full width, and normed."""
    x, change, weight = random(3, size), random(3, size, seed=1, dtype=dtype), random(size, seed=2)
    total = x + change.float()
    expected = reference.rms_norm(total, weight, 1e-5, dtype)
    alone = add_norm(total.clone(), None, weight, 1e-5, dtype)
    torch.testing.assert_close(alone, expected, **tolerance(dtype))
    torch.testing.assert_close(
        add_norm(x, change, weight, 1e-5, dtype), expected, **tolerance(dtype)
    )
    torch.testing.assert_close(x, total, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_activations(dtype, gelu):
    """Of two halves of one product, as they lie."""
    fused = 3 * random(3, 2 * 37, dtype=dtype)
    gate, up = fused.chunk(2, -1)
    out = gated(gate, up, Act.GELU_TANH if gelu else Act.SILU)
    torch.testing.assert_close(out, reference.gated(gate, up, gelu), **tolerance(dtype))


def test_a_gate_of_attention():
    """A sigmoid times the other."""
    gates, out = random(3, 9, seed=3), random(3, 9)
    torch.testing.assert_close(gated(gates, out, Act.SIGMOID), out * gates.sigmoid())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("adjacent", "num_rotated", "has_norm", "is_gated"),
    [(False, 6, False, False), (True, 8, True, False), (False, 8, True, True), (True, 0, False, 0)],
)
def test_qkv_is_normed_turned_and_written(dtype, adjacent, num_rotated, has_norm, is_gated):
    """Into scattered slots, with values of another size than keys; other slots stay."""
    heads, kv, dim, value = 4, 2, 8, 6
    width = dim * (2 if is_gated else 1)
    fused = random(3, heads * width + kv * (dim + value), dtype=dtype)
    norms = (random(dim, seed=4), random(dim, seed=5)) if has_norm else None
    angles = random(3, num_rotated // 2, seed=6)
    slots = torch.tensor([33, 0, 18])
    cache = tuple(torch.full((3, 16, kv, size), 7.0, dtype=dtype) for size in (dim, value))
    wanted = tuple(part.clone() for part in cache)
    shape = QkvShape(heads, kv, dim, value, num_rotated, adjacent, bool(is_gated), 1e-5)
    out = write_qkv(fused, norms, QkvRows(slots, angles.cos(), angles.sin()), cache, shape)

    q, k, v = fused.float().split_with_sizes((heads * width, kv * dim, kv * value), -1)
    q, k = q.view(3, heads, width), k.view(3, kv, dim)
    q, gates = q[..., :dim], q[..., dim:]
    if norms:
        q, k = (
            reference.rms_norm(x, w, 1e-5, torch.float32)
            for x, w in zip((q, k), norms, strict=True)
        )
    q, k = (reference.rope(x, angles.cos(), angles.sin(), adjacent) for x in (q, k))
    reference.write_cache(wanted[0], slots, k)
    reference.write_cache(wanted[1], slots, v.view(3, kv, value))
    for got, expected in zip(cache, wanted, strict=True):
        torch.testing.assert_close(got, expected, **tolerance(dtype))
    torch.testing.assert_close(out, torch.cat((q, gates), -1).to(dtype), **tolerance(dtype))


def test_no_rows_are_no_launch():
    """An empty step computes nothing."""
    assert add_norm(random(0, 8), None, random(8), 1e-5, torch.float32).shape == (0, 8)
    assert F.silu(gated(random(0, 8), random(0, 8), Act.SILU)).shape == (0, 8)
