"""Adapters in the forward pass: what each row gets, alone and in company."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve

from harness.backends import CASES, CLOSE, KINDS, SAME, Kind
from harness.cpu_models import random_cpu
from harness.native import isas
from harness.torch_adapters import Loaded, Mix, loaded, merged_backend, random_adapter
from harness.torch_models import (
    ODD,
    PLAIN,
    SPECS,
    WINDOWED,
    Driver,
    greedy,
    random_backend,
    random_prompt,
)
from kvtrio.backends.base import BackendError
from kvtrio.core.batch import Batch
from kvtrio.core.identity import AdapterUse

PROMPT = random_prompt(Random(1), 50)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each backend in turn."""
    return KINDS[request.param]


def answer(on: Loaded, mix: Mix, size: int = 64, prompt: Sequence[int] = PROMPT) -> torch.Tensor:
    """Log-probabilities behind each piece of ``size`` tokens, of a request that runs alone."""
    driver = Driver(on.backend)
    pieces = [(i, list(prompt[i : i + size])) for i in range(0, len(prompt), size)]
    return torch.cat([driver.logprobs(on.chunk(driver, 0, piece, mix)) for piece in pieces])


def plain_answer(backend: Any, size: int = 64) -> torch.Tensor:
    return answer(loaded(backend), (), size)


@pytest.mark.parametrize("scale", [1.0, 0.3, -0.7, 1e-3])
@pytest.mark.parametrize(("on", "name"), CASES)
def test_an_adapter_equals_changed_weights(on, name, scale):
    """Whatever the scale, all matrices and the head get what merging into the weights gives."""
    model, make = KINDS[on].models[name], KINDS[on].make
    data = random_adapter(model, 1)
    expected = plain_answer(merged_backend(model, [(data, scale)]), 17)
    base = plain_answer(make(model), 17)
    out = answer(loaded(make(model), data), [(data, scale)], 17)
    torch.testing.assert_close(out, expected, **CLOSE)
    assert (out - base).abs().max() > 100 * (out - expected).abs().max() or scale == 1e-3


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", KINDS["cpu"].models)
def test_every_instruction_set_adds_adapters(name, isa):
    """The same on each set of kernels."""
    model = KINDS["cpu"].models[name]
    data = random_adapter(model, 1)
    expected = plain_answer(merged_backend(model, [(data, -0.7)]), 17)
    on = loaded(random_cpu(model, isa), data)
    torch.testing.assert_close(answer(on, [(data, -0.7)], 17), expected, **CLOSE)


@pytest.mark.parametrize(
    "matrix",
    ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output"],
)
def test_each_matrix_alone(kind, matrix):
    """One matrix or part of a stacked one changes, its neighbours do not; the head's change leaves
    the embedding alone."""
    data = random_adapter(WINDOWED, 2, only=[matrix])
    expected = plain_answer(merged_backend(WINDOWED, [(data, 1.0)]))
    out = answer(loaded(kind.make(WINDOWED), data), [(data, 1.0)])
    torch.testing.assert_close(out, expected, **CLOSE)


def test_adapters_add_up(kind):
    """Three at once equal the sum of their changes; one of them has other targets."""
    mix = [(random_adapter(ODD, 1), 0.5), (random_adapter(ODD, 2, 7), -0.4)]
    mix += [(random_adapter(ODD, 3, only=["attn_v", "ffn_up"]), 1.5)]
    on = loaded(kind.make(ODD), *(data for data, _ in mix))
    expected = plain_answer(merged_backend(ODD, mix))
    torch.testing.assert_close(answer(on, mix), expected, **CLOSE)


def test_one_adapter_twice_in_a_set(kind):
    """Two scales of one adapter are two entries, which add up."""
    data = random_adapter(PLAIN, 1)
    mix = [(data, 0.25), (data, 0.5)]
    expected = plain_answer(merged_backend(PLAIN, mix))
    torch.testing.assert_close(answer(loaded(kind.make(PLAIN), data), mix), expected, **CLOSE)


def test_scale_zero_is_the_base(kind):
    """A zero that reaches the backend all the same changes not a bit."""
    data = random_adapter(PLAIN, 1)
    on = loaded(kind.make(PLAIN), data)
    expected = answer(on, ())
    driver = Driver(on.backend)
    use = AdapterUse(on.handles[data.digest], data.digest, 0.0)
    chunk = evolve(driver.chunk(0, 0, PROMPT), adapters=(use,))
    torch.testing.assert_close(driver.logprobs(chunk), expected, **SAME)


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_chunking_does_not_change_the_logits(backend, name):
    """A prompt under two adapters gives the same in pieces of 1, 7 and as a whole."""
    kind = KINDS[backend]
    model = kind.models[name]
    mix = [(random_adapter(model, 1), 0.5), (random_adapter(model, 2), 1.0)]
    on = loaded(kind.make(model), *(data for data, _ in mix))
    whole = answer(on, mix)[-1]
    for size in (1, 7):
        out = answer(on, mix, size)[-1]
        torch.testing.assert_close(out, whole, **kind.alike_in(name))


