"""The low-rank kernel against naive float64 loops."""

import numpy as np
import torch

from kvtrio.kernels.reference_adapters import LowRankMatrix, OutputPart, add_low_rank


def test_each_part_gets_its_own_product_times_its_factor():
    """Two of three stacked matrices have a change, of different ranks and factors; the middle one
    keeps its bits."""
    rng = np.random.default_rng(3)
    x, out = rng.standard_normal((5, 7)), rng.standard_normal((5, 4 + 3 + 6))
    halves = [
        (rng.standard_normal((r, 7)), rng.standard_normal((o, r))) for r, o in ((2, 4), (3, 6))
    ]
    expected = out.copy()
    for row in range(5):
        for (a, b), first, factor in zip(halves, (0, 7), (0.5, -2.0), strict=True):
            for i in range(len(b)):
                total = sum(b[i, k] * sum(a[k] * x[row]) for k in range(len(a)))
                expected[row, first + i] += 3.0 * factor * total
    matrix = LowRankMatrix(
        torch.tensor(np.concatenate([a for a, _ in halves]), dtype=torch.float32),
        torch.tensor([0.5] * 2 + [-2.0] * 3),
        tuple(
            OutputPart(torch.tensor(b, dtype=torch.float32), first, rank)
            for (_, b), first, rank in zip(halves, (0, 7), (0, 2), strict=True)
        ),
    )
    result = torch.tensor(out, dtype=torch.float32)
    middle = result[:, 4:7].clone()
    add_low_rank(result, torch.tensor(x, dtype=torch.float32), matrix, 3.0)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(result[:, 4:7], middle)
