"""Choosing tokens from logits, row by row: the executable specification of sampling.

Rules:
1. A row's answer depends on its own logits, parameters and draw. Rows are computed together only
   where an operation treats each row alone; decisions are made in float64 with running sums in
   order, so the width that other rows force on the arrays changes nothing.
2. Equal logits rank by token id, lowest first.
3. Every filter keeps at least the best token left.

Order and meaning of the filters are llama-server's (llama.cpp build b11434, src/llama-sampler.cpp).
Shapes: M rows, V vocabulary, C candidates, best first, padded with -inf.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BANNED = float("-inf")


@dataclass(frozen=True)
class Bias:
    """``logits[rows[i], ids[i]] += values[i]``; int64, int64, float32 [n]; a pair may repeat."""

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class Penalties:
    """Seen tokens, each (row, id) once: rows and ids int64 [n], the rest float32 [n]."""

    rows: Tensor
    ids: Tensor
    repeat: Tensor
    offset: Tensor
    """count * frequency penalty + presence penalty."""


@dataclass(frozen=True)
class Filters:
    """Per row, on the CPU: float64 [M], ``top_k`` int64 [M]; off: see each."""

    top_n_sigma: Tensor
    """Off: 0 or less."""
    top_k: Tensor
    """Off: 0 or less."""
    typical_p: Tensor
    """Off: 1 or more."""
    top_p: Tensor
    """Off: 1 or more."""
    min_p: Tensor
    """Off: 0 or less."""
    temperature: Tensor
    """Above 0."""
    draw: Tensor
    """In [0, 1)."""


def adjust(logits: Tensor, bias: Bias, penalties: Penalties) -> Tensor:
    """Logits float32 [M, V] with bias, then penalties, as a new tensor.

    A seen token's logit x becomes (x / repeat if x > 0 else x * repeat) - offset. What overflows is
    clamped; a row whose every token is banned ignores its bias, as there is nothing else to choose.
    """
    out = logits.clone()
    out.index_put_((bias.rows, bias.ids), bias.values, accumulate=True)
    hopeless = (out == BANNED).all(-1)
    out[hopeless] = logits[hopeless]
    seen = out[penalties.rows, penalties.ids]
    seen = torch.where(seen > 0, seen / penalties.repeat, seen * penalties.repeat)
    out[penalties.rows, penalties.ids] = seen - penalties.offset
    largest = torch.finfo(out.dtype).max
    return torch.nan_to_num_(out, nan=BANNED, posinf=largest, neginf=BANNED)


def greedy(logits: Tensor) -> Tensor:
    """Id of the largest logit of each row, the lowest id among equals: int64 [M]."""
    return logits.argmax(-1)


def best(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The ``counts[i]`` largest values of row i and their ids, largest first.

    values float32 [M, V], counts int64 [M] from 1 to V; returns values float32 [M, C] and ids
    int64 [M, C] with C = max(counts), padded with -inf. Ties are settled before the cut (a
    top-k routine may keep any of several equals), so that the answer is unique.
    """
    width = int(counts.max())
    if 4 * width >= values.shape[-1]:
        ranked, ids = values.sort(dim=-1, descending=True, stable=True)
        ranked, ids = ranked[:, :width], ids[:, :width]
    else:
        ranked, ids = _best_few(values, counts, width)
    is_beyond = torch.arange(width, device=values.device) >= counts[:, None].to(values.device)
    return ranked.masked_fill(is_beyond, BANNED), ids


