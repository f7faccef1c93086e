"""The cuda backend, in Triton's interpreter, says what the torch backend says."""

from random import Random

import pytest
import torch
from attrs import evolve

from harness.cuda_models import random_cuda, same_torch
from harness.torch_adapters import loaded, random_adapter
from harness.torch_models import (
    CONV,
    DELTA,
    MAMBA_SCALED,
    ODD,
    PLAIN,
    WINDOWED,
    Driver,
    greedy,
    layer,
    random_prompt,
    spec,
)
from kvtrio.model.spec import Temperature

UNUSUAL = spec(
    layer(0, sinks=True),
    evolve(layer(1, temperature=Temperature(scale=0.5, length=8)), parallel=True),
    evolve(layer(2, qk_norm=True, joint_norm=True, post_norms=True), pre_norms=False),
    layer(3, 7, sinks=True),
)
pytestmark = pytest.mark.slow  # each program of a grid runs in Python

MODELS = {
    "windowed": WINDOWED,
    "odd": ODD,
    "unusual": UNUSUAL,
    "delta": DELTA,
    "conv": CONV,
    "mamba": MAMBA_SCALED,
}
CLOSE = {"rtol": 0.0, "atol": 2e-4}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_reference(name):
    """Of a mixed step behind a prompt: a chunk, decoding rows, a newcomer."""
    model = MODELS[name]
    drivers = [Driver(make(model), Random(5)) for make in (random_cuda, same_torch)]
    rng = Random(1)
    prompts = [random_prompt(rng, length) for length in (17, 2)]
    more, new = random_prompt(rng, 3), random_prompt(rng, 2)
    results = []
    for driver in drivers:
        driver.logprobs(driver.chunk(1, 0, prompts[0]), driver.chunk(2, 0, prompts[1]))
        chunks = (
            driver.chunk(1, 17, more),
            driver.chunk(2, 2, [7]),
            driver.chunk(3, 0, new),
        )
        results.append(driver.logprobs(*chunks))
    torch.testing.assert_close(*results, **CLOSE)


def test_ids_are_those_of_the_reference():
    """Token after token."""
    prompt = random_prompt(Random(2), 12)
    ids = [greedy(Driver(make(PLAIN)), 1, prompt, 4) for make in (random_cuda, same_torch)]
    assert ids[0] == ids[1]


def test_adapters_are_added_as_the_reference_adds_them():
    """Rows with none, one and two of them in one step, and none left after unloading."""
    adapters = [random_adapter(PLAIN, seed) for seed in (1, 2)]
    mixes = [(), ((adapters[0], 0.5),), ((adapters[0], 1.0), (adapters[1], 0.7))]
    results = []
    for make in (random_cuda, same_torch):
        backend = make(PLAIN)
        own, driver = loaded(backend, *adapters), Driver(backend)
        chunks = [
            own.chunk(driver, i, (0, list(range(3, 6 + i))), mix) for i, mix in enumerate(mixes)
        ]
        results.append(driver.logprobs(*chunks))
        for handle in own.handles.values():
            backend.unload_adapter(handle)
        with pytest.raises(KeyError):
            driver.logprobs(chunks[1])
    torch.testing.assert_close(*results, **CLOSE)
