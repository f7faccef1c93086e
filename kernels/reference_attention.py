"""Attention over paged blocks in plain torch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtrio.kernels.reference import softcap as cap_scores


@dataclass(frozen=True)
class Scoring:
    """How a score comes from q and k."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """float32 [heads]: one more score of each, which takes weight and has no value."""


def gather_blocks(cache: Tensor, blocks: Tensor, unwritten: Tensor) -> Tensor:
    """The keys or values of R runs of blocks, in order of position.

    Zeros stand at the places ``unwritten``, counted over all runs: what somebody left there may be
    NaN, which a weight of zero does not hide.

    cache [num_blocks, block_size, kv_heads, dim], blocks int64 [R, B], unwritten int64 [U];
    returns [R, kv_heads, B * block_size, dim], the cache's type.
    """
    gathered = cache[blocks.flatten()]
    gathered.view(-1, *cache.shape[2:]).index_fill_(0, unwritten, 0.0)
    return gathered.view(blocks.shape[0], -1, *cache.shape[2:]).transpose(1, 2)


def causal_mask(queries: Tensor, first_key: Tensor, num_keys: int, window: int | None) -> Tensor:
    """0 where a query sees a key and -inf where it does not, to be added to the scores.

    A query at position p sees the keys at positions p - window + 1 .. p. queries int64 [R, L]:
    positions; first_key int64 [R]: the position of each run's first key; returns float32
    [R, 1, L, num_keys].
    """
    keys = first_key[:, None] + torch.arange(num_keys, device=queries.device)
    age = queries[:, :, None] - keys[:, None, :]
    hidden = age < 0 if window is None else (age < 0) | (age >= window)
    zeros = torch.zeros(hidden.shape, device=queries.device)
    return zeros.masked_fill_(hidden, float("-inf"))[:, None]


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """``softmax(cap(scale * q k^T) + mask) v`` per head, softmax in float32; see ``Scoring``.

    Query head h reads kv head ``h // (heads / kv_heads)``. q compute type [R, L, heads, dim], keys
    [R, kv_heads, K, dim], values [R, kv_heads, K, value_dim], mask compute type
    [R, 1, L, K]; returns compute type [R, L, heads, value_dim].
    """
    num_runs, num_queries, num_heads, _ = q.shape
    num_kv_heads = keys.shape[1]
    folded = q.transpose(1, 2)
    if num_queries == 1:  # the heads of one kv head become its rows: keys are read once
        folded = folded.reshape(num_runs, num_kv_heads, num_heads // num_kv_heads, -1)
    if scoring.softcap is None and scoring.sinks is None:
        grouped = folded.shape[1] != num_kv_heads
        out = F.scaled_dot_product_attention(
            folded, keys, values, mask, scale=scoring.scale, enable_gqa=grouped
        )
    else:
        out = _attend_scores(folded, keys, values, mask, scoring)
    return out.reshape(num_runs, num_heads, num_queries, -1).transpose(1, 2)


def temperature(positions: Tensor, scale: float, length: int) -> Tensor:
    """``1 + scale * ln(1 + floor(p / length))``: what queries at positions p are multiplied by.

    positions int64 [N]; returns float32 [N, 1, 1].
    """
    steps = (positions // length).double()
    return (1.0 + scale * torch.log1p(steps)).float()[:, None, None]


def gate(out: Tensor, gates: Tensor) -> Tensor:
    """``out * sigmoid(gates)``, computed in float32; both compute type [N, heads, value_dim]."""
    return (out.float() * gates.float().sigmoid()).to(out.dtype)


def _attend_scores(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring
) -> Tensor:
    repeats = q.shape[1] // keys.shape[1]
    wide_keys = keys.float().repeat_interleave(repeats, 1)
    wide_values = values.float().repeat_interleave(repeats, 1)
    scores = q.float() @ wide_keys.transpose(-1, -2) * scoring.scale
    if scoring.softcap is not None:
        scores = cap_scores(scores, scoring.softcap)
    scores = scores + mask
    if scoring.sinks is not None:  # by heads, which may lie in two axes
        sinks = scoring.sinks.view(q.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[2]]
    return (weights @ wide_values).to(q.dtype)
