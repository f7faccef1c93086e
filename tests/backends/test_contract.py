"""What every backend that computes promises the engine, on small random models."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from attrs import evolve

from harness.backends import KINDS, Kind
from harness.torch_adapters import loaded, random_adapter
from harness.torch_models import DELTA, GREEDY, PLAIN, WINDOWED, Driver, RandomFile, random_file
from kvtrio.backends.base import BackendError
from kvtrio.core.batch import Batch, Copy
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import BlockId, Tier
from kvtrio.model.errors import ModelFileError


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each backend in turn."""
    return KINDS[request.param]


def damaged(name: str, value: float, where: slice | int) -> RandomFile:
    """The weights of ``PLAIN`` with some of one tensor's values changed."""
    arrays = {each: array.copy() for each, array in random_file(PLAIN).arrays.items()}
    arrays[name].reshape(-1)[where] = value
    return RandomFile(arrays)


# --- memory ---


def test_pools_that_do_not_fit_are_refused_with_the_sum(kind):
    """A context that no machine holds is refused before anything is allocated."""
    with pytest.raises(BackendError, match=r"weights .* MiB \+ KV pools .* MiB \+ .* = .* MiB"):
        kind.make(PLAIN, num_blocks=1 << 40)


def test_only_ram_that_was_asked_for_is_refused(kind, monkeypatch: pytest.MonkeyPatch):
    """The default takes what fits and says so; the flag is taken at its word."""
    monkeypatch.setattr(kind.memory, kind.free(64 << 20))
    wanted = {"num_blocks": 16, "host_bytes": 1 << 40}
    with pytest.raises(BackendError, match=r"--cache-ram 1,048,576 MiB = .*, available 64 MiB"):
        kind.make(PLAIN, **wanted)
    info = kind.make(PLAIN, **wanted, host_may_shrink=True).info
    assert info.host_is_short
    assert 16 << 20 < info.pool_bytes <= 32 << 20
    assert not kind.make(PLAIN, num_blocks=16, host_bytes=1 << 20).info.host_is_short


def test_too_little_for_the_model_itself_is_refused(kind, monkeypatch: pytest.MonkeyPatch):
    """However far the default shrinks."""
    monkeypatch.setattr(kind.memory, kind.free(1000))
    with pytest.raises(BackendError, match="not enough memory"):
        kind.make(PLAIN, host_bytes=1 << 30, host_may_shrink=True)


def test_pools_are_not_touched_before_use(kind):
    """Pools far larger than what is used cost no memory: their pages are untouched."""

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * 4096

    before = resident()
    backend = kind.make(PLAIN, num_blocks=200_000)
    assert backend.info.pool_bytes > 1 << 30
    assert resident() - before < 1 << 28


def test_a_closed_backend_gives_its_memory_back(kind):
    """Closing twice is harmless; using it afterwards is a bug that is told."""
    backend = kind.make(PLAIN)
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.step(Batch(0, ()))


# --- damaged models ---


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "blk.0.attn_norm.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_weights_are_refused_by_name(kind, name, value):
    """A weight that is no number is the file's fault."""
    with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
        kind.load(damaged(name, value, 7), PLAIN)


def test_logits_that_are_not_finite_have_no_token(kind):
    """Nothing is sampled from a broken forward pass."""
    driver = Driver(kind.load(damaged("output_norm.weight", 3e38, slice(None)), PLAIN))
    assert driver.tokens(driver.chunk(1, 0, [1, 2])) == [None]


def test_one_request_without_finite_numbers_is_alone_with_it(kind):
    """An adapter that blows up takes its own token away, and changes nobody else's."""
    backend = kind.make(PLAIN)
    huge = random_adapter(PLAIN, 1)
    targets = {name: evolve(each, scaling=1e30) for name, each in huge.targets.items()}
    uses = loaded(backend, evolve(huge, targets=targets)).uses([(huge, 1.0)])
    driver = Driver(backend)
    expected = driver.tokens(driver.chunk(1, 0, [1, 2, 3]), driver.chunk(2, 0, [4, 5]))
    driver.tables.clear()
    before, after = driver.chunk(1, 0, [1, 2, 3]), driver.chunk(2, 0, [4, 5])
    params = SamplingParams(temperature=0.0, num_logprobs=2)
    broken = evolve(driver.chunk(3, 0, [7, 8]), adapters=uses, sample=evolve(GREEDY, params=params))
    assert driver.tokens(before, broken, after) == [expected[0], None, expected[1]]