def _best_few(values: Tensor, counts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """All values that reach each row's threshold, ranked, cut to ``width``."""
    top = values.topk(width, dim=-1).values
    threshold = top.gather(1, counts[:, None].to(values.device) - 1)
    rows, ids = (values >= threshold).nonzero(as_tuple=True)
    sizes = torch.bincount(rows, minlength=values.shape[0])
    starts = sizes.cumsum(0) - sizes
    places = torch.arange(len(rows), device=values.device) - starts[rows]
    shape = (values.shape[0], int(sizes.max()))
    found = values.new_full(shape, BANNED)
    found[rows, places] = values[rows, ids]
    found_ids = ids.new_zeros(shape)
    found_ids[rows, places] = ids
    ranked, order = found.sort(dim=-1, descending=True, stable=True)
    return ranked[:, :width], found_ids.gather(1, order)[:, :width]


def choose(logits: Tensor, filters: Filters) -> Tensor:
    """Draw one id per row from adjusted logits float32 [M, V]: int64 [M] on the CPU."""
    size = logits.shape[-1]
    counts = torch.where(filters.top_k > 0, filters.top_k.clamp(max=size), size)
    ranked, ids = best(logits, counts)
    values, ids = ranked.cpu().double(), ids.cpu()
    values = _keep_sigma(values, logits, filters.top_n_sigma)
    values = _keep_typical(values, filters.typical_p)
    values = _keep_top_p(values, filters.top_p)
    values = _keep_min_p(values, filters.min_p)
    place = _draw(values, filters.temperature, filters.draw)
    return ids.gather(1, place[:, None])[:, 0]


def _keep_sigma(values: Tensor, logits: Tensor, widths: Tensor) -> Tensor:
    """Keep x >= max - width * standard deviation of the row's logits that are not banned."""
    is_on = widths > 0
    if not bool(is_on.any()):
        return values
    deviation = torch.zeros_like(widths)
    for row in is_on.nonzero()[:, 0].tolist():
        kept = logits[row][logits[row] != BANNED].cpu().double()
        deviation[row] = kept.std(correction=0)
    floor = values.amax(-1) - widths * deviation
    return values.masked_fill(is_on[:, None] & (values < floor[:, None]), BANNED)


def _keep_typical(values: Tensor, limits: Tensor) -> Tensor:
    """Keep the tokens whose surprise is nearest to the entropy, until their probability exceeds
    the limit."""
    is_on = limits < 1
    if not bool(is_on.any()):
        return values
    chances = _softmax(values)
    surprise = -chances.log()
    parts = torch.where(chances > 0, chances * surprise, 0.0)
    entropy = parts.cumsum(-1)[:, -1:]
    oddness = (surprise - entropy).abs().masked_fill(values == BANNED, float("inf"))
    order = oddness.sort(dim=-1, stable=True).indices
    sums = chances.gather(1, order).cumsum(-1)
    before = torch.cat((torch.zeros_like(sums[:, :1]), sums[:, :-1]), -1)
    kept = before <= limits[:, None]
    kept[:, 0] = True
    kept = torch.zeros_like(kept).scatter(1, order, kept)
    return values.masked_fill(is_on[:, None] & ~kept, BANNED)


def _keep_top_p(values: Tensor, limits: Tensor) -> Tensor:
    """Keep the best until their probability reaches the limit."""
    is_on = limits < 1
    if not bool(is_on.any()):
        return values
    chances = _softmax(values)
    sums = chances.cumsum(-1)
    before = torch.cat((torch.zeros_like(sums[:, :1]), sums[:, :-1]), -1)
    dropped = (before >= limits[:, None]) & ~_is_first(values)
    return values.masked_fill(is_on[:, None] & dropped, BANNED)


def _keep_min_p(values: Tensor, ratios: Tensor) -> Tensor:
    """Keep what is at least ``ratio`` times as likely as the best."""
    is_on = ratios > 0
    if not bool(is_on.any()):
        return values
    floor = values.amax(-1) + ratios.clamp(max=1.0).log()
    return values.masked_fill(is_on[:, None] & (values < floor[:, None]), BANNED)


def _draw(values: Tensor, temperature: Tensor, draw: Tensor) -> Tensor:
    """Place of the first candidate at which the running sum of exp(x / temperature) exceeds the
    draw's share of the whole."""
    weights = ((values - values.amax(-1, keepdim=True)) / temperature[:, None]).exp()
    sums = weights.cumsum(-1)
    place = (sums <= draw[:, None] * sums[:, -1:]).sum(-1)
    # A draw just below 1 may round up to the whole: then it is the last candidate's.
    places = torch.arange(weights.shape[-1])
    return torch.minimum(place, torch.where(weights > 0, places, 0).amax(-1))


def _softmax(values: Tensor) -> Tensor:
    weights = (values - values.amax(-1, keepdim=True)).exp()
    return weights / weights.cumsum(-1)[:, -1:]


def _is_first(values: Tensor) -> Tensor:
    kept = values != BANNED
    return kept & (kept.cumsum(-1) == 1)
