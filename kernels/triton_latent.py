"""Paged attention in which all heads read one row per token, which is key and value at once.

1. A row is read once for all heads of a tile: its latent values make the score, together with the
   rotated ones behind them, and are what is weighed.
2. All else is as in ``triton_attention``, whose segments and sums it shares.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvtrio.kernels import triton_attention as attention
from kvtrio.kernels.triton_attention import Queries, queries_per_tile, segments_of
from kvtrio.kernels.triton_attention_kernels import combine_kernel
from kvtrio.kernels.triton_common import LEAST_TILE, next_power, tile
from kvtrio.kernels.triton_latent_kernels import latent_kernel

MOST_HEADS = 32
"""Of a tile; more rows than that have no room in a GPU's registers."""


def latent_ratio(num_heads: int) -> int:
    """What counts for ``queries_per_tile``: twice the heads, as tiles have half as many rows."""
    return 2 * min(MOST_HEADS, next_power(num_heads))


@dataclass(frozen=True)
class LatentShape:
    """What is the same for all rows of a layer."""

    num_heads: int
    latent_dim: int
    num_rotated: int
    scale: float

    @property
    def padded_heads(self) -> int:
        """Heads of one query in a tile."""
        return latent_ratio(self.num_heads) // 2


def attend_latent(
    q: Tensor, cache: Tensor, queries: Queries, shape: LatentShape, out: Tensor
) -> None:
    """Attention of the rows of ``queries`` over their blocks, into their rows of ``out``.

    q [N, heads, latent_dim + num_rotated] contiguous; cache [blocks, block_size, 1, the same]
    contiguous; out [N, heads, latent_dim] contiguous; all of q's type.
    """
    if not queries.num_chunks:
        return
    block_q = queries_per_tile(latent_ratio(shape.num_heads), queries.max_length == 1)
    tiles = _sizes(shape, cache, block_q)
    head_tiles = triton.cdiv(shape.num_heads, _heads_per_tile(shape, cache, block_q))
    if queries.max_length > 1:
        grid = (queries.num_tiles, head_tiles)
        latent_kernel[grid](
            *_arguments(q, cache, queries, shape), out, None, 0, **tiles, SEGMENT=0, MOST=0,
        )  # fmt: skip
        return
    num_segments = segments_of(queries.max_keys, None)
    sizes = (queries.num_chunks, shape.num_heads, num_segments)
    parts = torch.empty((*sizes, shape.latent_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((*sizes, 2), dtype=torch.float32, device=q.device)
    split = {"SEGMENT": attention.SEGMENT, "MOST": attention.MOST_SEGMENTS}
    latent_kernel[(queries.num_chunks, head_tiles, num_segments)](
        *_arguments(q, cache, queries, shape), parts, sums, num_segments, **tiles, **split,
    )  # fmt: skip
    combine_kernel[(queries.num_chunks, shape.num_heads)](
        parts, sums, None, out, queries.first_rows, queries.starts, shape.num_heads, num_segments,
        VALUE_DIM=shape.latent_dim, BLOCK_V=tile(shape.latent_dim), WINDOW=0, HAS_SINKS=False,
        **split, num_warps=2,
    )  # fmt: skip


def _arguments(
    q: Tensor, cache: Tensor, queries: Queries, shape: LatentShape
) -> tuple[object, ...]:
    return (
        q, cache, queries.first_rows, queries.starts, queries.lengths, queries.tables,
        queries.table_starts, queries.tile_starts, queries.num_chunks, shape.num_heads, shape.scale,
    )  # fmt: skip


def _heads_per_tile(shape: LatentShape, cache: Tensor, block_q: int) -> int:
    """More float32 rows than the least tile has do not fit into a GPU's shared memory."""
    if attention.is_wide(cache):
        return min(shape.padded_heads, max(1, LEAST_TILE // block_q))
    return shape.padded_heads


def _sizes(shape: LatentShape, cache: Tensor, block_q: int) -> dict[str, object]:
    padded = _heads_per_tile(shape, cache, block_q)
    block_m = tile(block_q * padded)
    return {
        "PADDED": padded,
        "BLOCK_M": block_m,
        "BLOCK_Q": block_q,
        "LATENT": shape.latent_dim,
        "ROTATED": shape.num_rotated,
        "BLOCK_L": tile(shape.latent_dim),
        "BLOCK_R": tile(shape.num_rotated),
        "PLACES": cache.shape[1],
        "BLOCK_N": 16 if attention.is_wide(cache) else 32,
        "num_warps": 4 if block_m <= 16 else 8,
        "num_stages": 1 if attention.is_wide(cache) else 2,
    }
