"""Adapters on the native side.

1. Base weights are never changed. A row without an adapter is not touched, so it gets the very
   bits that it gets when no adapter is loaded.
2. A row's changes are added in the order of their digests, whoever shares the step, in float32.
"""

import ctypes

from attrs import define, field

from kvtrio.backends.base import BackendError
from kvtrio.backends.cpu_model import NativeModel
from kvtrio.backends.cpu_native import Native, address_of, table_of
from kvtrio.kernels import cpu_abi as abi
from kvtrio.model.adapter_pairs import EMBEDDING, HEAD, LowRank, adaptable
from kvtrio.model.adapters import AdapterData
from kvtrio.model.spec import ModelSpec


@define(eq=False)
class CpuAdapters:
    """All loaded adapters of one model."""

    _native: Native
    _model: NativeModel
    _spec: ModelSpec
    loaded: dict[int, int] = field(init=False, factory=dict)
    """Address of a ``kvt_adapter`` by handle."""
    _next_handle: int = field(init=False, default=1)

    def load(self, data: AdapterData) -> int:
        """Copy an adapter to the native side; returns its handle, which is never given out again.

        Raises BackendError, with nothing changed, when it is for another model or there is no
        room for it.
        """
        shapes = adaptable(self._spec)
        for name, target in data.targets.items():
            if shapes.get(name) != (len(target.b), target.a.shape[1]):
                raise BackendError("the adapter is for another model")
        parts = table_of(
            abi.LowRank, (self._part(name, target) for name, target in data.targets.items())
        )
        adapter, handle = ctypes.c_void_p(), self._next_handle
        new = self._native.cdll.kvt_adapter_new
        try:
            self._native.check(new(self._model.handle, parts, len(parts), ctypes.byref(adapter)))
        except MemoryError:
            raise BackendError("not enough memory for the adapter") from None
        self.loaded[handle] = adapter.value or 0
        self._next_handle += 1
        return handle

    def unload(self, handle: int) -> None:
        """Forget an adapter that no request uses. Raises KeyError for an unknown handle."""
        self._native.cdll.kvt_adapter_free(self.loaded.pop(handle))

    def close(self) -> None:
        """Forget all, before the model goes."""
        for handle in tuple(self.loaded):
            self.unload(handle)

    def _part(self, name: str, target: LowRank) -> abi.LowRank:
        weight = EMBEDDING if name == HEAD and self._spec.tied_output else name
        return abi.LowRank(
            a=address_of(target.a),
            b=address_of(target.b),
            matrix=self._model.matrices[weight],
            rank=len(target.a),
            scaling=target.scaling,
        )
