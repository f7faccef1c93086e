"""The cuda backend's memory on a device: moves, several devices, short memory, its own part.

In the interpreter the same code runs on what stands for a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from harness.cuda_models import quantised_file, random_cuda
from harness.cuda_moves import is_in_order
from harness.devices import FakeDevice
from harness.gpu_checks import Check, Where
from harness.torch_models import PLAIN, Driver, greedy, settings
from kvtrio.backends.cuda_backend import CudaBackend
from kvtrio.backends.cuda_devices import Device, Gpu
from kvtrio.backends.cuda_ops import CudaOps
from kvtrio.core.batch import Batch

ALLOWED = 0.5
"""Of the device's memory, for the model that is loaded here."""


def memory_checks(where: Where) -> Iterator[Check]:
    """Each error 0 where all is right."""
    is_gpu = where.device == "cuda"
    first = _device(is_gpu)
    rights = [is_in_order(first, where.seed + i, 20) for i in range(10 if is_gpu else 1)]
    yield Check("moves in order", float(not all(rights)), 0.0)
    yield Check("layers on two devices, ids", float(not _splits([first, _device(is_gpu, 1)])), 0.0)
    yield Check("short of memory, ids", float(not _fits_in_parts(is_gpu)), 0.0)
    yield Check("memory beyond its part, share", _excess(_device(is_gpu, has_figures=True)), 0.0)


def _device(is_gpu: bool, index: int = 0, has_figures: bool = False) -> Device:
    """``index`` counts where there are as many; else the first stands for it."""
    if is_gpu:
        return Gpu(torch.device("cuda", index % torch.cuda.device_count()))
    return FakeDevice(1 << 30, 1 << 30, has_own_memory=has_figures)


def _splits(devices: Sequence[Device]) -> bool:
    sizes = {"max_rows": 64, "max_sampled": 4, "gpu_memory_fraction": 0.3}
    chosen = settings(tensor_split=(2.0, 1.0), **sizes)
    both = CudaBackend.load_on(devices, quantised_file(PLAIN), PLAIN, chosen)
    found = greedy(Driver(both), 1, [3], 2)
    del both
    return found == greedy(Driver(random_cuda(PLAIN, **sizes)), 1, [3], 2)


def _fits_in_parts(is_gpu: bool) -> bool:
    """A prompt, read whole and then with room for a part of it, gives the same token; on a GPU it
    must have run out of memory, too."""
    num_tokens = 30000 if is_gpu else 2
    backend = random_cuda(
        PLAIN,
        num_blocks=num_tokens // 16 + 2,
        max_context=num_tokens + 16,
        max_rows=64,
        max_sampled=1,
        gpu_memory_fraction=0.3,
    )
    driver, prompt = Driver(backend), [3 + i % 90 for i in range(num_tokens)]
    chunk = driver.chunk(1, 0, prompt)
    wanted = backend.step(Batch(0, (chunk,)))
    with _little_memory() if is_gpu else _few_rows(num_tokens // 2):
        done = backend.step(Batch(1, (chunk,)))
    is_same = done.sampled == wanted.sampled and not done.unplaced
    return is_same and (not is_gpu or torch.cuda.memory_stats()["num_ooms"] > 0)


@contextmanager
def _little_memory() -> Iterator[None]:
    """What is there now, and 24 MiB more: the prompt's values do not fit at once."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (24 << 20)) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def _few_rows(most: int) -> Iterator[None]:
    linear: Callable[..., torch.Tensor] = CudaOps.linear

    def scarce(self: CudaOps, step: object, x: torch.Tensor, *more: object) -> torch.Tensor:
        if len(x) > most:
            raise torch.OutOfMemoryError
        return linear(self, step, x, *more)

    CudaOps.linear = scarce  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaOps.linear = linear  # type: ignore[method-assign]


def _excess(device: Device) -> float:
    """What is taken beyond what is allowed when the largest step has run in full pools."""
    rows = 2048 if isinstance(device, Gpu) else 2
    chosen = settings(
        gpu_memory_fraction=ALLOWED,
        num_blocks=2 * (rows // 16 + 1),
        max_context=rows,
        max_rows=rows,
        max_sampled=2,
    )
    backend = CudaBackend.load_on((device,), quantised_file(PLAIN), PLAIN, chosen)
    (memory,) = backend.info.memory
    assert backend.info.num_blocks > chosen.num_blocks
    driver = Driver(backend)
    backend.step(Batch(0, (driver.chunk(1, 0, [3] * rows),)))
    if not isinstance(device, Gpu):
        parts = (memory.taken_bytes, memory.step_bytes, memory.pool_bytes, memory.adapter_bytes)
        return max(0.0, sum(parts) / memory.allowed_bytes - 1.0)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(device.place)
    return max(0.0, (total - free) / (ALLOWED * total) - 1.0)
