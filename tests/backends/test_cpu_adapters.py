"""Adapters on the cpu backend: what each row gets, alone and in company."""

from random import Random

import pytest
import torch
from attrs import evolve

from harness.cpu_models import random_cpu
from harness.native import isas
from harness.torch_adapters import Loaded, Mix, loaded, merged_backend, random_adapter
from harness.torch_models import (
    ODD,
    PLAIN,
    RECURRENT,
    SPECS,
    WINDOWED,
    Driver,
    greedy,
    random_prompt,
)
from kvtrio.backends.base import BackendError
from kvtrio.core.batch import Batch
from kvtrio.core.identity import AdapterUse

CLOSE = {"rtol": 0.0, "atol": 1e-4}
SAME = {"rtol": 0.0, "atol": 0.0}
PROMPT = random_prompt(Random(1), 50)


def answer(on: Loaded, mix: Mix, size: int = 64, prompt: list[int] = PROMPT) -> torch.Tensor:
    """Log-probabilities behind each piece of ``size`` tokens, of a request that runs alone."""
    driver = Driver(on.backend)
    pieces = [(i, list(prompt[i : i + size])) for i in range(0, len(prompt), size)]
    return torch.cat([driver.logprobs(on.chunk(driver, 0, piece, mix)) for piece in pieces])


def cold(on: Loaded, mix: Mix, count: int) -> list[int]:
    """Greedy tokens of ``PROMPT`` under ``mix``, alone."""
    driver, tokens, start = Driver(on.backend), list(PROMPT), 0
    while len(tokens) < len(PROMPT) + count:
        (token,) = driver.tokens(on.chunk(driver, 0, (start, tokens[start:]), mix))
        assert token is not None
        start = len(tokens)
        tokens.append(token)
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", SPECS | RECURRENT)
def test_an_adapter_equals_changed_weights(name, isa):
    """All matrices and the head get what merging into the reference's weights gives."""
    model = (SPECS | RECURRENT)[name]
    data = random_adapter(model, 1)
    expected = answer(loaded(merged_backend(model, [(data, -0.7)])), (), 17)
    on = loaded(random_cpu(model, isa), data)
    torch.testing.assert_close(answer(on, [(data, -0.7)], 17), expected, **CLOSE)
    assert (answer(on, (), 17) - expected).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up",
                                  "ffn_down", "output"])  # fmt: skip
def test_each_matrix_alone(kind):
    """One matrix changes, its neighbours do not; the head's change leaves the embedding alone."""
    data = random_adapter(WINDOWED, 2, only=[kind])
    expected = answer(loaded(merged_backend(WINDOWED, [(data, 1.0)])), ())
    out = answer(loaded(random_cpu(WINDOWED), data), [(data, 1.0)])
    torch.testing.assert_close(out, expected, **CLOSE)


def test_adapters_add_up():
    """Three at once equal the sum of their changes; one of them twice, one with other targets."""
    one, two, three = (random_adapter(ODD, 1), random_adapter(ODD, 2, 7),
                       random_adapter(ODD, 3, only=["attn_v", "ffn_up"]))  # fmt: skip
    mix = [(one, 0.5), (one, 0.25), (two, -0.4), (three, 1.5)]
    expected = answer(loaded(merged_backend(ODD, mix)), ())
    out = answer(loaded(random_cpu(ODD), one, two, three), mix)
    torch.testing.assert_close(out, expected, **CLOSE)


def test_scale_zero_is_the_base():
    """A zero that reaches the backend all the same changes not a bit."""
    data = random_adapter(PLAIN, 1)
    on = loaded(random_cpu(PLAIN), data)
    expected = answer(on, ())
    driver = Driver(on.backend)
    use = AdapterUse(on.handles[data.digest], data.digest, 0.0)
    out = driver.logprobs(evolve(driver.chunk(0, 0, PROMPT), adapters=(use,)))
    torch.testing.assert_close(out, expected, **SAME)


def test_the_order_of_a_set_does_not_matter():
    """Changes are added in the order of digests, so the bits are the same."""
    mix = [(random_adapter(PLAIN, seed), 0.1 + seed) for seed in (1, 2, 3)]
    on = loaded(random_cpu(PLAIN), *(data for data, _ in mix))
    results = []
    for uses in (on.uses(mix), on.uses(mix)[::-1]):
        driver = Driver(on.backend)
        results.append(driver.logprobs(evolve(driver.chunk(0, 0, PROMPT), adapters=uses)))
    torch.testing.assert_close(*results, **SAME)


