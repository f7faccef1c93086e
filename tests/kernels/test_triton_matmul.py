"""Products with quantised matrices against what gguf dequantises, in the interpreter."""

import gguf
import numpy as np
import pytest
import torch

from harness.cpu_matrices import random_rows, values
from kvtrio.kernels import triton_matmul
from kvtrio.kernels.triton_matmul import dequantise, multiply, take_rows
from kvtrio.kernels.triton_pack import KINDS, Packed, pack, packed_bytes

pytestmark = pytest.mark.slow  # each program of a grid runs in Python

ROWS, COLS = 37, 512


def matrix(name: str, rows: int = ROWS, cols: int = COLS) -> tuple[Packed, torch.Tensor]:
    """Random, any codes; packed, and its values in float32."""
    kind = gguf.GGMLQuantizationType[name]
    raw = random_rows(kind, rows, cols, np.random.default_rng(3))
    packed = pack(name, torch.from_numpy(raw), cols)
    return packed, torch.from_numpy(values(kind, raw))


def random(rows: int, dtype: torch.dtype = torch.float32, cols: int = COLS) -> torch.Tensor:
    return torch.randn((rows, cols), generator=torch.Generator().manual_seed(rows)).to(dtype)


def product(x: torch.Tensor, packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((len(x), packed.rows), float("nan"), dtype=dtype)
    multiply(x, packed, out)
    return out


@pytest.mark.parametrize("name", KINDS)
def test_packing_loses_nothing(name):
    """Every value of every type is the very one that gguf gives, and the size is as foretold."""
    packed, expected = matrix(name)
    torch.testing.assert_close(dequantise(packed, torch.float32), expected, rtol=2e-7, atol=1e-7)
    ids = torch.tensor([36, 0, 5, 5])
    torch.testing.assert_close(take_rows(packed, ids), expected[ids], rtol=2e-7, atol=1e-7)
    assert packed.num_bytes == packed_bytes(name, ROWS, COLS)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_rows", [3, 21])
def test_products(name, num_rows):
    """Of few rows and of more, with edges that no tile divides."""
    packed, expected = matrix(name)
    x = random(num_rows)
    wanted = x.double() @ expected.double().T
    close = {"rtol": 1e-4, "atol": 1e-4 * float(wanted.abs().max())}
    torch.testing.assert_close(product(x, packed).double(), wanted, **close)


def test_products_in_bfloat16_into_a_part_of_a_wider_one():
    """As with q, k and v of three types in one product."""
    packed, expected = matrix("Q4_K")
    x = random(5, torch.bfloat16)
    out = torch.full((5, ROWS + 8), 7.0, dtype=torch.bfloat16)
    multiply(x, packed, out[:, 4 : 4 + ROWS])
    wanted = x.float() @ expected.T
    # The interpreter rounds to bfloat16 towards zero: each product is off by up to 1/128.
    largest = x.float().abs() @ expected.abs().T / 128
    assert ((out[:, 4 : 4 + ROWS].float() - wanted).abs() <= largest).all()
    assert (out[:, :4] == 7.0).all()
    assert (out[:, -4:] == 7.0).all()


def test_a_row_has_the_same_bits_in_any_company_up_to_sixteen():
    """Its inputs are split by the matrix's size alone.

    Only at one place of a tile: numpy's own product, in the interpreter, depends on that."""
    packed, _ = matrix("Q6_K", cols=2048)
    x = random(16, cols=2048)
    whole = product(x, packed)
    assert torch.equal(product(x[:1], packed), whole[:1])
    assert torch.equal(product(x[:5], packed), whole[:5])


def test_many_rows_are_multiplied_by_the_library(monkeypatch):
    """With the matrix dequantised once."""
    monkeypatch.setattr(triton_matmul, "MANY_ROWS", 4)
    packed, expected = matrix("Q5_0")
    x = random(5)
    torch.testing.assert_close(product(x, packed), x @ expected.T, rtol=1e-4, atol=1e-4)
    assert product(random(0), packed).shape == (0, ROWS)
