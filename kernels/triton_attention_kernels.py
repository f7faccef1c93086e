"""Device code of paged attention; ``triton_attention`` says what it computes."""

import triton
import triton.language as tl

from kvtrio.kernels.triton_common import product


@triton.jit
def chunk_of(tile_starts, tile, num_chunks):
    """The last chunk whose first tile is not behind ``tile``: binary search."""
    low, high = 0, num_chunks
    while high - low > 1:
        middle = (low + high) // 2
        is_behind = tl.load(tile_starts + middle) <= tile
        low = tl.where(is_behind, middle, low)
        high = tl.where(is_behind, high, middle)
    return low


@triton.jit
def oldest_of(position, WINDOW: tl.constexpr):
    """The first key that a query at ``position`` sees."""
    return tl.maximum(position - WINDOW + 1, 0) if WINDOW else position * 0


@triton.jit
def segment_of(position, WINDOW: tl.constexpr, SEGMENT: tl.constexpr, MOST: tl.constexpr):
    """Keys of a segment: ``SEGMENT``, doubled until ``MOST`` of them hold what the row sees."""
    seen = position + 1 - oldest_of(position, WINDOW)
    size = position * 0 + SEGMENT
    while size * MOST < seen:
        size *= 2
    return size


@triton.jit
def span(position, end, WINDOW: tl.constexpr, SEGMENT: tl.constexpr, MOST: tl.constexpr):
    """The first key of a tile whose first query is at ``position``, and the one behind the last;
    of one segment, if it is split."""
    oldest = oldest_of(position, WINDOW)
    if SEGMENT:
        size = segment_of(position, WINDOW, SEGMENT, MOST)
        segment = oldest // size + tl.program_id(2)
        oldest = tl.maximum(oldest, segment * size)
        end = tl.minimum(end, (segment + 1) * size)
    return oldest, end


@triton.jit
def _scores(queries, keys, is_key, is_seen, scale, SOFTCAP: tl.constexpr):
    """Float32 [queries, keys], -inf where not seen; ``keys`` are addresses [dim, keys]."""
    k = tl.load(keys, mask=is_key, other=0.0)
    scores = product(queries, k, tl.zeros(is_seen.shape, tl.float32)) * scale
    if SOFTCAP > 0:
        scores = SOFTCAP * (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0)
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def softened(scores, best):
    """exp(score - peak) with the new peak, and what is left of sums under the old one."""
    peak = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    return tl.exp(scores - safe[:, None]), tl.exp(best - safe), peak


@triton.jit
def _weighed(weights, values, is_value, acc):
    """``acc + weights V``; ``values`` are addresses [keys, value_dim]."""
    v = tl.load(values, mask=is_value, other=0.0)
    return product(weights.to(v.dtype), v, acc)


