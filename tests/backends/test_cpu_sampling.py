"""Sampling from candidates, held against the reference that looks at whole rows."""

from random import Random

import numpy as np
import pytest
import torch

from kvtrio.backends import torch_sampling
from kvtrio.backends.cpu_sampling import MAX_CANDIDATES, Candidates, plan_rows, sample_rows
from kvtrio.core.batch import Sampled, SampleRow
from kvtrio.core.sampling import SamplingParams
from kvtrio.kernels import sampling_numpy as kernels

VOCAB = 5000


def row(draw: float = 0.0, recent: tuple[int, ...] = (), **params: object) -> SampleRow:
    return SampleRow(SamplingParams(**params), draw, recent)  # type: ignore[arg-type]


def candidates(logits: np.ndarray, rows: list[SampleRow]) -> Candidates:
    """What the native side answers: as wide as the widest row, -inf behind the others."""
    counts = [plan.num_candidates for plan in plan_rows(rows, logits.shape[1])]
    width = max(1, *counts)
    values = np.full((len(rows), width), -np.inf, np.float32)
    ids = np.zeros((len(rows), width), np.int32)
    for i, count in enumerate(counts):
        if count:
            values[i, :count], ids[i, :count] = kernels.best(logits[i], count)
    sums = [kernels.log_sum(each) for each in logits]
    return Candidates(values.tolist(), ids.tolist(), sums, logits)


def sampled(logits: np.ndarray, rows: list[SampleRow]) -> tuple[Sampled, ...]:
    return sample_rows(rows, plan_rows(rows, logits.shape[1]), candidates(logits, rows))


def chosen(logits: list[float], one: SampleRow) -> int:
    return sampled(np.array([logits], np.float32), [one])[0].token_id


def random_row(rng: Random) -> SampleRow:
    biases = rng.choice([[3.0, -4.0, -np.inf], [-np.inf]])
    bias = [(rng.randrange(VOCAB), rng.choice(biases)) for _ in range(3)]
    return row(
        rng.random(),
        tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(40))),
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 1, 40, 200, 3000]),
        top_p=rng.choice([0.5, 0.95, 1.0]),
        min_p=rng.choice([0.0, 0.05, 1.0]),
        typical_p=rng.choice([0.7, 1.0]),
        top_n_sigma=rng.choice([-1.0, -1.0, 1.5]),
        repeat_penalty=rng.choice([1.0, 1.3, 0.8]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        presence_penalty=rng.choice([0.0, -0.5]),
        logit_bias=tuple(bias) if rng.random() < 0.5 else (),
        num_logprobs=rng.choice([None, 0, 5, 300]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_rows_get_the_tokens_of_the_reference(step):
    """Hundreds of random settings choose and report what the reference does; with ties too."""
    rng, generator = Random(1), np.random.default_rng(1)
    for _ in range(30):
        logits = generator.normal(0, 3, (12, VOCAB)).astype(np.float32)
        if step:
            logits = np.round(logits / step) * np.float32(step)
        rows = [random_row(rng) for _ in range(12)]
        expected = torch_sampling.sample_rows(torch.from_numpy(logits), rows)
        for mine, reference in zip(sampled(logits, rows), expected, strict=True):
            assert mine.token_id == reference.token_id
            assert mine.logprob == pytest.approx(reference.logprob, abs=1e-5)
            assert [token for token, _ in mine.top] == [token for token, _ in reference.top]
            assert [v for _, v in mine.top] == pytest.approx(
                [v for _, v in reference.top], abs=1e-5
            )


@pytest.mark.slow
def test_a_row_is_the_same_alone_and_in_any_company():
    """Tokens and reports of a mixed batch equal those of each row alone, bit for bit."""
    rng = Random(5)
    logits = np.random.default_rng(5).normal(0, 3, (12, VOCAB)).astype(np.float32)
    rows = [random_row(rng) for _ in range(12)]
    alone = tuple(sampled(logits[i : i + 1], rows[i : i + 1])[0] for i in range(12))
    assert sampled(logits, rows) == alone
    order = list(range(12))
    rng.shuffle(order)
    assert sampled(logits[order], [rows[i] for i in order]) == tuple(alone[i] for i in order)


def test_a_row_asks_for_what_can_decide_it():
    """Greedy needs one, top-k its k; each token that edits could push out of them, one more."""

    def needed(one: SampleRow, vocab: int = VOCAB) -> int:
        return plan_rows([one], vocab)[0].num_candidates

    assert needed(row(temperature=0.0, top_k=40)) == 1
    assert needed(row()) == 40
    assert needed(row(recent=(1, 2, 2), repeat_penalty=2.0, logit_bias=((2, 1.0), (3, 1.0)))) == 43
    assert needed(row(temperature=0.0, num_logprobs=5)) == 5
    assert needed(row(), 24) == 24


def test_a_row_that_depends_on_all_logits_asks_for_none():
    """It is looked at whole: without top-k, with a standard deviation, or with very many."""
    many = MAX_CANDIDATES + 1
    for params in ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"top_n_sigma": 1.0},
                   {"top_k": many}, {"top_k": 0, "repeat_penalty": 1.5}):  # fmt: skip
        assert plan_rows([row(recent=(1,), **params)], VOCAB)[0].num_candidates == 0