@pytest.mark.parametrize("name", SPECS)
def test_chunking_changes_no_bit(name):
    """A prompt under two adapters gives the same in pieces of 1, 7 and as a whole."""
    model = SPECS[name]
    mix = [(random_adapter(model, 1), 0.5), (random_adapter(model, 2), 1.0)]
    on = loaded(random_cpu(model), *(data for data, _ in mix))
    whole = answer(on, mix)[-1]
    for size in (1, 7):
        torch.testing.assert_close(answer(on, mix, size)[-1], whole, **SAME)


def mixes(model) -> tuple[Loaded, list[Mix]]:
    """Base, a, b, a + b, and others, on one backend."""
    a, b, c = (random_adapter(model, seed, rank) for seed, rank in ((1, 4), (2, 16), (3, 1)))
    on = loaded(random_cpu(model, key_type="f16", value_type="f16"), a, b, c)
    return on, [
        (), [(a, 0.5)], [(b, 1.0)], [(a, 0.5), (b, 1.0)], (), [(a, 1.5)], [(c, -1.0), (a, 0.5)],
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_rows_of_a_mixed_batch_get_the_bits_of_rows_alone(name):
    """Any mix of adapters in one step: each request gets what its own cold run gets."""
    on, sets = mixes(SPECS[name])
    rng = Random(4)
    prompts = [random_prompt(rng, length) for length in (1, 2, 40, 41, 60, 17, 33)]
    cuts = [0, 1, 39, 10, 59, 0, 32]
    alone = [answer(on, mix, 64, p)[-1] for mix, p in zip(sets, prompts, strict=True)]
    driver = Driver(on.backend, rng)
    for i, cut in enumerate(cuts):
        if cut:
            driver.logprobs(on.chunk(driver, i, (0, prompts[i][:cut]), sets[i]))
    pieces = [on.chunk(driver, i, (cut, prompts[i][cut:]), sets[i]) for i, cut in enumerate(cuts)]
    torch.testing.assert_close(driver.logprobs(*pieces), torch.stack(alone), **SAME)


def test_rows_that_are_not_sampled_do_not_shift_the_head():
    """An adapter of the head meets its own row, wherever it is among the sampled ones."""
    data = random_adapter(PLAIN, 1, only=["output"])
    on = loaded(random_cpu(PLAIN), data)
    expected = torch.stack([answer(on, mix)[-1] for mix in ((), [(data, 1.0)])])
    driver = Driver(on.backend)
    chunks = [
        evolve(on.chunk(driver, 0, (0, PROMPT), [(data, 1.0)]), sample=None),
        on.chunk(driver, 1, (0, PROMPT), ()),
        evolve(on.chunk(driver, 2, (0, PROMPT), ()), sample=None),
        on.chunk(driver, 3, (0, PROMPT), [(data, 1.0)]),
    ]
    torch.testing.assert_close(driver.logprobs(*chunks), expected, **SAME)


def test_handles_are_never_given_out_again():
    """A stale handle must not mean another adapter."""
    backend = random_cpu(PLAIN)
    one = backend.load_adapter(random_adapter(PLAIN, 1))
    backend.unload_adapter(one)
    assert backend.load_adapter(random_adapter(PLAIN, 1)) != one
    use = AdapterUse(one, bytes(32), 1.0)
    chunk = evolve(Driver(backend).chunk(0, 0, PROMPT), adapters=(use,))
    with pytest.raises(KeyError):
        backend.step(Batch(0, (chunk,)))
    with pytest.raises(KeyError):
        backend.unload_adapter(one)


def test_loading_others_meanwhile_changes_no_stream():
    """A larger rank, more targets and a misfit arrive while a request decodes: same ids."""
    a = random_adapter(PLAIN, 1, 2, only=["attn_q", "attn_v"])
    on = loaded(random_cpu(PLAIN), a)
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


def test_the_base_is_the_same_after_adapters_came_and_went():
    """Base weights are never written to."""
    backend = random_cpu(WINDOWED)
    before = greedy(Driver(backend), 0, PROMPT, 8)
    data = random_adapter(WINDOWED, 1)
    on = loaded(backend, data)
    assert cold(on, [(data, 3.0)], 8) != before
    assert greedy(Driver(backend), 0, PROMPT, 8) == before
    backend.unload_adapter(on.handles[data.digest])
    assert greedy(Driver(backend), 0, PROMPT, 8) == before


def test_an_adapter_without_room_is_refused(monkeypatch: pytest.MonkeyPatch):
    """With its size and what there is, and nothing changed."""
    backend = random_cpu(PLAIN)
    monkeypatch.setattr("kvtrio.backends.cpu_backend.ram_available", lambda: 1000)
    with pytest.raises(BackendError, match="not enough memory for an adapter"):
        backend.load_adapter(random_adapter(PLAIN, 1, 64))
