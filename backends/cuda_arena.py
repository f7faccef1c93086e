"""What a step brings to the device: one piece of memory, one copy.

1. Values are written into memory that the GPU reads by itself, so nobody waits for their copy; and
   that memory is not written again before the copy has read it.
2. Who puts values of the same sizes in the same order gets the same addresses: a captured step
   reads the next one's values there.
3. Without a GPU there are two pieces of RAM and the same copy between them.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from kvtrio.kernels.triton_common import ALIGNMENT

INTS = {torch.int32: np.int32, torch.int64: np.int64}
MAX_VIEWS = 4096


@define(eq=False)
class Arena:
    """Memory of one step after the other."""

    device: torch.device
    capacity: int
    """Bytes. What does not fit goes over by itself, slower."""
    is_overfull: bool = field(init=False, default=False)
    """Something did not fit, since ``begin``."""
    _host: Tensor = field(init=False)
    _own: Tensor = field(init=False)
    _bytes: np.ndarray = field(init=False)
    """The host's, for numpy."""
    _views: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = field(init=False, factory=dict)
    _used: int = field(init=False, default=0)
    _copied: torch.cuda.Event | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        on_gpu = self.device.type == "cuda"
        self._host = torch.zeros(self.capacity, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = self._host.numpy()
        self._own = torch.zeros(self.capacity, dtype=torch.uint8, device=self.device)
        if on_gpu:
            # torch has no annotations for making an event.
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """The last step's values are not needed any more."""
        if self._copied is not None:
            self._copied.synchronize()
        self._used, self.is_overfull = 0, False

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """As ``put``: [N]; int32 or int64."""
        first = self._taken(len(values) * dtype.itemsize)
        if first is None:
            return torch.tensor(values, dtype=dtype).to(self.device)
        part = self._bytes[first : self._used].view(INTS[dtype])
        part[:] = values
        return self._view(first, (len(values),), dtype)

    def put(self, values: Tensor) -> Tensor:
        """Where these will be on the device behind the next ``send``: the same type and shape.

        values: in RAM. Valid until the next ``begin``.
        """
        first = self._taken(prod(values.shape) * values.itemsize)
        if first is None:
            return values.to(self.device)
        self._host[first : self._used].view(values.dtype).view(values.shape).copy_(values)
        return self._view(first, tuple(values.shape), values.dtype)

    def _taken(self, num_bytes: int) -> int | None:
        """Where so many bytes begin; None: they do not fit."""
        first = -(-self._used // ALIGNMENT) * ALIGNMENT
        if first + num_bytes > self.capacity:
            self.is_overfull = True
            return None
        self._used = first + num_bytes
        return first

    def _view(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Kept from step to step, as making one takes longer than filling it."""
        key = (first, shape, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            found = self._own[first : self._used].view(dtype).view(shape)
            self._views[key] = found
        return found

    def send(self) -> None:
        """Everything put since ``begin``, in the order of the present stream."""
        part = slice(self._used)
        self._own[part].copy_(self._host[part], non_blocking=True)
        if self._copied is not None:
            # Of this device, which need not be the one whose kernels are launched at present.
            self._copied.record(torch.cuda.current_stream(self.device))
