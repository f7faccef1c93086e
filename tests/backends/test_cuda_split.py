"""Layers on several devices answer as all on one, and little travels between those."""

from random import Random

import pytest
import torch

from harness.cuda_models import quantised_file, random_cuda, same_torch
from harness.devices import FakeDevice
from harness.torch_adapters import loaded, random_adapter
from harness.torch_models import (
    PARALLEL,
    PLAIN,
    SHORT_CONV,
    UNNORMED,
    Driver,
    greedy,
    layer,
    random_prompt,
    recurrent_layer,
    settings,
    spec,
)
from kvtrio.backends.base import BackendError
from kvtrio.backends.cuda_backend import CudaBackend
from kvtrio.backends.cuda_split import split_layers
from kvtrio.core.batch import Batch, Copy, Load
from kvtrio.core.types import BlockId, Tier

MIXED = spec(layer(0, 20), recurrent_layer(1, SHORT_CONV), layer(2), layer(3, 20))
"""All kinds of groups; of one there are layers on both of two devices, of the others on one."""
MODELS = {"mixed": MIXED, "parallel": PARALLEL, "unnormed": UNNORMED}
CLOSE = {"rtol": 0.0, "atol": 2e-4}


@pytest.mark.parametrize(
    ("num_layers", "proportions", "counts"),
    [
        (32, (1, 1), (16, 16)),
        (32, (3, 1), (24, 8)),
        (5, (1, 1), (3, 2)),
        (3, (100, 1, 1), (1, 1, 1)),
        (4, (1, 100), (1, 3)),
        (7, (1,), (7,)),
    ],
)
def test_layers_are_shared_out_as_proportions_say(num_layers, proportions, counts):
    """Each device has one at least."""
    assert split_layers(num_layers, proportions) == counts


def test_more_devices_than_layers_are_refused():
    """With both numbers."""
    with pytest.raises(BackendError, match="names 3 GPUs; the model has 2 layers"):
        split_layers(2, (1, 1, 1))


def split(model, num_devices=2, **changes):
    """Two figures that stand for GPUs."""
    devices = [FakeDevice(has_own_memory=False) for _ in range(num_devices)]
    chosen = settings(tensor_split=(1.0,) * num_devices, **changes)
    return CudaBackend.load_on(devices, quantised_file(model), model, chosen), devices


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_reference(name):
    """Whatever crosses the border: of groups with layers on both sides, or on one alone."""
    model = MODELS[name]
    ours, devices = split(model)
    rng, results = Random(1), []
    prompt = random_prompt(rng, 3)
    for backend in (ours, same_torch(model)):
        driver = Driver(backend, Random(5))
        driver.logprobs(driver.chunk(1, 0, prompt))
        results.append(driver.logprobs(driver.chunk(1, 3, [9]), driver.chunk(2, 0, [7])))
    torch.testing.assert_close(*results, **CLOSE)
    # The hidden state once a step; without norms its narrow copy, too.
    assert [device.num_brought for device in devices] == [0, 4 if name == "unnormed" else 2]


@pytest.mark.slow
def test_ids_and_adapters_are_those_of_one_device():
    """Each device has its layers' part of an adapter; three devices, and the head on the last."""
    adapter = random_adapter(PLAIN, 1)
    results = []
    for backend in (split(PLAIN, 3)[0], random_cuda(PLAIN)):
        own, driver = loaded(backend, adapter), Driver(backend)
        chunk = own.chunk(driver, 1, (0, [3, 4]), ((adapter, 0.5),))
        results.append((driver.tokens(chunk), greedy(driver, 2, [5], 2)))
        backend.unload_adapter(own.handles[adapter.digest])
        with pytest.raises(KeyError):
            driver.tokens(chunk)
    assert results[0] == results[1]


@pytest.mark.slow
def test_places_travel_and_are_read_as_on_one_device():
    """To RAM and back, and as bytes that the other arrangement gives and takes."""
    sizes = {"num_blocks": 6, "num_state_slots": 4, "host_bytes": 1 << 18, "is_unified": False}
    found = []
    for backend in (split(MIXED, **sizes)[0], random_cuda(MIXED, **sizes)):
        driver = Driver(backend)
        driver.tokens(driver.chunk(1, 0, [3, 4, 5]))
        groups = range(len(backend.info.groups))
        away = [Copy(i, BlockId(0), BlockId(1), 3, Tier.DEVICE, Tier.HOST) for i in groups]
        back = [Copy(i, BlockId(1), BlockId(2), 3, Tier.HOST, Tier.DEVICE) for i in groups]
        backend.step(Batch(0, (), (*away, *back)))
        found.append(tuple(backend.read(i, BlockId(2), Tier.DEVICE, 3) for i in groups))
        places = tuple((i, BlockId(3)) for i in groups)
        backend.step(Batch(0, (), loads=(Load(places, found[0]),)))
        found.append(tuple(backend.read(i, BlockId(3), Tier.DEVICE, 3) for i in groups))
    assert found == [found[0]] * 4
    assert all(any(part) for part in found[0])
