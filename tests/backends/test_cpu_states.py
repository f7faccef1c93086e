"""States of recurrent layers on the cpu backend: slots, copies, company, chunks."""

import ctypes
from itertools import pairwise
from random import Random

import gguf
import numpy as np
import pytest
import torch
from attrs import evolve

from harness.cpu_models import cpu_settings, load_cpu, random_cpu, require_kernels
from harness.golden import force, mean_divergence, read_cases
from harness.native import chosen_isa, isas
from harness.torch_models import (
    CONV,
    DELTA,
    HYBRIDS,
    MAMBA,
    Driver,
    RandomFile,
    random_file,
    random_prompt,
    settings,
)
from kvtrio.backends.base import BackendError
from kvtrio.backends.cpu_backend import CpuBackend
from kvtrio.backends.cpu_places import CpuPlaces
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.core.batch import Batch, Chunk, Copy
from kvtrio.core.types import BlockId, StateClass, Tier
from kvtrio.kernels import reference
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import GGUFFile, TensorInfo, open_gguf
from kvtrio.model.layer_tensors import is_matrix

CLOSE = {"rtol": 0.0, "atol": 1e-4}
SAME = {"rtol": 0.0, "atol": 0.0}
FREE = BlockId(63)
"""A slot that no request here is given."""
DENSE = ["qwen35", "lfm2", "mamba2"]
TINY = [*DENSE, "qwen3next", "granitehybrid"]
ROUNDED = gguf.GGMLQuantizationType.Q8_0


def moves(
    driver: Driver, request: int, tiers: tuple[Tier, Tier], slot: BlockId
) -> tuple[Copy, ...]:
    """A request's states, of all groups that have one, into a slot."""
    groups = driver.backend.info.groups
    return tuple(
        Copy(i, driver.tables[request][i][0], slot, 0, *tiers)
        for i, group in enumerate(groups)
        if group.state_class is StateClass.POINT
    )


def saved(driver: Driver, request: int) -> tuple[Copy, ...]:
    return moves(driver, request, (Tier.DEVICE, Tier.DEVICE), FREE)


