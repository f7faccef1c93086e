"""Device code of products with experts; ``triton_experts`` says what it computes."""

import triton
import triton.language as tl

from kvtrio.kernels.triton_attention_kernels import chunk_of
from kvtrio.kernels.triton_common import product
from kvtrio.kernels.triton_matmul_kernels import accumulated


@triton.jit
def _pairs(starts, tile_starts, tile, num_experts, BLOCK_M: tl.constexpr):
    """The expert of a tile, its pairs, and which of those are there."""
    expert = chunk_of(tile_starts, tile, num_experts)
    first = tl.load(starts + expert) + (tile - tl.load(tile_starts + expert)) * BLOCK_M
    pair = first + tl.arange(0, BLOCK_M)
    return expert, pair, pair < tl.load(starts + expert + 1)


@triton.jit
def _finished(
    acc, bias, out, expert, pair, is_row, n, num_outputs, out_stride, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Store a tile, with the bias."""
    is_output = n < num_outputs
    if HAS_BIAS:
        acc += tl.load(bias + expert * num_outputs + n, mask=is_output, other=0.0)[None, :]
    place = pair.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def packed_kernel(
    x, low, high, d, m, scales, mins, rows, starts, tile_starts, bias, out, num_experts,
    num_outputs, cols, x_stride, out_stride, BITS: tl.constexpr, ZERO: tl.constexpr,
    PER_D: tl.constexpr, SUB: tl.constexpr, HAS_MIN: tl.constexpr, IS_EXPONENT: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's product with a quantised matrix."""
    tile = tl.program_id(0)
    if tile >= tl.load(tile_starts + num_experts):
        return
    expert, pair, is_row = _pairs(starts, tile_starts, tile, num_experts, BLOCK_M)
    row = tl.load(rows + pair, mask=is_row, other=0) if HAS_ROWS else pair
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = expert.to(tl.int64) * num_outputs + n
    acc = accumulated(
        x + row.to(tl.int64)[:, None] * x_stride, is_row, low, high, d, m, scales, mins,
        wide[:, None], n < num_outputs, 0, cols // 32, cols,
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32), BITS, ZERO, PER_D, SUB, HAS_MIN, IS_EXPONENT,
        BLOCK_N, GROUPS,
    )  # fmt: skip
    _finished(acc, bias, out, expert, pair, is_row, n, num_outputs, out_stride, HAS_BIAS)


@triton.jit
def plain_kernel(
    x, matrix, rows, starts, tile_starts, bias, out, num_experts, num_outputs, cols, x_stride,
    out_stride, HAS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same with a matrix of x's type."""
    tile = tl.program_id(0)
    if tile >= tl.load(tile_starts + num_experts):
        return
    expert, pair, is_row = _pairs(starts, tile_starts, tile, num_experts, BLOCK_M)
    row = tl.load(rows + pair, mask=is_row, other=0) if HAS_ROWS else pair
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output, i = n < num_outputs, tl.arange(0, BLOCK_K)
    source = x + row.to(tl.int64)[:, None] * x_stride
    weights = matrix + (expert.to(tl.int64) * num_outputs + n)[None, :] * cols
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, cols, BLOCK_K):
        k = first + i
        is_input = k < cols
        own = tl.load(source + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        other = tl.load(
            weights + k[:, None], mask=is_input[:, None] & is_output[None, :], other=0.0
        )
        acc = product(own, other, acc)
    _finished(acc, bias, out, expert, pair, is_row, n, num_outputs, out_stride, HAS_BIAS)


@triton.jit
def combine_kernel(values, places, weights, out, num_used, size, BLOCK: tl.constexpr):
    """What one row's experts gave, weighed and added in their order."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < size
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, num_used):
        pair = tl.load(places + row * num_used + i).to(tl.int64)
        value = tl.load(values + pair * size + cols, mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(weights + row * num_used + i)
    tl.store(out + row * size + cols, total, mask=mask)
