"""Device code of Mamba 2's state space; ``triton_mamba2`` says what it computes."""

import triton
import triton.language as tl

from kvtrio.kernels.triton_common import product


@triton.jit
def space_row_kernel(
    rows, dt, log_decay, skip, states, out, first_rows, starts, lengths, slots, num_heads,
    row_stride, slot_stride, P: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The recurrence as it stands: some values of one head of a single row."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    is_value, is_state = p < P, s < S
    mask = is_value[:, None] & is_state[None, :]
    row = tl.load(first_rows + chunk).to(tl.int64)
    own = rows + row * row_stride
    shared = own + num_heads * P + head // (num_heads // GROUPS) * S
    b = tl.load(shared + s, mask=is_state, other=0.0)
    c = tl.load(shared + GROUPS * S + s, mask=is_state, other=0.0)
    x = tl.load(own + head * P + p, mask=is_value, other=0.0)
    place = row * num_heads + head
    kept = tl.exp(tl.load(log_decay + place))
    target = states + tl.load(slots + chunk) * slot_stride + head * (P * S)
    target += p[:, None] * S + s[None, :]
    is_old = tl.load(starts + chunk) != 0
    state = tl.load(target, mask=mask & is_old, other=0.0) * kept
    state += (x * tl.load(dt + place))[:, None] * b[None, :]
    tl.store(target, state, mask=mask)
    result = tl.sum(state * c[None, :], 1) + x * tl.load(skip + head)
    tl.store(out + place * P + p, result, mask=is_value)


@triton.jit
def space_chunk_kernel(
    rows, dt, log_decay, skip, states, out, first_rows, starts, lengths, slots, num_heads,
    row_stride, slot_stride, P: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Some values of one head over all rows of a chunk, piece by piece.

    Letters as in ``reference_mamba2._piece``. Rows outside the chunk have no decay and add nothing.
    The state stays in its slot, that is in the cache, and is taken in slices.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    start, length = tl.load(starts + chunk), tl.load(lengths + chunk)
    first = tl.load(first_rows + chunk).to(tl.int64)
    own = states + tl.load(slots + chunk) * slot_stride + head * (P * S)
    shared = rows + num_heads * P + head // (num_heads // GROUPS) * S
    t, s, is_value = tl.arange(0, PIECE), tl.arange(0, BLOCK_S), p < P
    is_past = t[:, None] >= t[None, :]
    # The first piece may begin inside one, so that borders are at multiples of PIECE.
    for border in range(start // PIECE * PIECE, start + length, PIECE):
        position = border + t
        is_row = (position >= start) & (position < start + length)
        row = first + position - start
        is_old = (start > 0) | (border > 0)
        place = row * num_heads + head
        total = tl.cumsum(tl.load(log_decay + place, mask=is_row, other=0.0), 0)
        mask = is_row[:, None] & is_value[None, :]
        x = tl.load(rows + row[:, None] * row_stride + head * P + p[None, :], mask=mask, other=0.0)
        added = x * tl.load(dt + place, mask=is_row, other=0.0)[:, None]
        read = tl.zeros((PIECE, PIECE), tl.float32)
        result = tl.zeros((PIECE, BLOCK_P), tl.float32)
        for at in range(0, S, BLOCK_S):
            is_state = at + s < S
            wide = is_row[:, None] & is_state[None, :]
            source = shared + row[:, None] * row_stride + (at + s)[None, :]
            b = tl.load(source, mask=wide, other=0.0)
            c = tl.load(source + GROUPS * S, mask=wide, other=0.0)
            held = is_state[:, None] & is_value[None, :] & is_old
            state = tl.load(own + p[None, :] * S + (at + s)[:, None], mask=held, other=0.0)
            read = product(c, tl.trans(b), read)
            result = product(c, state, result)
        since = tl.where(is_past, total[:, None] - total[None, :], 0.0)
        between = tl.where(is_past, tl.exp(since), 0.0)
        result = product(read * between, added, result * tl.exp(total)[:, None])
        result += x * tl.load(skip + head)
        tl.store(out + place[:, None] * P + p[None, :], result, mask=mask)
        last = tl.sum(tl.where(t == PIECE - 1, total, 0.0), 0)
        kept = tl.trans(added * tl.exp(last - total)[:, None])
        tl.debug_barrier()  # other threads may still read what this one writes
        for at in range(0, S, BLOCK_S):
            is_state = at + s < S
            held = is_value[:, None] & is_state[None, :]
            target = own + p[:, None] * S + (at + s)[None, :]
            state = tl.load(target, mask=held & is_old, other=0.0) * tl.exp(last)
            source = shared + row[:, None] * row_stride + (at + s)[None, :]
            b = tl.load(source, mask=is_row[:, None] & is_state[None, :], other=0.0)
            tl.store(target, product(kept, b, state), mask=held)
        tl.debug_barrier()
