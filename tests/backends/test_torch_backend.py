"""Loading the torch backend, its facts, copies and errors."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from attrs import evolve

from harness.torch_models import (
    GREEDY,
    PLAIN,
    SPECS,
    WINDOWED,
    Driver,
    RandomFile,
    random_backend,
    random_file,
    settings,
)
from kvtrio.backends.base import BackendError
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.backends.torch_weights import load_weights, passing_bytes
from kvtrio.core.batch import Batch, Copy
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import BlockId
from kvtrio.model.errors import ModelFileError

CPU = torch.device("cpu")


def test_info_counts_what_is_allocated():
    """Pool and weight bytes are those of the tensors."""
    file = random_file(PLAIN)
    backend = TorchBackend.load(file, PLAIN, settings(dtype="bf16", num_blocks=10))
    info = backend.info
    assert info.pool_bytes == 3 * 2 * (10 * 16 * 2 * 8) * 2
    assert info.vocab_size == PLAIN.vocab_size
    assert info.max_context == 2048
    weights = load_weights(file, PLAIN, torch.bfloat16, CPU)
    assert info.weight_bytes == sum(w.nbytes for w in weights.values())


def test_a_tied_head_is_not_kept_twice():
    """The embedding serves as output matrix; nothing is stored for the head."""
    weights = load_weights(random_file(WINDOWED), WINDOWED, torch.float32, CPU)
    assert "token_embd.weight" in weights
    assert "output.weight" not in weights


def test_matrices_get_the_type_and_vectors_stay_wide():
    """Norms and biases are tiny and sensitive: they stay float32."""
    weights = load_weights(random_file(SPECS["odd"]), SPECS["odd"], torch.bfloat16, CPU)
    for name, weight in weights.items():
        assert weight.dtype == (torch.bfloat16 if weight.dim() == 2 else torch.float32), name


def test_loading_needs_room_for_one_tensor_more():
    """The largest tensor is float32 for a moment, whatever it becomes."""
    file = random_file(PLAIN)
    assert passing_bytes(file, PLAIN) == max(array.nbytes for array in file.arrays.values())


def test_an_unknown_type_is_refused():
    """The message lists the types there are."""
    with pytest.raises(BackendError, match="f32, bf16"):
        random_backend(PLAIN, dtype="int7")


@pytest.mark.parametrize("device", ["nonsense", "", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(device):
    """Wrong names and absent hardware give the same clear line."""
    with pytest.raises(BackendError, match="not available"):
        random_backend(PLAIN, device=device)


def test_pools_that_do_not_fit_are_refused_with_the_sum():
    """A context that no machine holds is refused before anything is allocated."""
    with pytest.raises(BackendError, match=r"weights .* MiB \+ KV pools .* MiB \+ .* = .* MiB"):
        random_backend(PLAIN, num_blocks=1 << 40)


def test_only_ram_that_was_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch):
    """The default takes what fits and says so; the flag is taken at its word."""
    monkeypatch.setattr("kvtrio.backends.torch_backend.available_memory", lambda device: 64 << 20)
    wanted = {"num_blocks": 16, "host_bytes": 1 << 40}
    with pytest.raises(BackendError, match=r"--cache-ram 1,048,576 MiB = .*, available 64 MiB"):
        random_backend(PLAIN, **wanted)
    info = random_backend(PLAIN, **wanted, host_may_shrink=True).info
    assert info.host_is_short
    assert 16 << 20 < info.pool_bytes <= 32 << 20
    assert not random_backend(PLAIN, num_blocks=16, host_bytes=1 << 20).info.host_is_short


def test_too_little_for_the_model_itself_is_refused(monkeypatch: pytest.MonkeyPatch):
    """However far the default shrinks."""
    monkeypatch.setattr("kvtrio.backends.torch_backend.available_memory", lambda device: 1000)
    with pytest.raises(BackendError, match="not enough memory"):
        random_backend(PLAIN, host_bytes=1 << 30, host_may_shrink=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3.4e38])
def test_damaged_weights_are_refused_by_name(value):
    """A weight that is no number, or none in the compute type, is the file's fault."""
    file = random_file(PLAIN)
    arrays = {name: array.copy() for name, array in file.arrays.items()}
    arrays["blk.1.ffn_up.weight"][3, 4] = value
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight"):
        TorchBackend.load(RandomFile(arrays), PLAIN, settings(dtype="bf16"))


def test_a_copied_block_stands_for_its_source():
    """A request that starts from a copied part of a block gets what the owner of the block gets."""
    driver = Driver(random_backend(WINDOWED), Random(3))
    prompt = list(range(24))
    expected = driver.logprobs(driver.chunk(1, 0, prompt))
    borrower = driver.chunk(2, 20, prompt[20:])
    owner = driver.tables[1]
    copies = tuple(
        Copy(group, owner[group][i], table[i], count)
        for group, table in enumerate(driver.tables[2])
        for i, count in enumerate((16, 4))
    )
    logits = driver.backend.logits(Batch(1, (borrower,), copies))
    assert torch.allclose(torch.log_softmax(logits, -1), expected, atol=1e-5)


def test_only_sampled_chunks_get_an_answer():
    """One entry per chunk: None where the prompt goes on."""
    driver = Driver(random_backend(PLAIN))
    tokens = driver.tokens(
        driver.chunk(1, 0, [1, 2, 3], None),
        driver.chunk(2, 0, [4, 5]),
        driver.chunk(3, 0, [6], None),
    )
    assert [token is None for token in tokens] == [True, False, True]
    assert driver.tokens(driver.chunk(1, 3, [4], None)) == [None]


def test_a_batch_of_copies_alone_computes_nothing():
    """Without chunks a step copies and answers with nothing."""
    backend = random_backend(PLAIN)
    copy = Copy(0, BlockId(0), BlockId(1), 3)
    assert backend.step(Batch(0, (), (copy,))).sampled == ()


def test_reported_logprobs_are_those_of_the_raw_logits():
    """Bias and temperature change the choice, never the reported probabilities."""
    backend = random_backend(PLAIN)
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


def test_logits_that_are_not_finite_stop_the_step():
    """Nothing is sampled from a broken forward pass."""
    file = random_file(PLAIN)
    arrays = {name: array.copy() for name, array in file.arrays.items()}
    arrays["output_norm.weight"][:] = 3e38
    driver = Driver(TorchBackend.load(RandomFile(arrays), PLAIN, settings()))
    with pytest.raises(FloatingPointError):
        driver.tokens(driver.chunk(1, 0, [1, 2]))


def test_a_closed_backend_gives_its_memory_back():
    """Closing twice is harmless; using it afterwards is a bug that is told."""
    backend = random_backend(PLAIN)
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.step(Batch(0, ()))


def test_pools_are_not_touched_before_use():
    """Pools far larger than what is used cost no memory: their pages are untouched."""

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * 4096

    before = resident()
    backend = random_backend(PLAIN, num_blocks=200_000)
    assert backend.info.pool_bytes > 1 << 30
    assert resident() - before < 1 << 28


def test_threads_are_set_when_asked():
    """The number of threads goes to torch; None leaves it alone."""
    before = torch.get_num_threads()
    try:
        random_backend(PLAIN, num_threads=before + 1)
        random_backend(PLAIN, num_threads=None)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
