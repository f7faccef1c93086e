"""Products with quantised matrices, which stay quantised in memory.

1. Up to 16 rows share one tile and one order of sums, so a row has the same bits in any such
   company. From 17 rows on tiles are larger, and a GPU may add in another order.
2. Codes are turned into the type of x and multiplied with sums in float32.
"""

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from kvtrio.kernels.triton_common import next_power
from kvtrio.kernels.triton_matmul_kernels import (
    dequantise_kernel,
    multiply_kernel,
    sum_parts_kernel,
)
from kvtrio.kernels.triton_pack import Packed

FEW_ROWS = 16
MANY_ROWS = 512
"""From here on a matrix is dequantised once and multiplied by the vendor's library. Estimated, not
measured."""
MANY_PROGRAMS = 512
"""Few rows are split over inputs until there are as many programs: enough for any GPU of today."""


def multiply(x: Tensor, matrix: Packed, out: Tensor) -> None:
    """``out = x W^T``, sums in float32, rounded once.

    x [N, cols] float32 or bfloat16, contiguous; out [N, rows] of any float type with rows
    anywhere. See ``reference.linear``.
    """
    num_rows = x.shape[0]
    if num_rows == 0:
        return
    if num_rows >= MANY_ROWS:
        out.copy_(F.linear(x, dequantise(matrix, x.dtype)))
    elif num_rows <= FEW_ROWS:
        _multiply_few(x, matrix, out)
    else:
        block_m = 32 if num_rows <= 32 else 64
        grid = (triton.cdiv(num_rows, block_m), triton.cdiv(matrix.rows, 64), 1)
        multiply_kernel[grid](
            *_arguments(x, matrix, out), out.stride(0), 0, matrix.cols // 32,
            **matrix_constants(matrix), BLOCK_M=block_m, BLOCK_N=64, GROUPS=2,
            num_warps=4, num_stages=3,
        )  # fmt: skip


def splits(rows: int, cols: int, block_n: int, groups: int) -> int:
    """Over how many programs a row's inputs are split: from the matrix's size alone."""
    programs, steps = triton.cdiv(rows, block_n), triton.cdiv(cols, 32 * groups)
    wanted = max(1, MANY_PROGRAMS // programs)
    return int(min(next_power(wanted + 1) // 2, max(1, steps // 4)))


def _multiply_few(x: Tensor, matrix: Packed, out: Tensor) -> None:
    block_n, groups = 32, 4
    num_parts = splits(matrix.rows, matrix.cols, block_n, groups)
    per_part = triton.cdiv(triton.cdiv(matrix.cols // 32, groups), num_parts) * groups
    target, num_rows = out, x.shape[0]
    if num_parts > 1:
        sizes = (num_parts, num_rows, matrix.rows)
        target = torch.empty(sizes, dtype=torch.float32, device=x.device)
    grid = (1, triton.cdiv(matrix.rows, block_n), num_parts)
    multiply_kernel[grid](
        *_arguments(x, matrix, target), target.stride(-2), num_rows * matrix.rows, per_part,
        **matrix_constants(matrix), BLOCK_M=FEW_ROWS, BLOCK_N=block_n, GROUPS=groups,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if num_parts > 1:
        block = min(1024, next_power(matrix.rows))
        sum_parts_kernel[(num_rows, triton.cdiv(matrix.rows, block))](
            target, out, num_parts, num_rows, matrix.rows, out.stride(0), BLOCK=block, num_warps=4
        )


def dequantise(matrix: Packed, dtype: torch.dtype) -> Tensor:
    """All values, rounded once: ``dtype`` [rows, cols]."""
    return _rows(matrix, None, matrix.rows, dtype)


def take_rows(matrix: Packed, ids: Tensor) -> Tensor:
    """Some rows as they are: ids int64 [N]; returns float32 [N, cols]."""
    return _rows(matrix, ids, ids.shape[0], torch.float32)


def _rows(matrix: Packed, ids: Tensor | None, num_rows: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty((num_rows, matrix.cols), dtype=dtype, device=matrix.low.device)
    groups = min(32, next_power(matrix.cols // 32))
    if num_rows:
        grid = (num_rows, triton.cdiv(matrix.cols // 32, groups))
        dequantise_kernel[grid](
            *matrix_fields(matrix), ids, out, matrix.cols, **matrix_constants(matrix),
            HAS_IDS=ids is not None, GROUPS=groups, num_warps=2,
        )  # fmt: skip
    return out


def matrix_fields(matrix: Packed) -> tuple[Tensor | None, ...]:
    """As kernels take them."""
    return (matrix.low, matrix.high, matrix.d, matrix.m, matrix.scales, matrix.mins)


def _arguments(x: Tensor, matrix: Packed, out: Tensor) -> tuple[object, ...]:
    sizes = (x.shape[0], matrix.rows, matrix.cols)
    return (x, *matrix_fields(matrix), out, *sizes, x.stride(0))


def matrix_constants(matrix: Packed) -> dict[str, object]:
    """What kernels are compiled for."""
    kind = matrix.kind
    return {
        "BITS": kind.bits,
        "ZERO": kind.zero,
        "PER_D": kind.block // 32,
        "SUB": kind.group,
        "HAS_MIN": kind.has_min,
        "IS_EXPONENT": kind.is_exponent,
    }