def back(copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
    return tuple(
        Copy(copy.group, copy.target, copy.source, 0, copy.target_tier, copy.source_tier)
        for copy in copies
    )


def logprobs(driver: Driver, chunk: Chunk, copies: tuple[Copy, ...] = ()) -> torch.Tensor:
    out = torch.as_tensor(driver.backend.logits(Batch(0, (chunk,), copies)))
    return torch.log_softmax(out, -1)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_checkpoint_continues_as_if_nothing_had_been(name, isa):
    """A copy made before a step that goes on, restored later, gives the very same bits."""
    prompt = random_prompt(Random(1), 70)
    driver = Driver(random_cpu(HYBRIDS[name], isa))
    logprobs(driver, driver.chunk(0, 0, prompt[:40]))
    copies = saved(driver, 0)
    expected = logprobs(driver, driver.chunk(0, 40, prompt[40:]), copies)
    again = logprobs(driver, driver.chunk(0, 40, prompt[40:]), back(copies))
    torch.testing.assert_close(again, expected, **SAME)
    other = logprobs(driver, driver.chunk(0, 40, prompt[:30]), back(copies))
    assert (other - expected).abs().max() > 0.01


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", HYBRIDS)
def test_company_changes_no_bit(name, isa):
    """Rows and chunks of many requests in one step get the bits that each gets alone."""
    rng = Random(4)
    backend = random_cpu(HYBRIDS[name], isa, key_type="f16", value_type="f16")
    prompts = [random_prompt(rng, length) for length in (1, 2, 40, 120, 17, 64) * 2]
    cuts = [0, 1, 39, 64, 0, 32] * 2

    def alone(driver: Driver, request: int) -> torch.Tensor:
        for first, end in pairwise(sorted({0, cuts[request], len(prompts[request])})):
            out = driver.logprobs(driver.chunk(request, first, prompts[request][first:end]))
        return out

    expected = [alone(Driver(backend), i)[0] for i in range(len(prompts))]
    driver = Driver(backend, rng)
    begun = [i for i, cut in enumerate(cuts) if cut]
    driver.logprobs(*(driver.chunk(i, 0, prompts[i][: cuts[i]]) for i in begun))
    out = driver.logprobs(*(driver.chunk(i, cut, prompts[i][cut:]) for i, cut in enumerate(cuts)))
    torch.testing.assert_close(out, torch.stack(expected), **SAME)


@pytest.mark.slow
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_do_not_depend_on_chunks(shared, name, isa):
    """150 tokens in pieces of 1 and 7 give nearly what they give at once, in pieces of 64 or 128
    the same bits."""
    with chosen_isa(isa):
        driver = Driver(load_cpu(shared / "tiny" / "models" / f"{name}.gguf"))
    prompt = random_prompt(Random(4), 150, 8192)
    whole = logprobs(driver, driver.chunk(0, 0, prompt))
    for size in (1, 7, 64, 128):
        for start in range(0, 150, size):
            out = logprobs(driver, driver.chunk(size, start, prompt[start : start + size]))
        torch.testing.assert_close(out, whole, **(SAME if size % 64 == 0 else CLOSE))


@pytest.mark.parametrize("is_unified", [True, False])
@pytest.mark.parametrize("model", [MAMBA, DELTA, CONV], ids=["mamba", "delta", "conv"])
def test_states_travel_between_memories(model, is_unified):
    """A state goes to RAM and comes back unchanged, also by a batch of copies alone."""
    backend = random_cpu(model, is_unified=is_unified, num_state_slots=4, num_host_state_slots=2)
    driver, prompt = Driver(backend), random_prompt(Random(8), 40)
    logprobs(driver, driver.chunk(0, 0, prompt[:30]))
    copies = moves(driver, 0, (Tier.DEVICE, Tier.HOST), BlockId(5 if is_unified else 1))
    assert backend.step(Batch(0, (), copies)).sampled == ()
    expected = logprobs(driver, driver.chunk(0, 30, prompt[30:]))
    again = logprobs(driver, driver.chunk(0, 30, prompt[30:]), back(copies))
    torch.testing.assert_close(again, expected, **SAME)


def test_a_state_is_read_out_and_written_in():
    """What one backend's slot held makes another go on as the first one does."""
    prompt = random_prompt(Random(9), 40)
    drivers = [Driver(random_cpu(MAMBA)) for _ in range(2)]
    logprobs(drivers[0], drivers[0].chunk(0, 0, prompt[:30]))
    drivers[1].chunk(0, 0, prompt[:30])
    (here, there) = (CpuPlaces(parts.native, parts.model, parts.writer) for parts in (
        driver.backend._open() for driver in drivers
    ))  # fmt: skip
    slot = drivers[0].tables[0][0][0]
    part = here.read(0, slot, Tier.DEVICE, 30)
    assert len(part) == drivers[0].backend.info.groups[0].part_bytes(16)
    there.write(0, drivers[1].tables[0][0][0], Tier.DEVICE, part)
    expected, out = (logprobs(driver, driver.chunk(0, 30, prompt[30:])) for driver in drivers)
    torch.testing.assert_close(out, expected, **SAME)


def test_a_first_chunk_reads_no_state():
    """Whatever its slot held before, be it no number, is of no consequence."""
    backend = random_cpu(DELTA)
    driver, prompt = Driver(backend), random_prompt(Random(6), 20)
    expected = logprobs(driver, driver.chunk(0, 0, prompt))
    for state in backend._open().model.stored.stores.states.values():
        ctypes.memset(state.data, 0xFF, 4 * state.stride * state.num_slots)
    torch.testing.assert_close(logprobs(driver, driver.chunk(0, 0, prompt)), expected, **SAME)


def test_info_counts_slots():
    """The bytes of a slot are those of the native side, whose rows are whole vectors."""
    info = random_cpu(MAMBA, num_state_slots=3, num_host_state_slots=2).info
    (group,) = info.groups
    assert (info.num_state_slots, info.num_host_state_slots) == (3, 2)
    history, matrices = 160, 4 * 7 * 16  # 3 x 52 and 4 x 7 x 6, in whole vectors
    assert group.bytes_per_state == 3 * 4 * (history + matrices)
    assert info.pool_bytes == 5 * group.bytes_per_state


def test_a_recurrent_model_needs_slots():
    """Without one it could not run a single request; a slot that is not there is a bug."""
    with pytest.raises(BackendError, match="no slot for their state"):
        random_cpu(MAMBA, num_state_slots=0)
    driver = Driver(random_cpu(MAMBA, num_state_slots=1))
    chunk = driver.chunk(0, 0, [1])
    driver.tables[0][0][0] = BlockId(1)
    with pytest.raises(RuntimeError, match="slot that does not exist"):
        logprobs(driver, driver.chunk(0, 0, [1]))
    assert chunk.block_tables == ((BlockId(0),),)


class Rounded:
    """A model file whose matrices are kept as Q8_0."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._rounded = {
            name: gguf.quants.quantize(file.dequantise(name), ROUNDED)
            for name, tensor in file.tensors.items()
            if is_matrix(name, tensor.shape)
        }
        self.tensors: dict[str, TensorInfo] = dict(file.tensors)
        for name, raw in self._rounded.items():
            tensor = self.tensors[name]
            self.tensors[name] = evolve(tensor, ggml_type=ROUNDED, num_bytes=raw.nbytes)

    def raw(self, name: str) -> np.ndarray:
        return self._rounded[name]

    def dequantise(self, name: str) -> np.ndarray:
        if name not in self._rounded:
            return self._file.dequantise(name)
        return gguf.quants.dequantize(self._rounded[name], ROUNDED)


def rounded_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The reference's product, of activations in eight bits."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return torch.nn.functional.linear(((groups / scale).round() * scale).view_as(x), weight, bias)


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_rounded_weights_and_activations_cost_nothing_else(shared, name, monkeypatch):
    """The reference, given rounded activations, is as far from exact as the kernels are: small
    models are sensitive, but the loss is that of the products alone."""
    require_kernels()
    cases = read_cases(shared / "tiny" / "golden" / f"{name}.json")[:2]
    with open_gguf(shared / "tiny" / "models" / f"{name}.gguf") as file:
        rounded, spec = Rounded(file), read_spec(file)
        mine = CpuBackend.load(rounded, spec, cpu_settings())
        theirs = TorchBackend.load(rounded, spec, settings())
    exact = [list(step.items()) for forced in force(theirs, cases) for step in forced.logprobs]
    monkeypatch.setattr(reference, "linear", rounded_linear)
    expected, found = (
        [list(step.values()) for forced in force(backend, cases) for step in forced.logprobs]
        for backend in (theirs, mine)
    )
    loss = mean_divergence(exact, expected)
    assert loss > 0.001
    assert mean_divergence(exact, found) == pytest.approx(loss, rel=0.02)


@pytest.mark.parametrize("name", ["blk.0.ssm_conv1d.weight", "blk.0.ssm_a"])
def test_damaged_vectors_are_refused_by_name(name):
    """A number of a recurrent layer that is none is the file's fault."""
    require_kernels()
    arrays = {each: array.copy() for each, array in random_file(MAMBA).arrays.items()}
    arrays[name].flat[3] = np.nan
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        CpuBackend.load(RandomFile(arrays), MAMBA, cpu_settings())
