"""From requests' sampling settings to tokens."""

from random import Random

import pytest
import torch

from kvtrio.backends.torch_sampling import sample_rows
from kvtrio.core.batch import Sampled, SampleRow
from kvtrio.core.sampling import SamplingParams


def row(draw: float = 0.0, recent: tuple[int, ...] = (), **params: object) -> SampleRow:
    return SampleRow(SamplingParams(**params), draw, recent)  # type: ignore[arg-type]


def chosen(logits: list[float], one: SampleRow) -> int:
    (sampled,) = sample_rows(torch.tensor([logits]), (one,))
    return sampled.token_id


def test_no_rows_need_no_logits():
    """A step that only computes prompt samples nothing."""
    assert sample_rows(torch.empty(0, 8), ()) == ()


def test_temperature_zero_takes_the_best_after_bias_and_penalties():
    """Greedy is decided after the edits, and its other filters and its draw do not matter."""
    logits = [1.0, 3.0, 2.0, 2.0]
    assert chosen(logits, row(0.99, temperature=0.0)) == 1
    assert chosen(logits, row(temperature=0.0, logit_bias=((0, 2.5),))) == 0
    assert chosen(logits, row(temperature=0.0, logit_bias=((1, float("-inf")),))) == 2
    assert chosen(logits, row(recent=(1,), temperature=0.0, repeat_penalty=2.0)) == 2


def test_frequency_counts_and_presence_does_not():
    """Each occurrence costs the frequency penalty; being there at all costs presence once."""
    logits, recent = [5.0, 4.0], (0, 0, 0)
    assert chosen(logits, row(recent=recent, temperature=0.0, frequency_penalty=0.3)) == 0
    assert chosen(logits, row(recent=recent, temperature=0.0, frequency_penalty=0.4)) == 1
    assert chosen(logits, row(recent=recent, temperature=0.0, presence_penalty=0.9)) == 0
    assert chosen(logits, row(recent=recent, temperature=0.0, presence_penalty=1.1)) == 1


def test_penalties_that_are_off_ignore_recent_tokens():
    """Recent tokens without a penalty change nothing."""
    assert chosen([5.0, 4.9], row(recent=(0,) * 9, temperature=0.0)) == 0


def test_logprobs_come_only_where_asked():
    """None reports nothing; 0 reports the chosen token alone; n adds the best n."""
    logits = torch.tensor([[0.0, 1.0, 1.0]] * 3)
    rows = [row(temperature=0.0, num_logprobs=n) for n in (None, 0, 2)]
    expected = torch.log_softmax(logits, -1)[0].tolist()
    nothing, alone, best = sample_rows(logits, rows)
    assert nothing == Sampled(1)
    assert alone == Sampled(1, pytest.approx(expected[1]))
    assert [token for token, _ in best.top] == [1, 2]
    assert best.top[0][1] == pytest.approx(expected[1])


def test_more_logprobs_than_tokens_report_all():
    """A vocabulary smaller than what was asked for is reported whole."""
    (sampled,) = sample_rows(torch.tensor([[0.0, 2.0, 1.0]]), (row(num_logprobs=20),))
    assert [token for token, _ in sampled.top] == [1, 2, 0]


def random_row(rng: Random) -> SampleRow:
    return row(
        rng.random(),
        tuple(rng.randrange(5000) for _ in range(rng.randrange(40))),
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 1, 40, 3000]),
        top_p=rng.choice([0.5, 0.95, 1.0]),
        min_p=rng.choice([0.0, 0.05]),
        typical_p=rng.choice([0.7, 1.0]),
        top_n_sigma=rng.choice([-1.0, 1.5]),
        repeat_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        logit_bias=((rng.randrange(5000), 3.0),) if rng.random() < 0.5 else (),
        num_logprobs=rng.choice([None, 0, 5]),
    )


def test_a_row_is_the_same_alone_and_in_any_company():
    """Tokens and reports of a mixed batch equal those of each row alone, bit for bit."""
    rng = Random(5)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(12, 5000, generator=generator) * 3
    rows = [random_row(rng) for _ in range(12)]
    alone = tuple(sample_rows(logits[i : i + 1], rows[i : i + 1])[0] for i in range(12))
    assert sample_rows(logits, rows) == alone
    order = list(range(12))
    rng.shuffle(order)
    assert sample_rows(logits[order], [rows[i] for i in order]) == tuple(alone[i] for i in order)