@triton.jit
def store_rows(
    acc, best, total, is_row, place, out, sums, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """What a tile's rows have seen, at their places; with SEGMENT as parts, with their sums."""
    v = tl.arange(0, BLOCK)
    mask = is_row[:, None] & (v < DIM)[None, :]
    target = out + place[:, None] * DIM + v[None, :]
    if SEGMENT:
        tl.store(target, acc, mask=mask)
        tl.store(sums + place * 2, best, mask=is_row)
        tl.store(sums + place * 2 + 1, total, mask=is_row)
    else:
        total = tl.where(is_row, total, 1.0)  # rows that are nobody's have seen nothing
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_chunks", "num_segments"])
def attend_kernel(
    q, keys, values, first_rows, starts, lengths, tables, table_starts, tile_starts, num_chunks,
    row_stride, head_stride, num_heads, num_kv_heads, scale, out, sums, sinks, num_segments,
    RATIO: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PLACES: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, SEGMENT: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one kv head; with SEGMENT over one segment of the keys, for a single
    row. Then ``out`` has the parts and ``sums`` their maxima and sums."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    chunk = tile if SEGMENT else chunk_of(tile_starts, tile, num_chunks)
    length, start = tl.load(lengths + chunk), tl.load(starts + chunk)
    begin = 0 if SEGMENT else (tile - tl.load(tile_starts + chunk)) * BLOCK_Q
    end = start + tl.minimum(begin + BLOCK_Q, length)
    oldest, end = span(start + begin, end, WINDOW, SEGMENT, MOST)
    # SIM102: the first is decided when this is compiled, and only then may a kernel return here.
    if SEGMENT:  # noqa: SIM102
        if oldest >= end:  # a segment that this row does not have
            return
    table = tables + tl.load(table_starts + chunk)
    m = tl.arange(0, BLOCK_M)
    query, in_group = begin + m // PADDED, m % PADDED
    is_row = (query < length) & (m < BLOCK_Q * PADDED) & (in_group < RATIO)
    head, row = kv_head * RATIO + in_group, (tl.load(first_rows + chunk) + query).to(tl.int64)
    d, v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    queries = tl.load(
        q + row[:, None] * row_stride + head[:, None] * head_stride + d[None, :],
        mask=is_row[:, None] & (d < DIM)[None, :], other=0.0,
    )  # fmt: skip
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        best = tl.load(sinks + head, mask=is_row, other=0.0)
        total = tl.full((BLOCK_M,), 1.0, tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    position = start + query
    for first in range(oldest // BLOCK_N * BLOCK_N, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        is_key = (n >= oldest) & (n < end)
        block = tl.load(table + n // PLACES, mask=is_key, other=0)
        place = (block.to(tl.int64) * PLACES + n % PLACES) * num_kv_heads + kv_head
        is_seen = is_key[None, :] & (n[None, :] <= position[:, None])
        if WINDOW:
            is_seen = is_seen & (n[None, :] > position[:, None] - WINDOW)
        scores = _scores(
            queries, keys + place[None, :] * DIM + d[:, None],
            is_key[None, :] & (d < DIM)[:, None], is_seen, scale, SOFTCAP,
        )  # fmt: skip
        weights, kept, best = softened(scores, best)
        total = total * kept + tl.sum(weights, 1)
        is_value = is_key[:, None] & (v < VALUE_DIM)[None, :]
        source = values + place[:, None] * VALUE_DIM + v[None, :]
        acc = _weighed(weights, source, is_value, acc * kept[:, None])
    part = (chunk.to(tl.int64) * num_heads + head) * num_segments + tl.program_id(2)
    place = part if SEGMENT else row * num_heads + head
    store_rows(acc, best, total, is_row, place, out, sums, VALUE_DIM, BLOCK_V, SEGMENT)


@triton.jit(do_not_specialize=["num_segments"])
def combine_kernel(
    parts, sums, sinks, out, first_rows, starts, num_heads, num_segments,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, WINDOW: tl.constexpr, SEGMENT: tl.constexpr,
    MOST: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The parts of one row's head, added in the order of their segments."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(starts + chunk)
    size = segment_of(position, WINDOW, SEGMENT, MOST)
    count = position // size - oldest_of(position, WINDOW) // size + 1
    base = (chunk.to(tl.int64) * num_heads + head) * num_segments
    v = tl.arange(0, BLOCK_V)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    best = tl.load(sums + base * 2)
    total = best * 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head)
        best = tl.maximum(best, sink)
        total = tl.exp(sink - best)
    for i in range(0, count):
        own = tl.load(sums + (base + i) * 2)
        peak = tl.maximum(best, own)
        kept, factor = tl.exp(best - peak), tl.exp(own - peak)
        part = tl.load(parts + (base + i) * VALUE_DIM + v, mask=v < VALUE_DIM, other=0.0)
        acc = acc * kept + part * factor
        total = total * kept + tl.load(sums + (base + i) * 2 + 1) * factor
        best = peak
    row = tl.load(first_rows + chunk).to(tl.int64)
    result = (acc / total).to(out.dtype.element_ty)
    tl.store(out + (row * num_heads + head) * VALUE_DIM + v, result, mask=v < VALUE_DIM)
