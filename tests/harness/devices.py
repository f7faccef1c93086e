"""What stands for a GPU: figures of its memory, and streams that are late, or in any order."""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvtrio.backends.cuda_devices import AtOnce, Stream, Work

Mark = tuple["Lagging", int]


@define(eq=False)
class FakeDevice:
    """The CPU with a memory of its own, of which somebody says how much is free."""

    total_bytes: int = 1 << 40
    free_bytes: int = 1 << 40
    """With weights loaded."""
    peak: int = 0
    """What a step takes."""
    compute: Stream = field(factory=AtOnce)
    copies: Stream = field(factory=AtOnce)
    has_own_memory: bool = True
    place: torch.device = field(init=False, factory=lambda: torch.device("cpu"))
    num_brought: int = field(init=False, default=0)
    num_relieved: int = field(init=False, default=0)
    num_measured: int = field(init=False, default=0)

    def activate(self) -> None:
        pass

    def memory(self) -> tuple[int, int]:
        return self.free_bytes, self.total_bytes

    def peak_bytes(self, work: Work) -> int:
        work()
        self.num_measured += 1
        return self.peak

    def relieve(self) -> None:
        self.num_relieved += 1

    def bring(self, x: Tensor) -> Tensor:
        self.num_brought += 1
        return x.clone()


@define(eq=False)
class Lagging:
    """A stream whose work is done when somebody must have it, or when ``rng`` likes."""

    _rng: Random
    others: "list[Lagging]" = field(factory=list)
    """All streams of the device, itself included."""
    _left: deque[Callable[[], None] | Mark] = field(init=False, factory=deque)
    _num_put: int = field(init=False, default=0)
    num_done: int = field(init=False, default=0)

    def run(self, work: Work) -> None:
        self._put(work)

    def mark(self) -> object:
        return self, self._num_put

    def wait(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        self._put(mark)

    def synchronise(self) -> None:
        while self._left:
            self._advance_any()

    def _put(self, work: Callable[[], None] | Mark) -> None:
        self._left.append(work)
        self._num_put += 1
        while self._rng.random() < 0.4:
            self._advance_any()

    def _advance_any(self) -> None:
        ready = [stream for stream in self.others if stream.can_go_on]
        if ready:
            self._rng.choice(ready).go_on()

    @property
    def can_go_on(self) -> bool:
        head = self._left[0] if self._left else None
        return head is not None and (not isinstance(head, tuple) or head[0].num_done >= head[1])

    def go_on(self) -> None:
        head = self._left.popleft()
        self.num_done += 1
        if not isinstance(head, tuple):
            head()


@define(eq=False)
class Prompt:
    """A stream that does its work at once, behind what it waits for."""

    def run(self, work: Work) -> None:
        work()

    def mark(self) -> object:
        return self, 0

    def wait(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        stream, num = mark
        while stream.num_done < num:
            stream.go_on()

    def synchronise(self) -> None:
        pass

    @property
    def num_done(self) -> int:
        return 0


class _OnePiece(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            assert args[0].is_contiguous()
            assert args[1].is_contiguous()
        return func(*args, **(kwargs or {}))


@define(eq=False)
class Bus(AtOnce):
    """What travels on it must lie in one piece on both sides: of anything else torch makes a copy
    in memory that is not pinned, and waits for it."""

    def run(self, work: Work) -> None:
        with _OnePiece():
            work()


def late_device() -> FakeDevice:
    """Copies travel when somebody waits for them, and no sooner."""
    copies = Lagging(Never())
    copies.others.append(copies)
    return FakeDevice(has_own_memory=False, compute=Prompt(), copies=copies)


class Never(Random):
    """Nothing goes on by itself."""

    def random(self) -> float:
        return 1.0


def lagging_device(rng: Random) -> FakeDevice:
    """Both streams lag, and overtake each other wherever no mark forbids it."""
    compute, copies = Lagging(rng), Lagging(rng)
    for stream in (compute, copies):
        stream.others += [compute, copies]
    return FakeDevice(compute=compute, copies=copies)
