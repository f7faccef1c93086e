"""Device code of recurrent layers; ``triton_recurrent`` says what it computes."""

import triton
import triton.language as tl

from kvtrio.kernels.triton_common import product


@triton.jit
def conv_kernel(
    x, weight, bias, history, out, first_rows, starts, lengths, slots, channels, slot_stride,
    WIDTH: tl.constexpr, BACK: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some channels of one chunk, row after row; the sum of a row has one order in any chunk."""
    chunk = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = c < channels
    first = tl.load(first_rows + chunk).to(tl.int64)
    length = tl.load(lengths + chunk)
    is_old = tl.load(starts + chunk) != 0
    past = history + tl.load(slots + chunk) * slot_stride
    for t in range(0, length):
        total = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(WIDTH):
            row = t - WIDTH + 1 + j
            before = tl.load(
                past + (row + WIDTH - 1) * channels + c,
                mask=is_channel & (row < 0) & is_old, other=0.0,
            )  # fmt: skip
            own = tl.load(x + (first + row) * channels + c, mask=is_channel & (row >= 0), other=0.0)
            total += (before + own) * tl.load(weight + c * WIDTH + j, mask=is_channel, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + c, mask=is_channel, other=0.0)
        if SILU:
            total = total * tl.sigmoid(total)
        tl.store(out + (first + t) * channels + c, total, mask=is_channel)
    # All at once, since places read and written overlap in a chunk shorter than the history.
    b = tl.arange(0, BACK)[:, None]
    row = length - WIDTH + 1 + b
    mask = (b < WIDTH - 1) & is_channel[None, :]
    place = past + (row + WIDTH - 1) * channels + c[None, :]
    before = tl.load(place, mask=mask & (row < 0) & is_old, other=0.0)
    own = tl.load(x + (first + row) * channels + c[None, :], mask=mask & (row >= 0), other=0.0)
    tl.debug_barrier()
    tl.store(past + b * channels + c[None, :], before + own, mask=mask)


@triton.jit
def delta_row_kernel(
    q, k, v, log_decay, beta, states, out, first_rows, starts, lengths, slots, num_heads,
    slot_stride, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The recurrence as it stands: some values of one head of a single row."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = (i < K)[:, None] & (j < V)[None, :]
    row = tl.load(first_rows + chunk).to(tl.int64) * num_heads + head
    own = states + tl.load(slots + chunk) * slot_stride + head * (K * V)
    place = own + i[:, None] * V + j[None, :]
    is_old = tl.load(starts + chunk) != 0
    state = tl.load(place, mask=mask & is_old, other=0.0) * tl.exp(tl.load(log_decay + row))
    key = tl.load(k + row * K + i, mask=i < K, other=0.0)
    query = tl.load(q + row * K + i, mask=i < K, other=0.0)
    value = tl.load(v + row * V + j, mask=j < V, other=0.0)
    change = (value - tl.sum(key[:, None] * state, 0)) * tl.load(beta + row)
    state += key[:, None] * change[None, :]
    tl.store(place, state, mask=mask)
    tl.store(out + row * V + j, tl.sum(query[:, None] * state, 0), mask=j < V)


@triton.jit
def _solved(system, wanted, t, PIECE: tl.constexpr):
    """u of ``(1 + L) u = wanted``, L strictly lower, row after row. Products of powers of L would
    need fewer steps, and fail where keys repeat: the powers grow beyond what float32 can cancel."""
    result = wanted
    for row in range(1, PIECE):
        factors = tl.sum(tl.where(t[:, None] == row, system, 0.0), 0)
        known = tl.sum(factors[:, None] * result, 0)
        result = tl.where(t[:, None] == row, result - known[None, :], result)
    return result


@triton.jit
def _tile(source, row, i, is_row, K: tl.constexpr):
    """Some values of the rows' q or k: [PIECE, values]."""
    mask = is_row[:, None] & (i < K)[None, :]
    return tl.load(source + row[:, None] * K + i[None, :], mask=mask, other=0.0)


@triton.jit
def delta_chunk_kernel(
    q, k, v, log_decay, beta, states, out, first_rows, starts, lengths, slots, num_heads,
    slot_stride, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Some values of one head over all rows of a chunk, piece by piece.

    Letters as in ``reference_delta_net._piece``. Rows behind a piece's end have no decay and no
    key, so they change nothing. The state stays in its slot, that is in the cache: with all its
    rows at once products would not fit into registers.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    start, length = tl.load(starts + chunk), tl.load(lengths + chunk)
    first = tl.load(first_rows + chunk).to(tl.int64)
    own = states + tl.load(slots + chunk) * slot_stride + head * (K * V)
    t, i = tl.arange(0, PIECE), tl.arange(0, BLOCK_K)
    is_past = t[:, None] >= t[None, :]
    # The first piece may begin inside one, so that borders are at multiples of PIECE.
    for border in range(start // PIECE * PIECE, start + length, PIECE):
        position = border + t
        is_row = (position >= start) & (position < start + length)
        row = (first + position - start) * num_heads + head
        is_old = (start > 0) | (border > 0)
        system = tl.zeros((PIECE, PIECE), tl.float32)
        read = tl.zeros((PIECE, PIECE), tl.float32)
        answered = tl.zeros((PIECE, BLOCK_V), tl.float32)
        result = tl.zeros((PIECE, BLOCK_V), tl.float32)
        for at in range(0, K, BLOCK_K):
            mask = (at + i < K)[:, None] & (j < V)[None, :] & is_old
            state = tl.load(own + (at + i)[:, None] * V + j[None, :], mask=mask, other=0.0)
            keys, queries = _tile(k, row, at + i, is_row, K), _tile(q, row, at + i, is_row, K)
            turned = tl.trans(keys)
            system, read = product(keys, turned, system), product(queries, turned, read)
            answered = product(keys, state, answered)
            result = product(queries, state, result)
        strength = tl.load(beta + row, mask=is_row, other=0.0)
        total = tl.cumsum(tl.load(log_decay + row, mask=is_row, other=0.0), 0)
        left = tl.exp(total)[:, None]
        since = tl.where(is_past, total[:, None] - total[None, :], 0.0)
        between = tl.where(is_past, tl.exp(since), 0.0)
        system = tl.where(t[:, None] > t[None, :], system * between * strength[:, None], 0.0)
        is_value = is_row[:, None] & (j < V)[None, :]
        values = tl.load(v + row[:, None] * V + j[None, :], mask=is_value, other=0.0)
        changes = _solved(system, (values - answered * left) * strength[:, None], t, PIECE)
        result = product(read * between, changes, result * left)
        tl.store(out + row[:, None] * V + j[None, :], result, mask=is_value)
        last = tl.sum(tl.where(t == PIECE - 1, total, 0.0), 0)
        kept = tl.exp(last - total)[:, None]
        tl.debug_barrier()  # other threads may still read what this one writes
        for at in range(0, K, BLOCK_K):
            mask = (at + i < K)[:, None] & (j < V)[None, :]
            place = own + (at + i)[:, None] * V + j[None, :]
            state = tl.load(place, mask=mask & is_old, other=0.0) * tl.exp(last)
            keys = _tile(k, row, at + i, is_row, K) * kept
            tl.store(place, product(tl.trans(keys), changes, state), mask=mask)
        tl.debug_barrier()
