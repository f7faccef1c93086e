"""What the cuda backend asks of the devices it runs on: memory, and two streams of work.

1. What is run on one stream is done in that order. Of two streams nothing is known but what marks
   say: work behind ``wait(mark)`` begins when all that was before the mark has ended.
2. Kernels run on the compute stream, which is torch's current one of the device that was activated
   last; work for the copies' stream only ever reads and writes staging memory and pinned RAM.
3. The model's thread alone calls; see ``engine.executor`` on why it is one thread.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from attrs import define, field
from torch import Tensor

from kvtrio.backends.base import BackendError
from kvtrio.kernels.triton_common import is_interpreted

NO_GPU = (
    "backend cuda found no NVIDIA GPU that this torch can use (TRITON_INTERPRET=1 runs its kernels "
    "on the CPU, for tests only)"
)
LEAST_CAPABILITY = 8
"""Older GPUs have no bfloat16, nor products of float32 parts."""
T = TypeVar("T")
Work = Callable[[], None]


class Stream(Protocol):
    """Work in order."""

    def run(self, work: Work) -> None:
        """Behind all that is on the stream; perhaps later."""
        ...

    def mark(self) -> object:
        """The end of what is on the stream now."""
        ...

    def wait(self, mark: object) -> None:
        """What is run from now on begins behind a mark of either stream."""
        ...

    def synchronise(self) -> None:
        """Return when nothing is on the stream."""
        ...


class Device(Protocol):
    """One GPU, or what stands for it."""

    @property
    def place(self) -> torch.device: ...

    @property
    def has_own_memory(self) -> bool:
        """False: its memory is the host's, and nothing is sized by it."""
        ...

    @property
    def compute(self) -> Stream: ...

    @property
    def copies(self) -> Stream: ...

    def activate(self) -> None:
        """Kernels run here from now on."""
        ...

    def memory(self) -> tuple[int, int]:
        """Bytes: free for this process, what its allocator keeps unused included, and in all."""
        ...

    def peak_bytes(self, work: Work) -> int:
        """Do ``work``; returns how many bytes it had at most beyond what was there before."""
        ...

    def relieve(self) -> None:
        """Give back what the allocator keeps unused."""
        ...

    def bring(self, x: Tensor) -> Tensor:
        """A copy, on this device, of what another one's compute stream makes."""
        ...


@define(eq=False)
class AtOnce:
    """A stream of a device that has none."""

    def run(self, work: Work) -> None:
        work()

    def mark(self) -> object:
        return None

    def wait(self, mark: object) -> None:
        pass

    def synchronise(self) -> None:
        pass


@define(eq=False)
class Interpreter:
    """The CPU, where Triton's interpreter runs kernels."""

    place: torch.device = field(init=False, factory=lambda: torch.device("cpu"))
    has_own_memory: bool = field(init=False, default=False)
    compute: Stream = field(init=False, factory=AtOnce)
    copies: Stream = field(init=False, factory=AtOnce)

    def activate(self) -> None:
        pass

    def memory(self) -> tuple[int, int]:
        raise NotImplementedError("has_own_memory says so")

    def peak_bytes(self, work: Work) -> int:
        raise NotImplementedError("has_own_memory says so")

    def relieve(self) -> None:
        pass

    def bring(self, x: Tensor) -> Tensor:
        return x.clone()


@define(eq=False)
class _GpuStream:
    """``_stream`` None: torch's current one."""

    _place: torch.device
    _stream: torch.cuda.Stream | None = None

    def run(self, work: Work) -> None:
        if self._stream is None:
            work()
            return
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> object:
        return self._own().record_event()

    def wait(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._own().wait_event(mark)

    def synchronise(self) -> None:
        self._own().synchronize()

    def _own(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._place)


@define(eq=False)
class Gpu:
    """An NVIDIA GPU, through torch."""

    place: torch.device
    has_own_memory: bool = field(init=False, default=True)
    compute: Stream = field(init=False)
    copies: Stream = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.compute = _GpuStream(self.place)
        # torch has no annotations for making a stream.
        stream = torch.cuda.Stream(self.place)  # type: ignore[no-untyped-call]
        self.copies = _GpuStream(self.place, stream)

    def activate(self) -> None:
        torch.cuda.set_device(self.place)

    def memory(self) -> tuple[int, int]:
        self.relieve()
        free, total = torch.cuda.mem_get_info(self.place)
        return int(free), int(total)

    def peak_bytes(self, work: Work) -> int:
        self.relieve()
        torch.cuda.reset_peak_memory_stats(self.place)
        before = torch.cuda.memory_reserved(self.place)
        work()
        torch.cuda.synchronize(self.place)
        # Reserved, not allocated: what lies between allocations is taken, too.
        return max(0, torch.cuda.max_memory_reserved(self.place) - before)

    def relieve(self) -> None:
        torch.cuda.synchronize(self.place)
        torch.cuda.empty_cache()

    def bring(self, x: Tensor) -> Tensor:
        # torch orders both devices' current streams around a copy between them.
        return x.to(self.place, non_blocking=True)


def surely(device: Device, act: Callable[[], T]) -> T:
    """``act()``, and where it runs out of memory once more, with what the allocator kept unused.

    For what can be begun twice.
    """
    try:
        return act()
    except torch.OutOfMemoryError:
        pass
    device.relieve()
    return act()


def find_devices(name: str, num_devices: int) -> tuple[Device, ...]:
    """``name`` in torch's words; "cpu" stands for the GPU. Several are those from 0 on.

    Where kernels are interpreted the CPU stands for each. Raises BackendError.
    """
    if is_interpreted():
        return tuple(Interpreter() for _ in range(num_devices))
    first = torch.device("cuda" if name == "cpu" else name)
    if first.type != "cuda" or not torch.cuda.is_available():
        raise BackendError(NO_GPU)
    found = torch.cuda.device_count()
    if num_devices > 1:
        if first.index is not None:
            raise BackendError(
                "--tensor-split takes the GPUs from the first on: leave --device out"
            )
        if num_devices > found:
            raise BackendError(f"--tensor-split names {num_devices} GPUs; there are {found}")
        return tuple(_gpu(i) for i in range(num_devices))
    index = first.index if first.index is not None else torch.cuda.current_device()
    if index >= found:
        raise BackendError(f"there is no GPU {index}; there are {found}")
    return (_gpu(index),)


def _gpu(index: int) -> Gpu:
    major, minor = torch.cuda.get_device_capability(index)
    if major < LEAST_CAPABILITY:
        raise BackendError(
            f"GPU {index} has compute capability {major}.{minor}; backend cuda needs "
            f"{LEAST_CAPABILITY}.0 or more"
        )
    return Gpu(torch.device("cuda", index))
