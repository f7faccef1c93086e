"""What must not change an answer: chunking, company, and where blocks lie."""

from collections.abc import Sequence
from random import Random

import pytest
import torch

from harness.torch_models import (
    MODELS,
    PLAIN,
    Driver,
    greedy,
    load,
    random_backend,
    random_prompt,
)

pytestmark = pytest.mark.slow
CLOSE = {"rtol": 0.0, "atol": 1e-4}


def chunked(driver: Driver, request: int, prompt: Sequence[int], size: int) -> torch.Tensor:
    """Log-probabilities behind a prompt that was computed ``size`` tokens at a time."""
    for start in range(0, len(prompt), size):
        piece = prompt[start : start + size]
        out = driver.logprobs(driver.chunk(request, start, piece))
    driver.leave(request)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_chunking_does_not_change_the_logits(name):
    """A prompt of 300 tokens gives the same in chunks of 1, 7, 64 and as a whole."""
    prompt = random_prompt(Random(1), 300)
    driver = Driver(random_backend(MODELS[name]))
    whole = chunked(driver, 0, prompt, 300)
    for size in (1, 7, 64):
        torch.testing.assert_close(chunked(driver, size, prompt, size), whole, **CLOSE)


@pytest.mark.parametrize("block_size", [1, 5, 32])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_any_size_anywhere(name, block_size):
    """Scattered tables, different in each group, and other block sizes change nothing."""
    prompt = random_prompt(Random(2), 90)
    expected = chunked(Driver(random_backend(MODELS[name])), 0, prompt, 90)
    backend = random_backend(MODELS[name], block_size=block_size)
    out = chunked(Driver(backend, Random(3)), 0, prompt, 31)
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_mixed_batch_equal_rows_alone(name):
    """Decode rows and prefill chunks in one step get what each gets alone."""
    rng = Random(4)
    driver = Driver(random_backend(MODELS[name]), rng)
    prompts = [random_prompt(rng, length) for length in (1, 2, 40, 41, 120, 17, 64, 33)]
    cuts = [0, 1, 39, 10, 119, 0, 32, 32]
    alone = [chunked(driver, 100 + i, prompt, 300)[0] for i, prompt in enumerate(prompts)]
    for i, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True)):
        if cut:
            driver.logprobs(driver.chunk(i, 0, prompt[:cut]))
    pieces = [driver.chunk(i, cut, prompts[i][cut:]) for i, cut in enumerate(cuts)]
    torch.testing.assert_close(driver.logprobs(*pieces), torch.stack(alone), **CLOSE)


def follow(driver: Driver, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """All requests together, greedily: one step each for the prompts, then token by token."""
    answers: list[list[int]] = [[] for _ in prompts]
    pieces = [driver.chunk(i, 0, prompt) for i, prompt in enumerate(prompts)]
    for _ in range(count):
        for answer, token in zip(answers, driver.tokens(*pieces), strict=True):
            assert token is not None
            answer.append(token)
        pieces = [
            driver.chunk(i, len(prompts[i]) + len(answer) - 1, answer[-1:])
            for i, answer in enumerate(answers)
        ]
    return answers


@pytest.mark.parametrize("name", MODELS)
def test_eight_requests_together_answer_as_alone(name):
    """Concurrent greedy requests get the same ids as one after the other."""
    rng = Random(5)
    prompts = [random_prompt(rng, rng.randrange(1, 60)) for _ in range(8)]
    backend = random_backend(MODELS[name])
    alone = [greedy(Driver(backend), 0, prompt, 24) for prompt in prompts]
    assert follow(Driver(backend, rng), prompts, 24) == alone


@pytest.mark.parametrize("name", MODELS)
def test_joining_and_leaving_changes_nobody(name):
    """For 200 steps requests join, prefill in pieces, decode and leave; blocks are used again."""
    rng = Random(6)
    backend = random_backend(MODELS[name], num_blocks=64)
    prompts = [random_prompt(rng, rng.randrange(1, 50)) for _ in range(6)]
    expected = [greedy(Driver(backend), 0, prompt, 30) for prompt in prompts]
    driver = Driver(backend, rng)
    tokens: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    num_left = 0
    for _ in range(200):
        for i in range(6):
            if i not in tokens and rng.random() < 0.2:
                tokens[i], computed[i] = list(prompts[i]), 0
        taking = [i for i in tokens if rng.random() < 0.8]
        sizes = {i: rng.randint(1, min(20, len(tokens[i]) - computed[i])) for i in taking}
        pieces = [
            driver.chunk(i, computed[i], tokens[i][computed[i] : computed[i] + sizes[i]])
            for i in taking
        ]
        for i, token in zip(taking, driver.tokens(*pieces) if pieces else [], strict=True):
            computed[i] += sizes[i]
            if computed[i] == len(tokens[i]):
                assert token is not None
                tokens[i].append(token)
            answer = tokens[i][len(prompts[i]) :]
            assert answer == expected[i][: len(answer)]
            if len(answer) == 30 or rng.random() < 0.03:
                del tokens[i], computed[i]
                driver.leave(i)
                num_left += 1
    assert num_left > 10


def test_a_reused_block_shows_nothing_of_its_last_owner():
    """Blocks given back and taken again hold only what the new request wrote."""
    rng = Random(7)
    driver = Driver(random_backend(PLAIN, num_blocks=8))
    prompt = random_prompt(rng, 33)
    expected = chunked(driver, 0, prompt, 33)
    for i in range(1, 4):
        chunked(driver, i, random_prompt(rng, 128), 64)
        torch.testing.assert_close(chunked(driver, 9, prompt, 33), expected, rtol=0.0, atol=0.0)


@pytest.mark.models
def test_chunking_a_real_prompt(smollm2):
    """SmolLM2 gives the same for 300 tokens in chunks of 7, 64 and as a whole."""
    driver = Driver(load(smollm2))
    prompt = random_prompt(Random(8), 300, driver.backend.info.vocab_size)
    whole = chunked(driver, 0, prompt, 300)
    for size in (7, 64):
        torch.testing.assert_close(chunked(driver, size, prompt, size), whole, rtol=0.0, atol=2e-4)


@pytest.mark.models
def test_eight_real_requests_answer_as_alone(smollm2):
    """Eight different prompts to SmolLM2 get the same ids together as alone."""
    rng = Random(9)
    backend = load(smollm2)
    prompts = [random_prompt(rng, rng.randrange(2, 60), 40000) for _ in range(8)]
    alone = [greedy(Driver(backend), 0, prompt, 6) for prompt in prompts]
    assert follow(Driver(backend, rng), prompts, 6) == alone
