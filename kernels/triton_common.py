"""What all Triton kernels share.

1. Nothing here or in the other ``triton_*`` modules asks for a driver when it is imported, and
   nothing is tuned by trial: tile sizes are chosen by plain functions of shapes, so that the same
   shapes always run the same code, and can be compiled without a GPU.
2. A sum's order depends on sizes of the model and on a row's own position, never on its company.
3. A kernel is compiled once per model and kind of step: what differs from step to step is a plain
   argument that ``do_not_specialize`` names; else Triton compiles anew for 1 and multiples of 16.
4. Grids follow from shapes that are known before a step is, so that launches can be captured.
5. Places, rows and whole tensors are counted in int64: pools hold more than 2^31 values.

The kernels were checked in Triton's interpreter and by compiling them for sm_80 and sm_90. No
figure about their speed on a GPU is known.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

LEAST_TILE = 16
"""Smallest side of a product's tile."""
ALIGNMENT = 16
"""Bytes: of every address that kernels get, as Triton compiles others for those that are not."""


def is_interpreted() -> bool:
    """Whether kernels run in Python on the CPU: ``TRITON_INTERPRET=1`` when Triton was imported."""
    return not isinstance(_probe, JITFunction)


@triton.jit
def _probe() -> None:
    """Tells what ``jit`` makes of a function."""


INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def product(a, b, acc):
    """``a b + acc``, sums in float32.

    Float32 operands are taken as sums of three parts each, nearly as exact as float32 itself, since
    products of those have no tensor cores and no room in registers. The interpreter's own would
    take bfloat16 for integers; its values are products of the same numbers.
    """
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


def next_power(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


def tile(number: int) -> int:
    """The least side of a product's tile that holds ``number``."""
    return max(LEAST_TILE, next_power(number))


def rows_of(x: Tensor) -> Tensor:
    """``x`` with its last axis contiguous, copied only if it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()