@pytest.mark.parametrize("model", [PLAIN, WINDOWED, DELTA], ids=["plain", "windowed", "delta"])
def test_what_lies_in_a_block_from_before_changes_nothing(kind, model):
    """Not even NaN behind a request's end, where one without finite numbers had its state."""
    backend = kind.make(model)
    huge = random_adapter(model, 1)
    targets = {name: evolve(each, scaling=1e30) for name, each in huge.targets.items()}
    uses = loaded(backend, evolve(huge, targets=targets)).uses([(huge, 1.0)])
    driver, prompt = Driver(backend), list(range(20))
    expected = driver.logprobs(driver.chunk(1, 0, prompt))
    driver.leave(1)
    broken = evolve(driver.chunk(2, 0, list(range(40))), adapters=uses)
    assert driver.tokens(broken) == [None]
    driver.leave(2)
    torch.testing.assert_close(driver.logprobs(driver.chunk(3, 0, prompt)), expected, **kind.alike)


# --- copies ---


@pytest.mark.parametrize("is_unified", [True, False])
def test_a_copied_block_stands_for_its_source(kind, is_unified):
    """Also when it went to RAM and back: with one arena for both, and with RAM's after the other.

    A batch of copies alone copies, and answers with nothing."""
    backend = kind.make(WINDOWED, is_unified=is_unified, num_blocks=64, host_bytes=1 << 20)
    driver = Driver(backend, Random(3))
    prompt = list(range(24))
    expected = driver.logprobs(driver.chunk(1, 0, prompt))
    borrower = driver.chunk(2, 20, prompt[20:])
    owner, own = driver.tables[1], driver.tables[2]
    first = 64 if is_unified else 0
    there = tuple(
        Copy(group, table[i], BlockId(first + i), 16, Tier.DEVICE, Tier.HOST)
        for group, table in enumerate(owner)
        for i in range(2)
    )
    back = tuple(
        Copy(group, BlockId(first + i), table[i], count, Tier.HOST, Tier.DEVICE)
        for group, table in enumerate(own)
        for i, count in enumerate((16, 4))
    )
    assert backend.step(Batch(0, (), there)).sampled == ()
    out = torch.as_tensor(backend.logits(Batch(1, (borrower,), back)))
    torch.testing.assert_close(torch.log_softmax(out, -1), expected, **kind.alike)


# --- what a step answers ---


def test_only_sampled_chunks_get_an_answer(kind):
    """One entry per chunk: None where the prompt goes on."""
    driver = Driver(kind.make(PLAIN))
    tokens = driver.tokens(
        driver.chunk(1, 0, [1, 2, 3], None),
        driver.chunk(2, 0, [4, 5]),
        driver.chunk(3, 0, [6], None),
    )
    assert [token is None for token in tokens] == [True, False, True]
    assert driver.tokens(driver.chunk(1, 3, [4], None)) == [None]


def test_reported_logprobs_are_those_of_the_raw_logits(kind):
    """Bias and temperature change the choice, never the reported probabilities."""
    backend = kind.make(PLAIN)
    driver = Driver(backend)
    params = SamplingParams(temperature=0.0, logit_bias=((5, 1000.0),), num_logprobs=3)
    chunk = evolve(driver.chunk(1, 0, [1, 2, 3]), sample=evolve(GREEDY, params=params))
    expected = driver.logprobs(chunk)[0]
    (sampled,) = backend.step(Batch(0, (chunk,))).sampled
    assert sampled is not None
    assert sampled.token_id == 5
    assert sampled.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    best = expected.sort(descending=True, stable=True)
    assert [token for token, _ in sampled.top] == best.indices[:3].tolist()
    assert [value for _, value in sampled.top] == pytest.approx(best.values[:3].tolist(), abs=1e-5)
