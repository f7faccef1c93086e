"""Many adapters in one launch against the reference, in the interpreter."""

import pytest
import torch

from harness.triton_adapters import Mix, expected, random_matrix, table, tiles
from kvtrio.kernels.triton_adapters import add_adapters

pytestmark = pytest.mark.slow  # each program of a grid runs in Python

SIZES, COLS = (24, 8, 70), 40
MATRICES = [
    random_matrix((4, 4, 4), SIZES, COLS, 1),
    random_matrix((16, 0, 3), SIZES, COLS, 2),
    random_matrix((0, 5, 0), SIZES, COLS, 3),
]
MIXES = (
    Mix((3, 0, 21), ((MATRICES[0], 0.5),)),
    Mix(tuple(range(4, 21)), ((MATRICES[1], 2.0), (MATRICES[0], -1.0), (None, 1.0))),
    Mix((2,), ((None, 1.0), (MATRICES[2], 1.0))),
)
"""Row 1 and what is behind row 21 carry none."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_get_the_changes_that_they_carry(dtype):
    """Several lists in one step, of several ranks, with parts and whole products left alone."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((23, COLS), generator=generator).to(dtype)
    out = torch.randn((23, sum(SIZES)), generator=generator).to(dtype)
    wanted = expected(x, out, MIXES)
    before = out.clone()
    add_adapters(x, out, tiles(MIXES), table(MIXES, SIZES))
    close = {"rtol": 0.01 if dtype is torch.bfloat16 else 1e-5, "atol": 1e-4}
    torch.testing.assert_close(out, wanted, **close)
    assert torch.equal(out[[1, 22]], before[[1, 22]])
