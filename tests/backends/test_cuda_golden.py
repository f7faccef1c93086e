"""The cuda backend, in Triton's interpreter, with the shared tiny models whose layers want kernels
of their own: ids are the torch backend's, and those that llama.cpp recorded."""

import pytest

from harness.golden import read_cases
from harness.torch_models import Driver, greedy, load, settings
from kvtrio.backends.cuda_backend import CudaBackend
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf

pytestmark = pytest.mark.slow  # each program of a grid runs in Python
COUNT = 3
NAMES = {
    "deepseek2": "deepseek2",
    "gpt-oss-mxfp4": "gpt-oss-mxfp4.dequant",
    "qwen3moe": "qwen3moe",
    "llama-moe": "llama-moe",
    "mamba2": "mamba2",
    "granitehybrid": "granitehybrid",
}
"""Models, and their recordings."""


@pytest.mark.parametrize("name", NAMES)
def test_ids_of_tiny_models(shared, name):
    """The shortest recorded prompt and a few tokens behind it."""
    path = shared / "tiny" / "models" / f"{name}.gguf"
    cases = read_cases(shared / "tiny" / "golden" / f"{NAMES[name]}.json")
    case = min(cases, key=lambda each: len(each.prompt))
    with open_gguf(path) as file:
        ours = CudaBackend.load(file, read_spec(file), settings())
    ids = [greedy(Driver(backend), 1, case.prompt, COUNT) for backend in (ours, load(path))]
    assert ids[0] == ids[1] == case.greedy_tokens[:COUNT]
    assert ours.info.num_converted == 0
