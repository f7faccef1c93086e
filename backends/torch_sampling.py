"""Sampling requests as tensors for the sampling kernel, and its answer as messages."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from kvtrio.core.batch import Sampled, SampleRow
from kvtrio.core.sampling import SamplingParams
from kvtrio.kernels import sampling as kernels


def sample_rows(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Sampled | None, ...]:
    """One token per row of logits float32 [M, V]; None where one of them is not finite."""
    are_finite = torch.isfinite(logits).all(-1).tolist()
    if all(are_finite):
        return _sample(logits, rows)
    kept = [i for i, is_finite in enumerate(are_finite) if is_finite]
    each = iter(_sample(logits[kept], [rows[i] for i in kept]))
    return tuple(next(each) if is_finite else None for is_finite in are_finite)


def _sample(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Sampled, ...]:
    if not rows:
        return ()
    chosen = _choose(_adjusted(logits, rows), rows)
    reported = _reports(logits, rows, chosen)
    return tuple(reported.get(i, Sampled(token)) for i, token in enumerate(chosen))


def _adjusted(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    if not any(row.params.logit_bias or row.params.has_penalties for row in rows):
        return logits
    return kernels.adjust(logits, _bias(rows, logits.device), _penalties(rows, logits.device))


def _bias(rows: Sequence[SampleRow], device: torch.device) -> kernels.Bias:
    entries = [(i, *pair) for i, row in enumerate(rows) for pair in row.params.logit_bias]
    places, ids, values = zip(*entries, strict=True) if entries else ((), (), ())
    return kernels.Bias(_ints(places, device), _ints(ids, device), _floats(values, device))


def _penalties(rows: Sequence[SampleRow], device: torch.device) -> kernels.Penalties:
    entries = [
        (i, token, row.params.repeat_penalty, _offset(row.params, count))
        for i, row in enumerate(rows)
        if row.params.has_penalties
        for token, count in Counter(row.recent).items()
    ]
    places, ids, repeat, offset = zip(*entries, strict=True) if entries else ((), (), (), ())
    return kernels.Penalties(
        _ints(places, device), _ints(ids, device), _floats(repeat, device), _floats(offset, device)
    )


def _offset(params: SamplingParams, count: int) -> float:
    return count * params.frequency_penalty + params.presence_penalty


def _choose(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Rows that rank all tokens go apart from those that rank a few: the array is as wide as its
    widest row."""
    chosen = [int(token) for token in kernels.greedy(logits).tolist()]
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    few = [i for i in drawn if rows[i].params.top_k > 0]
    every = [i for i in drawn if rows[i].params.top_k <= 0]
    for places in (few, every):
        if places:
            tokens = kernels.choose(logits[places], _filters([rows[i] for i in places]))
            chosen = _placed(chosen, places, tokens.tolist())
    return chosen


def _placed(chosen: list[int], places: list[int], tokens: list[int]) -> list[int]:
    update = dict(zip(places, tokens, strict=True))
    return [update.get(i, token) for i, token in enumerate(chosen)]


def _filters(rows: Sequence[SampleRow]) -> kernels.Filters:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    params = [row.params for row in rows]
    return kernels.Filters(
        top_n_sigma=column([p.top_n_sigma for p in params]),
        top_k=torch.tensor([p.top_k for p in params]),
        typical_p=column([p.typical_p for p in params]),
        top_p=column([p.top_p for p in params]),
        min_p=column([p.min_p for p in params]),
        temperature=column([p.temperature for p in params]),
        draw=column([row.draw for row in rows]),
    )


def _reports(logits: Tensor, rows: Sequence[SampleRow], chosen: list[int]) -> dict[int, Sampled]:
    """The rows that report log-probabilities, from the raw logits."""
    wanted = [i for i, row in enumerate(rows) if row.params.num_logprobs is not None]
    if not wanted:
        return {}
    logprobs = torch.log_softmax(logits[wanted], -1)
    size = logits.shape[-1]
    counts = [min(rows[i].params.num_logprobs or 0, size) for i in wanted]
    ranked, ids = kernels.best(logprobs, torch.tensor(counts).clamp(min=1))
    values, tokens = ranked.tolist(), ids.tolist()
    return {
        i: Sampled(
            chosen[i],
            float(logprobs[n, chosen[i]]),
            tuple(zip(tokens[n][: counts[n]], values[n][: counts[n]], strict=True)),
        )
        for n, i in enumerate(wanted)
    }


def _ints(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)


def _floats(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device)
