"""Steps of decoding rows alone, captured once per number of rows and launched as a whole.

1. A captured step has as many rows as it was captured for. Those that stand for no request compute
   like others, and write into places that no request has.
2. It reads the device's arena and writes its logits where all captured steps do: nothing of the
   host's is looked at between the copy to the arena and the logits.
3. What adapters touch is known only when they are loaded, so steps with adapters are captured when
   the first of their size comes. All others are captured at start.
4. Padding never crosses a border at which kernels take other tiles, so a row has the bits that it
   has in an uncaptured step wherever a kernel promises them at all.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor
from tqdm import tqdm

from kvtrio.backends.base import BackendSettings
from kvtrio.backends.cuda_adapters import MOST_USES, require_loaded
from kvtrio.backends.cuda_devices import Device
from kvtrio.backends.cuda_step import CudaStep, Frame, Room, build_cuda_step, padded
from kvtrio.core.batch import Batch, Chunk
from kvtrio.core.identity import effective
from kvtrio.core.types import BlockId, RequestId

MOST_ROWS = 256
"""Of a captured step: above it launches take less time than what they launch."""
SIZES = (1, 2, 4, *range(8, MOST_ROWS + 1, 8))


class Graph(Protocol):
    """One captured step."""

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        """Record all that ``run`` launches; returns where it writes its result. Everything that it
        launches was launched before."""
        ...

    def replay(self) -> None:
        """Launch all of it again, on the same memory, behind what the present stream has."""
        ...


@define(eq=False)
class CudaGraph:
    """A real one."""

    _pool: Any
    """Memory that captured steps share: only one of them runs at a time."""
    _graph: torch.cuda.CUDAGraph = field(init=False, factory=torch.cuda.CUDAGraph)

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        # Other threads, that of the event loop for one, may go on using the GPU's driver.
        mode = "thread_local"
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode=mode):
            return run()

    def replay(self) -> None:
        self._graph.replay()


def graph_maker() -> Callable[[], Graph]:
    """Of real ones, which share one piece of memory."""
    return partial(CudaGraph, torch.cuda.graph_pool_handle())


def are_captured(devices: Sequence[Device], settings: BackendSettings) -> bool:
    """Whether decoding steps are: on one GPU, unless the user does not want it."""
    return settings.graphs and [device.place.type for device in devices] == ["cuda"]


@frozen(kw_only=True, eq=False)
class Capturing:
    """What is captured, and how."""

    frame: Frame
    forward: Callable[[CudaStep], Tensor]
    """Logits float32 [rows, vocab]."""
    make: Callable[[], Graph]
    scratch: tuple[BlockId, ...]
    """By group, a place that no request has."""
    max_rows: int
    """Most requests of a step."""
    max_context: int


@frozen(eq=False)
class _Captured:
    graph: Graph
    logits: Tensor


@define(eq=False)
class DecodeGraphs:
    """The captured steps of one device."""

    _own: Capturing
    _sizes: tuple[int, ...] = field(init=False)
    _bare: dict[int, _Captured] = field(init=False, factory=dict)
    _adapted: dict[int, _Captured | None] = field(init=False, factory=dict)
    """None: there was no memory for it."""
    _logits: Tensor | None = field(init=False, default=None)
    """float32 [largest size, vocab]: all captured steps write here, as their own would take
    gigabytes together."""
    _version: int = field(init=False, default=0)
    """Of the adapters that ``_adapted`` knows."""

    def __attrs_post_init__(self) -> None:
        most = min(self._own.max_rows, MOST_ROWS)
        largest = next(size for size in SIZES if size >= most)
        self._sizes = tuple(size for size in SIZES if size <= largest)

    def capture(self, is_trial: bool = False) -> None:
        """All sizes, the largest first, as the others then find its memory; as a trial that one."""
        chosen = self._sizes[::-1][: 1 if is_trial else None]
        # Shown only on a terminal (disable=None), and only when it takes a while.
        with tqdm(chosen, "capturing", unit="size", delay=1, disable=None) as sizes:
            for size in sizes:
                self._bare[size] = self._capture(size, False)

    def serves(self, batch: Batch) -> bool:
        """Whether it is a step of decoding rows alone, and not too many of anything."""
        chunks = batch.chunks
        return (
            0 < len(chunks) <= self._sizes[-1]
            and all(len(chunk.token_ids) == 1 for chunk in chunks)
            and all(len(chunk.adapters) <= MOST_USES for chunk in chunks)
        )

    def logits(self, batch: Batch) -> Tensor | None:
        """Of the sampled rows, float32 [M, vocab]; valid until the next step. None where there was
        no memory to capture it.

        ``batch``: one that is served. Raises as ``build_cuda_step``.
        """
        size = next(size for size in self._sizes if size >= len(batch.chunks))
        with_adapters = any(effective(chunk.adapters) for chunk in batch.chunks)
        require_loaded(batch.chunks, self._own.frame.tables.places())
        captured = self._adapters(size) if with_adapters else self._bare[size]
        if captured is None:
            return None
        self._build(padded(batch, self._padding(), size), with_adapters)
        captured.graph.replay()
        rows = [i for i, chunk in enumerate(batch.chunks) if chunk.sample]
        if len(rows) == len(batch.chunks):
            return captured.logits[: len(rows)]
        return captured.logits[rows]

    def _adapters(self, size: int) -> _Captured | None:
        """Captured now, if it was not since adapters changed."""
        version = self._own.frame.tables.version
        if self._version != version:
            self._version = version
            self._adapted.clear()
        if size not in self._adapted:
            self._adapted[size] = None
            with suppress(torch.OutOfMemoryError):
                self._adapted[size] = self._capture(size, True)
        return self._adapted[size]

    def _capture(self, size: int, with_adapters: bool) -> _Captured:
        step = self._build(Batch(0, (self._padding(),) * size), with_adapters)
        # Compiles the kernels, and makes whatever is made once: nothing of that can be captured.
        first = self._own.forward(step)
        if self._logits is None:
            self._logits = first.new_empty(self._sizes[-1], first.shape[-1])
        target, graph = self._logits[:size], self._own.make()
        return _Captured(graph, graph.capture(lambda: target.copy_(self._own.forward(step))))

    def _build(self, batch: Batch, with_adapters: bool) -> CudaStep:
        room = Room(max_keys=self._own.max_context, with_adapters=with_adapters)
        step = build_cuda_step(batch, self._own.frame, room)
        assert not self._own.frame.arena.is_overfull, "an arena holds the largest step"
        return step

    def _padding(self) -> Chunk:
        tables = tuple((place,) for place in self._own.scratch)
        return Chunk(RequestId(-1), 0, (0,), tables)