def test_all_tokens_are_ranked_only_where_the_best_do_not_decide():
    """Without top-k the other filters leave few of a peaked row, and many of a flat one."""
    one = row(0.7, top_k=0)
    (plan,) = plan_rows([one], VOCAB)
    assert (plan.num_candidates, plan.needs_log_sum) == (MAX_CANDIDATES, True)
    generator = np.random.default_rng(2)
    for width in (3.0, 0.01):
        logits = generator.normal(0, width, (1, VOCAB)).astype(np.float32)
        (expected,) = torch_sampling.sample_rows(torch.from_numpy(logits), [one])
        assert sampled(logits, [one]) == (expected,)
        is_decided = width == 3.0
        found = candidates(logits, [one])
        found.logits[:] = 0.0
        assert (sample_rows([one], [plan], found) == (expected,)) == is_decided


def test_edits_can_bring_a_token_up_and_drop_all_the_best():
    """The best after edits are exact even if none of them was among the best before."""
    logits = [float(-i) for i in range(600)]
    banned = tuple((i, float("-inf")) for i in range(50))
    assert chosen(logits, row(temperature=0.0, logit_bias=banned)) == 50
    assert chosen(logits, row(temperature=0.0, logit_bias=(*banned, (599, 1e4)))) == 599
    assert chosen(logits, row(0.999999, top_k=2, top_p=1.0, min_p=0.0, logit_bias=banned)) == 51
    twice = (*banned, banned[0])
    assert chosen(logits, row(temperature=0.0, logit_bias=twice)) == 50


def test_a_row_whose_every_token_is_banned_ignores_its_bias():
    """As there is nothing else to choose; the penalties stay."""
    ban = tuple((i, float("-inf")) for i in range(4))
    assert chosen([1.0, 3.0, 2.0, 0.0], row(temperature=0.0, logit_bias=ban)) == 1
    one = row(recent=(1,), temperature=0.0, logit_bias=ban, repeat_penalty=2.0)
    assert chosen([1.0, 3.0, 2.0, 0.0], one) == 2


def test_logprobs_come_only_where_asked():
    """None reports nothing; 0 reports the chosen token alone; more than there are report all."""
    logits = np.array([[0.0, 1.0, 1.0]] * 3, np.float32)
    nothing, alone, best = sampled(
        logits, [row(temperature=0.0, num_logprobs=n) for n in (None, 0, 20)]
    )
    expected = torch.log_softmax(torch.from_numpy(logits), -1)[0].tolist()
    assert nothing == Sampled(1)
    assert alone == Sampled(1, pytest.approx(expected[1]))
    assert [token for token, _ in best.top] == [1, 2, 0]
    assert [value for _, value in best.top] == pytest.approx([expected[i] for i in (1, 2, 0)])
