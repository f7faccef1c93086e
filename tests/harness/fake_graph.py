"""A graph as ``cuda_graphs`` captures it, without a GPU.

Capturing runs everything and writes down each operation of torch and each launch of a kernel, with
the tensors that it read and wrote. Replaying does the same again on the same memory, without any of
the Python between. What a real capture cannot do fails here too: looking at a value, making tensors
of numbers, a result whose shape follows from values, launching what was never launched before.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from attrs import define, field
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import InterpretedFunction

LOOKS = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
} | {torch.tensor, torch.as_tensor, torch.from_numpy}
BY_VALUE = ("nonzero", "masked_select", "bincount", "unique", "_local_scalar_dense", "equal")


class CannotCapture(Exception):
    """A real capture would fail, or would not see what happens."""


class _NoLooks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKS:
            raise CannotCapture(f"{func.__name__} needs the host")
        return func(*args, **(kwargs or {}))


@define(eq=False)
class FakeGraph:
    """Implements ``Graph``."""

    has_room: ClassVar[bool] = True
    """Whether there is memory to capture anything."""
    work: list[Callable[[], object]] = field(factory=list)
    replays: int = 0

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        if not self.has_room:
            raise torch.OutOfMemoryError
        ordinary = InterpretedFunction.run
        recorder = _Recorder(self.work)

        def launch(kernel: Any, *args: Any, **kw: Any) -> None:
            # The interpreter's own work on tensors is no operation of the step.
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                ordinary(kernel, *args, **kw)
            self.work.append(lambda: ordinary(kernel, *args, **kw))

        InterpretedFunction.run = launch
        try:
            with _NoLooks(), recorder:
                return run()
        finally:
            InterpretedFunction.run = ordinary

    def replay(self) -> None:
        self.replays += 1
        for each in self.work:
            each()


class _Recorder(TorchDispatchMode):
    def __init__(self, work: list[Callable[[], object]]) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name().split("::")[1].split(".")[0]
        if name in BY_VALUE or (name == "index" and _has_mask(args[1])):
            raise CannotCapture(f"the shape or value of {name} follows from what is in memory")
        out = func(*args, **kwargs)
        results = _tensors(out)
        known = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        is_view = all(each.untyped_storage().data_ptr() in known for each in results)
        if name.startswith(("empty", "new_empty")) or (is_view and not func._schema.is_mutable):
            return out

        def again() -> None:
            repeated = _tensors(func(*args, **kwargs))
            for mine, theirs in zip(results, repeated, strict=True):
                if mine is not theirs:
                    mine.copy_(theirs)

        self.work.append(again)
        return out


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, Tensor)]


def _has_mask(indices: Any) -> bool:
    return any(each is not None and each.dtype is torch.bool for each in indices)