def test_the_order_of_a_set_does_not_matter(kind):
    """Changes are added in the order of digests, so the bits are the same."""
    mix = [(random_adapter(PLAIN, seed), 0.1 + seed) for seed in (1, 2, 3)]
    on = loaded(kind.make(PLAIN), *(data for data, _ in mix))
    results = []
    for uses in (on.uses(mix), on.uses(mix)[::-1]):
        driver = Driver(on.backend)
        results.append(driver.logprobs(evolve(driver.chunk(0, 0, PROMPT), adapters=uses)))
    torch.testing.assert_close(*results, **SAME)


def mixes(kind: Kind, name: str) -> tuple[Loaded, list[Mix]]:
    """Base, a, b, a + b, and others, on one backend."""
    model = kind.models[name]
    a, b, c = (random_adapter(model, seed, rank) for seed, rank in ((1, 4), (2, 16), (3, 1)))
    # A state carries a rounding of K and V on: those models are compared in float32.
    usual = kind.usual if name in SPECS else {}
    on = loaded(kind.make(model, **usual), a, b, c)
    return on, [
        (), [(a, 0.5)], [(b, 1.0)], [(a, 0.5), (b, 1.0)], (), [(a, 1.5)], [(c, -1.0), (a, 0.5)],
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_base_rows_keep_their_bits_in_company(dtype):
    """Neighbours with adapters change nothing in a row without one, not even a rounding."""
    data = random_adapter(PLAIN, 1)
    on = loaded(random_backend(PLAIN, dtype=dtype), data)
    results = []
    for other in ((), [(data, 1.0)]):
        driver = Driver(on.backend)
        for piece in ((0, PROMPT[:20]), (20, PROMPT[20:21])):
            rows = driver.logprobs(
                on.chunk(driver, 0, piece, ()),
                on.chunk(driver, 1, piece, other),
                on.chunk(driver, 2, piece, ()),
            )
            results.append(rows[[0, 2]])
    torch.testing.assert_close(results[0], results[2], **SAME)
    torch.testing.assert_close(results[1], results[3], **SAME)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_rows_of_a_mixed_batch_equal_rows_alone(backend, name):
    """Any mix in one step: each request gets the log-probabilities of its own cold run."""
    kind = KINDS[backend]
    on, sets = mixes(kind, name)
    rng = Random(4)
    prompts = [random_prompt(rng, length) for length in (1, 2, 40, 41, 60, 17, 33)]
    cuts = [0, 1, 39, 10, 59, 0, 32]
    alone = [answer(on, mix, 64, p)[-1] for mix, p in zip(sets, prompts, strict=True)]
    driver = Driver(on.backend, rng)
    for i, cut in enumerate(cuts):
        if cut:
            driver.logprobs(on.chunk(driver, i, (0, prompts[i][:cut]), sets[i]))
    pieces = [on.chunk(driver, i, (cut, prompts[i][cut:]), sets[i]) for i, cut in enumerate(cuts)]
    out = driver.logprobs(*pieces)
    torch.testing.assert_close(out, torch.stack(alone), **kind.alike_in(name))


def cold(on: Loaded, mix: Mix, count: int) -> list[int]:
    """Greedy tokens of ``PROMPT`` under ``mix``, alone."""
    driver, tokens = Driver(on.backend), list(PROMPT)
    start = 0
    while len(tokens) < len(PROMPT) + count:
        (token,) = driver.tokens(on.chunk(driver, 0, (start, tokens[start:]), mix))
        assert token is not None
        start = len(tokens)
        tokens.append(token)
    return tokens[len(PROMPT) :]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_requests_with_all_mixes_answer_as_alone(backend, name):
    """The same prompt under seven sets, side by side: the ids of seven cold runs."""
    kind = KINDS[backend]
    on, sets = mixes(kind, name)
    expected = [cold(on, mix, 12) for mix in sets]
    assert expected[0] == expected[4]
    # The random model with clamped experts answers alike under some of the sets.
    assert len({tuple(tokens) for tokens in expected}) == (4 if name == "biased" else 6)
    driver = Driver(on.backend, Random(5))
    answers: list[list[int]] = [[] for _ in sets]
    pieces = [(0, PROMPT)] * len(sets)
    for _ in range(12):
        chunks = [on.chunk(driver, i, pieces[i], mix) for i, mix in enumerate(sets)]
        for tokens, token in zip(answers, driver.tokens(*chunks), strict=True):
            assert token is not None
            tokens.append(token)
        pieces = [(len(PROMPT) + len(tokens) - 1, tokens[-1:]) for tokens in answers]
    assert answers == expected


def test_rows_that_are_not_sampled_do_not_shift_the_head(kind):
    """An adapter of the head meets its own row, wherever it is among the sampled ones."""
    data = random_adapter(PLAIN, 1, only=["output"])
    on = loaded(kind.make(PLAIN), data)
    expected = torch.stack([answer(on, mix)[-1] for mix in ((), [(data, 1.0)])])
    driver = Driver(on.backend)
    chunks = [
        evolve(on.chunk(driver, 0, (0, PROMPT), [(data, 1.0)]), sample=None),
        on.chunk(driver, 1, (0, PROMPT), ()),
        evolve(on.chunk(driver, 2, (0, PROMPT), ()), sample=None),
        on.chunk(driver, 3, (0, PROMPT), [(data, 1.0)]),
    ]
    torch.testing.assert_close(driver.logprobs(*chunks), expected, **kind.alike)


def test_a_set_may_begin_in_the_middle(kind):
    """Base up to a position, an adapter from there on: the same in any chunking, unlike both."""
    data = random_adapter(PLAIN, 1)
    on = loaded(kind.make(PLAIN), data)
    mix: Mix = [(data, 1.0)]

    def switched(size: int) -> torch.Tensor:
        driver = Driver(on.backend)
        for start, end, uses in ((0, 30, ()), (30, 50, mix)):
            for first in range(start, end, size):
                piece = (first, PROMPT[first : min(first + size, end)])
                row = driver.logprobs(on.chunk(driver, 0, piece, uses))
        return row

    whole = switched(50)
    torch.testing.assert_close(switched(7), whole, **kind.alike)
    for other in ((), mix):
        assert (answer(on, other)[-1] - whole).abs().max() > 0.05


def test_bfloat16_is_as_close_with_an_adapter_as_without():
    """The change is added in float32, so adapters cost bfloat16 no accuracy of their own."""
    data = random_adapter(PLAIN, 1)
    errors = []
    for mix in ((), [(data, 0.5)]):
        wide = answer(loaded(random_backend(PLAIN), data), mix, 5)
        narrow = answer(loaded(random_backend(PLAIN, dtype="bf16"), data), mix, 5)
        errors.append(float((wide - narrow).square().mean().sqrt()))
    assert errors[1] < 2 * errors[0] < 0.2


def test_handles_are_never_given_out_again(kind):
    """A stale handle must not mean another adapter."""
    backend = kind.make(PLAIN)
    one = backend.load_adapter(random_adapter(PLAIN, 1))
    backend.unload_adapter(one)
    two = backend.load_adapter(random_adapter(PLAIN, 1))
    assert one != two
    driver = Driver(backend)
    use = AdapterUse(one, bytes(32), 1.0)
    with pytest.raises(KeyError):
        backend.step(Batch(0, (evolve(driver.chunk(0, 0, PROMPT), adapters=(use,)),)))
    with pytest.raises(KeyError):
        backend.unload_adapter(one)


def test_loading_others_meanwhile_changes_no_stream(kind):
    """A larger rank, more targets and a misfit arrive while a request decodes: same ids."""
    a = random_adapter(PLAIN, 1, 2, only=["attn_q", "attn_v"])
    on = loaded(kind.make(PLAIN), a)
    expected = cold(on, [(a, 1.0)], 8)
    driver, tokens, start = Driver(on.backend), list(PROMPT), 0
    for i in range(8):
        (token,) = driver.tokens(on.chunk(driver, 0, (start, tokens[start:]), [(a, 1.0)]))
        assert token is not None
        start = len(tokens)
        tokens.append(token)
        other = on.backend.load_adapter(random_adapter(PLAIN, 10 + i, 64))
        with pytest.raises(BackendError, match="another model"):
            on.backend.load_adapter(random_adapter(WINDOWED, 20))
        if i % 2:
            on.backend.unload_adapter(other)
    assert tokens[len(PROMPT) :] == expected


def test_the_base_is_the_same_after_adapters_came_and_went(kind):
    """Base weights are never written to."""
    backend = kind.make(WINDOWED)
    before = greedy(Driver(backend), 0, PROMPT, 8)
    data = random_adapter(WINDOWED, 1)
    on = loaded(backend, data)
    assert cold(on, [(data, 3.0)], 8) != before
    assert greedy(Driver(backend), 0, PROMPT, 8) == before
    backend.unload_adapter(on.handles[data.digest])
    assert greedy(Driver(backend), 0, PROMPT, 8) == before
