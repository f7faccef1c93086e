"""Device code of latent attention; ``triton_latent`` says what it computes."""

import triton
import triton.language as tl

from kvtrio.kernels.triton_attention_kernels import chunk_of, softened, span, store_rows
from kvtrio.kernels.triton_common import product


@triton.jit(do_not_specialize=["num_chunks", "num_segments"])
def latent_kernel(
    q, rows, first_rows, starts, lengths, tables, table_starts, tile_starts, num_chunks, num_heads,
    scale, out, sums, num_segments, PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, PLACES: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENT: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """One tile of queries and heads; with SEGMENT as ``attend_kernel`` does it."""
    WIDTH: tl.constexpr = LATENT + ROTATED
    tile_id = tl.program_id(0)
    chunk = tile_id if SEGMENT else chunk_of(tile_starts, tile_id, num_chunks)
    length, start = tl.load(lengths + chunk), tl.load(starts + chunk)
    begin = 0 if SEGMENT else (tile_id - tl.load(tile_starts + chunk)) * BLOCK_Q
    end = start + tl.minimum(begin + BLOCK_Q, length)
    oldest, end = span(start + begin, end, 0, SEGMENT, MOST)
    # SIM102: the first is decided when this is compiled, and only then may a kernel return here.
    if SEGMENT:  # noqa: SIM102
        if oldest >= end:  # a segment that this row does not have
            return
    table = tables + tl.load(table_starts + chunk)
    m = tl.arange(0, BLOCK_M)
    query, head = begin + m // PADDED, tl.program_id(1) * PADDED + m % PADDED
    is_row = (query < length) & (m < BLOCK_Q * PADDED) & (head < num_heads)
    row = (tl.load(first_rows + chunk) + query).to(tl.int64)
    i, r = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    is_latent, is_rotated = i < LATENT, r < ROTATED
    own = q + ((row * num_heads + head) * WIDTH)[:, None]
    latent = tl.load(own + i[None, :], mask=is_row[:, None] & is_latent[None, :], other=0.0)
    mask = is_row[:, None] & is_rotated[None, :]
    rotated = tl.load(own + LATENT + r[None, :], mask=mask, other=0.0)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    position = start + query
    for first in range(oldest // BLOCK_N * BLOCK_N, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        is_key = (n >= oldest) & (n < end)
        block = tl.load(table + n // PLACES, mask=is_key, other=0)
        source = rows + ((block.to(tl.int64) * PLACES + n % PLACES) * WIDTH)[:, None]
        values = tl.load(source + i[None, :], mask=is_key[:, None] & is_latent[None, :], other=0.0)
        turned = tl.load(
            source + LATENT + r[None, :], mask=is_key[:, None] & is_rotated[None, :], other=0.0
        )
        is_seen = is_key[None, :] & (n[None, :] <= position[:, None])
        scores = product(latent, tl.trans(values), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        scores = product(rotated, tl.trans(turned), scores) * scale
        weights, kept, best = softened(tl.where(is_seen, scores, float("-inf")), best)
        total = total * kept + tl.sum(weights, 1)
        acc = product(weights.to(values.dtype), values, acc * kept[:, None])
    part = (chunk.to(tl.int64) * num_heads + head) * num_segments + tl.program_id(2)
    place = part if SEGMENT else row * num_heads + head
    store_rows(acc, best, total, is_row, place, out, sums, LATENT, BLOCK_L, SEGMENT)
