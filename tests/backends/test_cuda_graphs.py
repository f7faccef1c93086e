"""Captured decoding steps, on a graph that stands for a GPU's, say what uncaptured ones say."""

from itertools import pairwise
from random import Random

import pytest
import torch

from harness.cuda_models import EVERY_KIND, random_cuda
from harness.fake_graph import CannotCapture, FakeGraph
from harness.torch_adapters import loaded, random_adapter
from harness.torch_models import (
    Driver,
    layer,
    random_prompt,
    spec,
)
from kvtrio.backends import cuda_forward
from kvtrio.backends.cuda_graphs import MOST_ROWS, SIZES
from kvtrio.core.batch import Batch
from kvtrio.core.types import BlockId, Tier
from kvtrio.kernels.triton_matmul import FEW_ROWS, MANY_ROWS

pytestmark = pytest.mark.slow  # each program of a grid runs in Python

TINY = spec(layer(0))
CLOSE = {"rtol": 0.0, "atol": 2e-4}
"""The same row in another company, where the library multiplies."""


def captured(model, max_rows: int = 3):
    backend, graphs = random_cuda(model), []

    def make() -> FakeGraph:
        graphs.append(FakeGraph())
        return graphs[-1]

    backend.capture(make, max_rows)
    return backend, graphs


def replays(graphs: list[FakeGraph]) -> list[int]:
    return [graph.replays for graph in graphs]


def test_rows_that_come_and_go_get_what_uncaptured_steps_give():
    """Two prompts, a step of both, one leaves and another one comes, to its blocks and slots."""
    rng, results = Random(4), []
    prompts = [random_prompt(rng, length) for length in (9, 3, 2)]
    ours, graphs = captured(EVERY_KIND, 2)
    for backend in (ours, random_cuda(EVERY_KIND)):
        driver = Driver(backend, Random(5))
        driver.logprobs(*(driver.chunk(i, 0, prompts[i]) for i in range(2)))
        both = driver.logprobs(driver.chunk(0, 9, [7]), driver.chunk(1, 3, [8]))
        driver.leave(0)
        driver.logprobs(driver.chunk(2, 0, prompts[2]))
        again = driver.logprobs(driver.chunk(2, 2, [5]), driver.chunk(1, 4, [6], None))
        results.append(torch.cat((both, again, driver.logprobs(driver.chunk(1, 5, [9])))))
    torch.testing.assert_close(*results, **CLOSE)
    assert replays(graphs) == [2, 1]


def test_adapters_are_captured_when_the_first_step_has_them():
    """Rows with none, one and two of them in one step; and anew when others are loaded."""
    adapters = [random_adapter(TINY, seed) for seed in (1, 2, 3)]
    results = []
    ours, graphs = captured(TINY)
    for backend in (ours, random_cuda(TINY)):
        own, driver = loaded(backend, *adapters[:2]), Driver(backend)
        mixes = [(), ((adapters[0], 0.5),), ((adapters[0], 1.0), (adapters[1], 0.7))]
        for _ in range(2):
            chunks = [own.chunk(driver, i, (0, [3]), mix) for i, mix in enumerate(mixes)]
            results.append(driver.logprobs(*chunks))
        own.handles[adapters[2].digest] = backend.load_adapter(adapters[2])
        chunks = [own.chunk(driver, i, (0, [3]), ((adapters[2], 1.0),)) for i in range(3)]
        results.append(driver.logprobs(*chunks))
        backend.unload_adapter(own.handles[adapters[2].digest])
        with pytest.raises(KeyError):
            driver.logprobs(chunks[1])
        results.append(driver.logprobs(driver.chunk(9, 0, [3])))
    for mine, theirs in zip(results[:4], results[4:], strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    assert replays(graphs) == [0, 0, 1, 2, 1]


def test_adapters_that_no_memory_is_left_to_capture_are_computed_all_the_same():
    """Launched singly, and tried again when others are loaded."""
    adapter = random_adapter(TINY, 1)
    backend, graphs = captured(TINY, 1)
    own, driver = loaded(backend, adapter), Driver(backend)
    chunk = own.chunk(driver, 0, (0, [3]), ((adapter, 1.0),))
    FakeGraph.has_room = False
    try:
        short = [driver.logprobs(chunk) for _ in range(2)]
    finally:
        FakeGraph.has_room = True
    backend.load_adapter(adapter)
    torch.testing.assert_close(driver.logprobs(chunk), short[1], **CLOSE)
    assert replays(graphs) == [0, 0, 1]


def test_only_steps_of_decoding_rows_are_launched_whole():
    """Not those with a longer chunk, nor with more rows than any was captured for."""
    backend, graphs = captured(TINY, 2)
    driver = Driver(backend)
    prompt, row = driver.chunk(0, 0, [1, 2]), driver.chunk(1, 0, [3])
    backend.step(Batch(0, (prompt, row)))
    backend.step(Batch(1, tuple(driver.chunk(i, 2, [4]) for i in range(3))))
    assert replays(graphs) == [0, 0]
    assert backend.step(Batch(2, ())).sampled == ()
    result = backend.step(Batch(3, (driver.chunk(0, 2, [5]), driver.chunk(1, 1, [5], None))))
    assert [sampled is None for sampled in result.sampled] == [False, True]
    assert replays(graphs) == [1, 0]


def test_warming_up_reads_prompts_in_no_request_s_places(monkeypatch):
    """Of each size that fits; what requests have stays as it was."""
    monkeypatch.setattr(cuda_forward, "WARM_ROWS", (2, 5, 99))
    backend = random_cuda(TINY, max_context=17)
    driver = Driver(backend)
    chunk = driver.chunk(0, 0, [3, 4])
    expected = driver.logprobs(chunk)
    read = [backend.read(0, BlockId(i), Tier.DEVICE, 16) for i in range(3)]
    backend.warm(6)
    assert [backend.read(0, BlockId(i), Tier.DEVICE, 16) for i in range(3)] == read
    assert torch.equal(driver.logprobs(chunk), expected)


def test_no_size_is_padded_over_a_border_between_tiles():
    """Else a row would have other bits in a captured step."""
    assert SIZES[-1] == MOST_ROWS
    for border in (FEW_ROWS, 32, MANY_ROWS - 1):
        for before, size in pairwise(SIZES):
            assert not before < border < size


@pytest.mark.parametrize("look", [lambda x: x.sum().item(), lambda x: x.tolist(), torch.nonzero])
def test_what_no_capture_could_do_fails(look):
    """Whatever the fake lets through would fail on a GPU, or stop being looked at."""
    with pytest.raises(CannotCapture):
        FakeGraph().capture(lambda: look(torch.ones(3) + 1))


def test_a_replay_reads_what_is_in_memory_now():
    """Operations are repeated on the same memory, views and changes in place included."""
    x, graph = torch.zeros(2, 3), FakeGraph()

    def run() -> torch.Tensor:
        y = x + 1
        y[1] *= 2.0
        return y.view(-1)[1:].clone()

    out = graph.capture(run)
    x.fill_(4.0)
    graph.replay()
    assert out.tolist() == [5.0, 5.0, 10.0, 10.0, 10.0]
