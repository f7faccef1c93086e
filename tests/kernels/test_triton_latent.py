"""Triton's latent attention against float64, row by row, in the interpreter."""

from dataclasses import replace

import pytest
import torch

from harness.triton_queries import ragged
from kvtrio.kernels import triton_attention
from kvtrio.kernels.triton_attention import Shape
from kvtrio.kernels.triton_latent import LatentShape, attend_latent, latent_ratio

pytestmark = pytest.mark.slow  # each program of a grid runs in Python

MIXED = ((0, 21), (40, 1), (17, 5), (33, 1), (0, 1))


@pytest.mark.parametrize("heads", [3, 70])
def test_ragged_batches(heads, monkeypatch):
    """Prompts and decoding rows over scattered blocks, of more heads than a tile has; long rows in
    segments."""
    monkeypatch.setattr(triton_attention, "SEGMENT", 32)
    latent, rotated = 12, 6
    plain = Shape(heads, 1, latent + rotated, latent, 0.3)
    shape = LatentShape(heads, latent, rotated, 0.3)
    batch = ragged(plain, MIXED if heads < 64 else ((0, 3), (40, 1)))
    batch.values.copy_(batch.keys[..., :latent])
    expected = batch.expected(plain)
    out = batch.q.new_full(expected.shape, float("nan"))
    tiled = replace(plain, num_heads=latent_ratio(heads))
    singles = [i for i, (_, length) in enumerate(batch.chunks) if length == 1]
    longer = [i for i, (_, length) in enumerate(batch.chunks) if length > 1]
    for chosen in (singles, longer):
        attend_latent(batch.q, batch.keys, batch.queries(tiled, chosen), shape, out)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
