"""Paged attention for prompts and decoding rows in one launch each.

1. The query heads of one kv head are rows of one tile, so keys and values are read once per group.
2. Key tiles and segments begin at fixed multiples of positions, so a row's sums have one order
   whatever chunk it comes in and whoever shares the step. Rows that decode are split over keys,
   by their own length alone; rows of chunks are not: the two differ in rounding.
3. A key outside a window is never read: its block may be somebody else's.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvtrio.kernels.triton_attention_kernels import attend_kernel, combine_kernel
from kvtrio.kernels.triton_common import next_power, tile

SEGMENT = 256
"""Fewest keys that one program reads for a decoding row."""
MOST_SEGMENTS = 32
"""Of a row: longer ones have longer segments, so a launch's size has a bound for any length."""
PREFILL_ROWS = 64
"""Rows of a tile of a prompt: queries times heads of a kv head."""


@dataclass(frozen=True, eq=False)
class Queries:
    """Some chunks of a step, all of one row or none."""

    first_rows: Tensor
    """int32 [S]: row of the step at which each begins."""
    starts: Tensor
    """int32 [S]: position of that row."""
    lengths: Tensor
    """int32 [S]: rows."""
    tables: Tensor
    """int32 [T]: block tables, one behind the other."""
    table_starts: Tensor
    """int32 [S]: where in ``tables`` each begins."""
    max_length: int
    """Of any chunk now, or of any that these buffers may stand for."""
    max_keys: int
    """The same of positions before a chunk's end."""
    num_tiles: int
    """Sum over chunks of ``tiles_of``."""
    tile_starts: Tensor
    """int32 [S + 1]: first tile of each chunk, and behind the last."""

    @property
    def num_chunks(self) -> int:
        return int(self.starts.shape[0])


@dataclass(frozen=True)
class Shape:
    """What is the same for all rows of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float | None = None
    window: int | None = None

    @property
    def padded_ratio(self) -> int:
        """Query heads of a kv head, as rows of a tile."""
        return next_power(self.num_heads // self.num_kv_heads)


def queries_per_tile(padded_ratio: int, is_decode: bool) -> int:
    """Rows of one chunk in a tile."""
    return 1 if is_decode else max(1, PREFILL_ROWS // padded_ratio)


def attend(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    queries: Queries,
    shape: Shape,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Attention of the rows of ``queries`` over their blocks, into their rows of ``out``.

    q [N, heads, at least head_dim] with any strides but the last; cache: keys [blocks, block_size,
    kv_heads, head_dim] and values [..., value_dim], contiguous, q's type; sinks float32 [heads]: a
    logit of each head that takes part in the softmax and has no value; out [N, heads, value_dim],
    contiguous, q's type. See ``reference_attention.attend``.
    """
    if not queries.num_chunks:
        return
    if queries.max_length == 1:
        _decode(q, cache, queries, shape, (out, sinks))
        return
    block_q = queries_per_tile(shape.padded_ratio, False)
    grid = (queries.num_tiles, shape.num_kv_heads)
    attend_kernel[grid](
        *_arguments(q, cache, queries, shape), out, None, sinks, 0,
        **_tiles(shape, cache[0], block_q), HAS_SINKS=sinks is not None, SEGMENT=0, MOST=0,
        num_warps=4 if _widest(shape) <= 128 else 8, num_stages=1 if is_wide(q) else 2,
    )  # fmt: skip


def _decode(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    queries: Queries,
    shape: Shape,
    target: tuple[Tensor, Tensor | None],
) -> None:
    """Parts of each row over segments of its keys, and their sum."""
    out, sinks = target
    num_segments = segments_of(queries.max_keys, shape.window)
    sizes = (queries.num_chunks, shape.num_heads, num_segments)
    parts = torch.empty((*sizes, shape.value_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((*sizes, 2), dtype=torch.float32, device=q.device)
    attend_kernel[(queries.num_chunks, shape.num_kv_heads, num_segments)](
        *_arguments(q, cache, queries, shape), parts, sums, None, num_segments,
        **_tiles(shape, cache[0], 1), HAS_SINKS=False, SEGMENT=SEGMENT, MOST=MOST_SEGMENTS,
        num_warps=4, num_stages=1 if is_wide(q) else 3,
    )  # fmt: skip
    combine_kernel[(queries.num_chunks, shape.num_heads)](
        parts, sums, sinks, out, queries.first_rows, queries.starts, shape.num_heads, num_segments,
        VALUE_DIM=shape.value_dim, BLOCK_V=tile(shape.value_dim), WINDOW=shape.window or 0,
        SEGMENT=SEGMENT, MOST=MOST_SEGMENTS, HAS_SINKS=sinks is not None, num_warps=2,
    )  # fmt: skip


def segments_of(max_keys: int, window: int | None) -> int:
    """Most segments of a decoding row that is one of at most so many positions."""
    seen = max_keys if window is None else min(max_keys, window)
    # A window may begin anywhere in a segment, and so meet one more.
    return int(min(triton.cdiv(seen, SEGMENT), MOST_SEGMENTS)) + (window is not None)


def _arguments(
    q: Tensor, cache: tuple[Tensor, Tensor], queries: Queries, shape: Shape
) -> tuple[object, ...]:
    return (
        q, cache[0], cache[1], queries.first_rows, queries.starts, queries.lengths, queries.tables,
        queries.table_starts, queries.tile_starts, queries.num_chunks, q.stride(0), q.stride(1),
        shape.num_heads, shape.num_kv_heads, shape.scale,
    )  # fmt: skip


def _tiles(shape: Shape, keys: Tensor, block_q: int) -> dict[str, object]:
    ratio = shape.num_heads // shape.num_kv_heads
    # More keys at a time leave a GPU of compute capability 8 without registers.
    has_few = block_q > 1 or _widest(shape) > 128 or is_wide(keys)
    block_n = 16 if is_wide(keys) and _widest(shape) > 128 else 32 if has_few else 64
    return {
        "RATIO": ratio,
        "PADDED": shape.padded_ratio,
        "BLOCK_M": tile(block_q * shape.padded_ratio),
        "BLOCK_Q": block_q,
        "DIM": shape.head_dim,
        "VALUE_DIM": shape.value_dim,
        "BLOCK_D": tile(shape.head_dim),
        "BLOCK_V": tile(shape.value_dim),
        "PLACES": keys.shape[1],
        "BLOCK_N": block_n,
        "WINDOW": shape.window or 0,
        "SOFTCAP": shape.softcap or 0.0,
    }


def is_wide(x: Tensor) -> bool:
    """Float32 takes twice the shared memory: its tiles are smaller, and not loaded ahead."""
    return x.dtype == torch.float32


def _widest(shape: Shape) -> int:
    return max(tile(shape.head_dim), tile(shape.value_dim))
