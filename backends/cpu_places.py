"""Single blocks and slots of the cpu backend: copied, read out and written in.

A block is in as many pools as its layers have keys and values: views of them are made once, for a
saved session is thousands of blocks.
"""

import ctypes
from collections.abc import Iterator

from attrs import field, frozen

from kvtrio.backends import pages
from kvtrio.backends.cpu_model import NativeModel
from kvtrio.backends.cpu_native import Native
from kvtrio.backends.cpu_recurrent import FLOAT_BYTES
from kvtrio.backends.cpu_step import StepWriter
from kvtrio.core.batch import Copy
from kvtrio.core.types import BlockId, Tier
from kvtrio.kernels import cpu_abi as abi


@frozen(eq=False)
class _Pool:
    """What one layer has of all places of a group, one after the other."""

    address: int
    bytes_each: int
    view: memoryview
    bytes_kept: int
    """Of each; what is behind them only makes whole pages."""

    def at(self, place: int) -> memoryview:
        start = place * self.bytes_each
        return self.view[start : start + self.bytes_kept]

    def give_back(self, place: int) -> None:
        pages.give_back(self.address + place * self.bytes_each, self.bytes_each)


def _pool(
    address: int | None, bytes_each: int, num_places: int, bytes_kept: int | None = None
) -> _Pool:
    memory = (ctypes.c_ubyte * (bytes_each * num_places)).from_address(address or 0)
    view = memoryview(memory).cast("B")
    return _Pool(address or 0, bytes_each, view, bytes_each if bytes_kept is None else bytes_kept)


@frozen(eq=False)
class CpuPlaces:
    """Implements ``moves.Places``."""

    native: Native
    model: NativeModel
    writer: StepWriter
    _caches: dict[int, list[abi.Cache]] = field(init=False, factory=dict)
    """Of each group's layers with attention, each as if it were alone."""
    _slots: dict[int, list[_Pool]] = field(init=False, factory=dict)
    _blocks: dict[int, list[_Pool]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        stores = self.model.stored.stores
        for layer, state in stores.states.items():
            num_kept = stores.state_bytes[layer]
            pool = _pool(state.data, FLOAT_BYTES * state.stride, state.num_slots, num_kept)
            self._slots.setdefault(state.group, []).append(pool)
        for cache in stores.caches.values():
            alone = abi.Cache.from_buffer_copy(cache)
            alone.group = 0
            self._caches.setdefault(cache.group, []).append(alone)
            self._blocks.setdefault(cache.group, []).extend(self._pools(cache))

    def copy(self, copy: Copy) -> None:
        """In a step without rows, which the native side does not know."""
        source = self.writer.place(copy.group, copy.source, copy.source_tier)
        target = self.writer.place(copy.group, copy.target, copy.target_tier)
        for cache in self._caches.get(copy.group, ()):
            cdll = self.native.cdll
            self.native.check(cdll.kvt_cache_copy(cache, source, target, copy.num_tokens))
        for pool in self._slots.get(copy.group, ()):
            pool.at(target)[:] = pool.at(source)

    def read(self, group: int, place: BlockId, tier: Tier, num_tokens: int) -> bytes:
        """Keys, then values, or states, layer by layer."""
        block = self.writer.place(group, place, tier)
        whole = b"".join(self._spans(group, block))
        partial = [c for c in self._caches.get(group, ()) if num_tokens < c.block_size]
        if not partial:
            return whole
        for cache in partial:
            self._clear_rest(cache, block, num_tokens)
        cleared = b"".join(self._spans(group, block))
        # A longer sequence may go on there: it is found as it was.
        self.write(group, place, tier, whole)
        return cleared

    def write(self, group: int, place: BlockId, tier: Tier, part: bytes) -> None:
        """With what ``read`` gave."""
        start, given = 0, memoryview(part)
        for span in self._spans(group, self.writer.place(group, place, tier)):
            span[:] = given[start : start + len(span)]
            start += len(span)
        assert start == len(part), "a part has its group's size"

    def give_back(self, group: int, place: BlockId, tier: Tier) -> None:
        """See ``moves.Places``."""
        block = self.writer.place(group, place, tier)
        for pools in (self._slots, self._blocks):
            for pool in pools.get(group, ()):
                pool.give_back(block)

    def _clear_rest(self, cache: abi.Cache, block: int, num_tokens: int) -> None:
        """What lies behind a block's first tokens is nothing that a file may show."""
        zeros = [
            (ctypes.c_float * (cache.kv_heads * dim))() for dim in (cache.head_dim, cache.value_dim)
        ]
        for place in range(num_tokens, cache.block_size):
            self.native.check(self.native.cdll.kvt_cache_write(cache, block, place, *zeros))

    def _spans(self, group: int, block: int) -> Iterator[memoryview]:
        """All that the block, or slot, has."""
        for pools in (self._slots, self._blocks):
            for pool in pools.get(group, ()):
                yield pool.at(block)

    def _pools(self, cache: abi.Cache) -> Iterator[_Pool]:
        """Keys and values of a layer; a latent one has no values besides."""
        cdll, number = self.native.cdll, cache.num_blocks
        yield _pool(cache.keys, cdll.kvt_key_block_bytes(cache), number)
        if not cache.is_latent:
            yield _pool(cache.values, cdll.kvt_value_block_bytes(cache), number)
