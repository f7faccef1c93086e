"""Loading the torch backend, its facts, copies and errors."""

import pytest
import torch

from harness.torch_models import (
    PLAIN,
    SPECS,
    WINDOWED,
    RandomFile,
    random_backend,
    random_file,
    settings,
)
from kvtrio.backends.base import BackendError
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.backends.torch_weights import load_weights, passing_bytes
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


def test_a_weight_that_the_type_does_not_hold_is_refused():
    """The largest float32 is infinite in bfloat16: the file's fault, with the tensor's name."""
    arrays = {name: array.copy() for name, array in random_file(PLAIN).arrays.items()}
    arrays["blk.1.ffn_up.weight"][3, 4] = 3.4e38
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight"):
        TorchBackend.load(RandomFile(arrays), PLAIN, settings(dtype="bf16"))


def test_threads_are_set_when_asked():
    """The number of threads goes to torch; None leaves it alone."""
    before = torch.get_num_threads()
    try:
        random_backend(PLAIN, num_threads=before + 1)
        random_backend(PLAIN, num_threads=None)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
