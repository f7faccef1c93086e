"""Device code of products with quantised matrices; ``triton_pack`` has the layout of those.

Tiles of codes are [rows, groups of 32, 16]: each row's 16 bytes of a group are one load, and what
belongs to the group is loaded once.
"""

import triton
import triton.language as tl

from kvtrio.kernels.triton_common import product


@triton.jit
def _scale(d, scales, n, g, half, mask, PER_D: tl.constexpr, SUB: tl.constexpr,
           IS_EXPONENT: tl.constexpr, cols):  # fmt: skip
    """float32 [rows, groups]: what codes of one half of each group are multiplied by."""
    if IS_EXPONENT:
        bits = tl.load(d + n * (cols // 32) + g, mask=mask, other=0).to(tl.int32) << 23
        return bits.to(tl.float32, bitcast=True) * 0.5  # 2^(e - 127), and E2M1 codes are doubled
    value = tl.load(d + n * (cols // (32 * PER_D)) + g // PER_D, mask=mask, other=0.0)
    value = value.to(tl.float32)
    if SUB == 32:
        value *= tl.load(scales + n * (cols // 32) + g, mask=mask, other=0).to(tl.float32)
    elif SUB == 16:
        own = scales + n * (cols // 16) + 2 * g + half
        value *= tl.load(own, mask=mask, other=0).to(tl.float32)
    return value


@triton.jit
def _summand(m, mins, n, g, mask, PER_D: tl.constexpr, SUB: tl.constexpr, cols):
    """float32 [rows, groups]: what is added."""
    value = tl.load(m + n * (cols // (32 * PER_D)) + g // PER_D, mask=mask, other=0.0)
    value = value.to(tl.float32)
    if SUB == 32:
        value *= tl.load(mins + n * (cols // 32) + g, mask=mask, other=0).to(tl.float32)
    return value


@triton.jit
def _numbers(codes, ZERO: tl.constexpr, IS_EXPONENT: tl.constexpr):
    """float32 of codes less their zero; E2M1 codes as twice their number."""
    codes = codes.to(tl.int32)
    if IS_EXPONENT:
        size = codes & 7  # two bits of exponent, one of mantissa
        size = tl.where(size < 4, size, (2 + (size & 1)) << (size >> 1) - 1)
        codes = tl.where(codes >= 8, -size, size)
    return (codes - ZERO).to(tl.float32)


@triton.jit
def _halves(low, high, d, m, scales, mins, n, g, mask, cols, BITS: tl.constexpr,
            ZERO: tl.constexpr, PER_D: tl.constexpr, SUB: tl.constexpr, HAS_MIN: tl.constexpr,
            IS_EXPONENT: tl.constexpr):  # fmt: skip
    """Values of the first and second 16 of each group, float32 [rows, groups, 16] each.

    n [rows, 1]: rows of the matrix, int64; g [1, groups]; mask [rows, groups].
    """
    b = tl.arange(0, 16)[None, None, :]
    wide = mask[:, :, None]
    if BITS == 8:
        place = (n * cols + g * 32)[:, :, None] + b
        first = tl.load(low + place, mask=wide, other=ZERO)
        second = tl.load(low + place + 16, mask=wide, other=ZERO)
    else:
        pair = (n * (cols // 2) + g * 16)[:, :, None] + b
        codes = tl.load(low + pair, mask=wide, other=0)
        first, second = codes & 15, codes >> 4
    if BITS == 5:
        more = tl.load(high + pair // 4, mask=wide, other=0).to(tl.int32) >> b % 4 * 2
        first, second = first | (more & 1) << 4, second | (more >> 1 & 1) << 4
    if BITS == 6:
        more = tl.load(high + pair // 2, mask=wide, other=0).to(tl.int32) >> b % 2 * 4
        first, second = first | (more & 3) << 4, second | (more >> 2 & 3) << 4
    scale = _scale(d, scales, n, g, 0, mask, PER_D, SUB, IS_EXPONENT, cols)
    other = scale
    if SUB == 16:
        other = _scale(d, scales, n, g, 1, mask, PER_D, SUB, IS_EXPONENT, cols)
    first = _numbers(first, ZERO, IS_EXPONENT) * scale[:, :, None]
    second = _numbers(second, ZERO, IS_EXPONENT) * other[:, :, None]
    if HAS_MIN:
        added = _summand(m, mins, n, g, mask, PER_D, SUB, cols)[:, :, None]
        first += added
        second += added
    return first, second


@triton.jit
def accumulated(
    source, is_row, low, high, d, m, scales, mins, wide, is_output, begin, end, cols, acc,
    BITS: tl.constexpr, ZERO: tl.constexpr, PER_D: tl.constexpr, SUB: tl.constexpr,
    HAS_MIN: tl.constexpr, IS_EXPONENT: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """``acc`` + products over groups ``begin`` to ``end`` of 32 inputs.

    source: addresses [rows, 1] of x; wide [outputs, 1]: rows of the matrix, int64.
    """
    HALF: tl.constexpr = GROUPS * 16
    k = tl.arange(0, HALF)
    k = (k // 16 * 32 + k % 16)[None, :]
    for first_group in range(begin, end, GROUPS):
        g = (first_group + tl.arange(0, GROUPS))[None, :]
        mask = is_output[:, None] & (g < end)
        first, second = _halves(
            low, high, d, m, scales, mins, wide, g, mask, cols, BITS, ZERO, PER_D, SUB, HAS_MIN,
            IS_EXPONENT,
        )  # fmt: skip
        place = first_group * 32 + k
        is_input = is_row[:, None] & (place < end * 32)
        own = tl.load(source + place, mask=is_input, other=0.0)
        weights = tl.reshape(first, (BLOCK_N, HALF)).to(own.dtype)
        acc = product(own, tl.trans(weights), acc)
        own = tl.load(source + place + 16, mask=is_input, other=0.0)
        weights = tl.reshape(second, (BLOCK_N, HALF)).to(own.dtype)
        acc = product(own, tl.trans(weights), acc)
    return acc


@triton.jit(do_not_specialize=["num_rows", "part_stride"])
def multiply_kernel(
    x, low, high, d, m, scales, mins, out, num_rows, num_outputs, cols, x_stride, out_stride,
    part_stride, groups_per_part, BITS: tl.constexpr, ZERO: tl.constexpr, PER_D: tl.constexpr,
    SUB: tl.constexpr, HAS_MIN: tl.constexpr, IS_EXPONENT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One tile of ``x W^T`` over one part of the inputs."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * groups_per_part
    end = tl.minimum(begin + groups_per_part, cols // 32)
    is_row, is_output = rows < num_rows, n < num_outputs
    acc = accumulated(
        x + rows.to(tl.int64)[:, None] * x_stride, is_row, low, high, d, m, scales, mins,
        n.to(tl.int64)[:, None], is_output, begin, end, cols,
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32), BITS, ZERO, PER_D, SUB, HAS_MIN, IS_EXPONENT,
        BLOCK_N, GROUPS,
    )  # fmt: skip
    target = out + tl.program_id(2).to(tl.int64) * part_stride
    place = rows.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(target + place, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None])


@triton.jit(do_not_specialize=["num_rows"])
def sum_parts_kernel(parts, out, num_parts, num_rows, size, out_stride, BLOCK: tl.constexpr):
    """The parts of a product, added in their order."""
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < size
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, num_parts):
        total += tl.load(parts + (i * num_rows + row) * size + cols, mask=mask, other=0.0)
    tl.store(out + row * out_stride + cols, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def dequantise_kernel(
    low, high, d, m, scales, mins, ids, out, cols, BITS: tl.constexpr, ZERO: tl.constexpr,
    PER_D: tl.constexpr, SUB: tl.constexpr, HAS_MIN: tl.constexpr, IS_EXPONENT: tl.constexpr,
    HAS_IDS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Some groups of one row, in full."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(ids + row) if HAS_IDS else row
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[None, :]
    mask = g < cols // 32
    own = n + tl.zeros((1, 1), tl.int64)
    first, second = _halves(
        low, high, d, m, scales, mins, own, g, mask, cols, BITS, ZERO, PER_D, SUB, HAS_MIN,
        IS_EXPONENT,
    )  # fmt: skip
    place = (row * cols + g * 32)[:, :, None] + tl.arange(0, 16)[None, None, :]
    tl.store(out + place, first.to(out.dtype.element_ty), mask=mask[:, :, None])
    tl.store(out + place + 16, second.to(out.dtype.element_ty), mask=mask[:, :, None])
