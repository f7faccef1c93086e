"""Single blocks and slots of the cpu backend: copied, read out and written in."""

import ctypes
from collections.abc import Iterator

from attrs import frozen

from kvtrio.backends.cpu_model import NativeModel
from kvtrio.backends.cpu_native import Native
from kvtrio.backends.cpu_recurrent import FLOAT_BYTES
from kvtrio.backends.cpu_step import StepWriter
from kvtrio.core.batch import Copy
from kvtrio.core.types import BlockId, Tier
from kvtrio.kernels import cpu_abi as abi

Span = tuple[int, int]
"""Address and bytes."""


@frozen(eq=False)
class CpuPlaces:
    """Implements ``moves.Places``."""

    native: Native
    model: NativeModel
    writer: StepWriter

    def copy(self, copy: Copy) -> None:
        """In a step without rows, which the native side does not know."""
        source = self.writer.place(copy.group, copy.source, copy.source_tier)
        target = self.writer.place(copy.group, copy.target, copy.target_tier)
        for cache in self._caches(copy.group):
            cdll = self.native.cdll
            self.native.check(cdll.kvt_cache_copy(cache, source, target, copy.num_tokens))
        spans = zip(self._slots(copy.group, source), self._slots(copy.group, target), strict=True)
        for (theirs, num_bytes), (mine, _) in spans:
            ctypes.memmove(mine, theirs, num_bytes)

    def read(self, group: int, place: BlockId, tier: Tier, num_tokens: int) -> bytes:
        """Keys, then values, or states, layer by layer."""
        block = self.writer.place(group, place, tier)
        for cache in self._caches(group):
            self._clear_rest(cache, block, num_tokens)
        spans = self._spans(group, block)
        return b"".join(ctypes.string_at(address, num_bytes) for address, num_bytes in spans)

    def write(self, group: int, place: BlockId, tier: Tier, part: bytes) -> None:
        """With what ``read`` gave."""
        start = 0
        for address, num_bytes in self._spans(group, self.writer.place(group, place, tier)):
            ctypes.memmove(address, part[start : start + num_bytes], num_bytes)
            start += num_bytes
        assert start == len(part), "a part has its group's size"

    def _clear_rest(self, cache: abi.Cache, block: int, num_tokens: int) -> None:
        """Nobody reads what lies behind a block's tokens, but a file would show it."""
        if num_tokens == cache.block_size:
            return
        zeros = [
            (ctypes.c_float * (cache.kv_heads * dim))() for dim in (cache.head_dim, cache.value_dim)
        ]
        for place in range(num_tokens, cache.block_size):
            self.native.check(self.native.cdll.kvt_cache_write(cache, block, place, *zeros))

    def _spans(self, group: int, block: int) -> Iterator[Span]:
        """All that the block, or slot, has."""
        yield from self._slots(group, block)
        for cache in self._caches(group):
            for pool, size in (
                (cache.keys, self.native.cdll.kvt_key_block_bytes(cache)),
                (cache.values, self.native.cdll.kvt_value_block_bytes(cache)),
            ):
                yield pool + block * size, size

    def _slots(self, group: int, slot: int) -> Iterator[Span]:
        """States in the slot, of all recurrent layers of the group."""
        for state in self.model.stored.stores.states.values():
            if state.group == group:
                num_bytes = FLOAT_BYTES * state.stride
                yield state.data + slot * num_bytes, num_bytes

    def _caches(self, group: int) -> list[abi.Cache]:
        """Of the group's layers with attention, each as if it were alone."""
        caches = []
        for cache in self.model.stored.stores.caches.values():
            if cache.group == group:
                alone = abi.Cache.from_buffer_copy(cache)
                alone.group = 0
                caches.append(alone)
        return caches
