"""Backend ``torch``: the reference kernels on any torch device, weights dequantised at load."""

from typing import Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from kvtrio.backends import decoder
from kvtrio.backends.base import BackendError, BackendInfo, BackendSettings
from kvtrio.backends.groups import (
    core_groups,
    device_parts,
    device_slots,
    host_sizes,
    layer_groups,
    pool_bytes,
    ram_budget,
)
from kvtrio.backends.memory import Needs, Room, Sizing, require_room, shrunk_host_bytes
from kvtrio.backends.moves import run_moves
from kvtrio.backends.torch_adapters import TorchAdapters
from kvtrio.backends.torch_caches import layer_caches
from kvtrio.backends.torch_memory import (
    AnyPool,
    available_memory,
    give_back_place,
    make_arenas,
    places_are_pages,
    read_place,
    run_copy,
    write_place,
)
from kvtrio.backends.torch_ops import TorchOps
from kvtrio.backends.torch_states import layer_states
from kvtrio.backends.torch_step import StepLayout, TorchStep, build_step
from kvtrio.backends.torch_weights import (
    TensorFile,
    load_weights,
    passing_bytes,
    weight_bytes,
)
from kvtrio.core.batch import Batch, Copy, StepResult
from kvtrio.core.types import BlockId, Tier
from kvtrio.model.adapters import AdapterData
from kvtrio.model.spec import (
    AttentionSpec,
    LatentAttentionSpec,
    ModelSpec,
    RopeSpec,
    RopeStyle,
)

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@frozen(eq=False)
class Parts:
    """What a loaded backend consists of."""

    info: BackendInfo
    layout: StepLayout
    pools: dict[Tier, tuple[AnyPool, ...]]
    """Per tier, one pool per group; the same ones where the device is the host."""
    ops: TorchOps
    adapters: TorchAdapters


class TorchBackend:
    """Implements ``Backend``; make one with ``load``."""

    def __init__(self, spec: ModelSpec, parts: Parts) -> None:
        self._spec = spec
        self._parts: Parts | None = parts

    @classmethod
    def load(cls, file: TensorFile, spec: ModelSpec, settings: BackendSettings) -> Self:
        """Load the weights and set up the pools. ``file`` is not needed afterwards.

        Raises BackendError, before it allocates anything, for an unknown type, a device that is
        not there, too little memory, or a recurrent model without slots for its state;
        ModelFileError for damaged weights.
        """
        dtype, device = dtype_of(settings.dtype), device_of(settings.device)
        spec = spec.for_context(settings.max_context)
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        torch.set_float32_matmul_precision("highest")
        sizing = _sized(file, spec, settings, device)
        sizing.require()
        info = sizing.info
        with torch.inference_mode():
            weights = load_weights(file, spec, dtype, device)
            groups = layer_groups(spec)
            pools = make_arenas(groups, info, dtype, device)
            layout = StepLayout(
                groups=groups,
                ropes=ropes_of(file, spec),
                block_size=settings.block_size,
                dtype=dtype,
                device=device,
            )
            own = pools[Tier.DEVICE]
            ops = TorchOps(weights, layer_caches(own), layer_states(own), dtype)
        return cls(spec, Parts(info, layout, pools, ops, TorchAdapters(spec, device)))

    @classmethod
    def sizing(cls, file: TensorFile, spec: ModelSpec, settings: BackendSettings) -> Sizing:
        """What ``load`` would take. Raises as it does, but not for too little memory."""
        spec = spec.for_context(settings.max_context)
        return _sized(file, spec, settings, device_of(settings.device))

    @property
    def info(self) -> BackendInfo:
        return self._open().info

    def step(self, batch: Batch) -> StepResult:
        """See ``Backend.step``."""
        ops = self._open().ops
        with torch.inference_mode():
            saved = run_moves(self, batch)
            step = self._begin(batch)
            sampled = iter(decoder.forward(self._spec, ops, step) if batch.chunks else ())
        each = tuple(next(sampled) if chunk.sample else None for chunk in batch.chunks)
        return StepResult(each, saved)

    def logits(self, batch: Batch) -> Tensor:
        """Run a step without choosing: raw logits of the sampled rows, float32 [M, vocab]."""
        ops = self._open().ops
        with torch.inference_mode():
            run_moves(self, batch)
            return decoder.logits(self._spec, ops, self._begin(batch))

    def load_adapter(self, data: AdapterData) -> int:
        """See ``Backend.load_adapter``."""
        parts = self._open()
        require_room(data.num_bytes, available_memory(parts.layout.device))
        with torch.inference_mode():
            return parts.adapters.load(data)

    def unload_adapter(self, adapter_id: int) -> None:
        """See ``Backend.unload_adapter``. Raises KeyError for an unknown handle."""
        self._open().adapters.unload(adapter_id)

    def copy(self, copy: Copy) -> None:
        """See ``moves.Places``."""
        pools = self._open().pools
        run_copy(pools[copy.source_tier], pools[copy.target_tier], copy)

    def read(self, group: int, place: BlockId, tier: Tier, num_tokens: int) -> bytes:
        """See ``moves.Places``."""
        return read_place(self._open().pools[tier][group], place, num_tokens)

    def write(self, group: int, place: BlockId, tier: Tier, part: bytes) -> None:
        """See ``moves.Places``."""
        write_place(self._open().pools[tier][group], place, part)

    def give_back(self, group: int, place: BlockId, tier: Tier) -> None:
        """See ``moves.Places``."""
        give_back_place(self._open().pools[tier][group], place)

    def close(self) -> None:
        """Give the memory back. Idempotent; no other call may follow."""
        self._parts = None

    def _open(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("the backend is closed")
        return self._parts

    def _begin(self, batch: Batch) -> TorchStep:
        """Copies first: a chunk may read what they bring."""
        parts = self._open()
        for copy in batch.copies:
            self.copy(copy)
        return build_step(batch, parts.layout, parts.adapters.loaded)


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise BackendError(f"unknown type; known are {', '.join(DTYPES)}")
    return DTYPES[name]


def device_of(name: str) -> torch.device:
    """The device, proven to work by a small allocation."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise BackendError(f"device {name!r} is not available in this torch") from None
    return device


def _sized(
    file: TensorFile, spec: ModelSpec, settings: BackendSettings, device: torch.device
) -> Sizing:
    rooms = _rooms(file, spec, settings, device)
    host_bytes = rooms[-1].needs.host
    info = evolve(
        _info(file, spec, evolve(settings, host_bytes=host_bytes)),
        host_is_short=host_bytes < settings.host_bytes,
    )
    return Sizing(info=info, rooms=rooms)


def _rooms(
    file: TensorFile, spec: ModelSpec, settings: BackendSettings, device: torch.device
) -> tuple[Room, ...]:
    """Of the device and, where that is another memory, RAM; the last has what RAM may be taken."""
    bare = _info(file, spec, evolve(settings, host_bytes=0))
    weights = bare.weight_bytes + passing_bytes(file, spec)
    needs = Needs(weights=weights, pools=bare.pool_bytes, host=settings.host_bytes)
    rooms: tuple[Room, ...] = ()
    if not bare.is_unified and device.type != "cpu":
        # Weights and pools have a memory of their own.
        rooms = (Room(needs=evolve(needs, host=0), available=available_memory(device)),)
        needs, device = evolve(needs, weights=0, pools=0), torch.device("cpu")
    available = available_memory(device)
    if settings.host_may_shrink:
        needs = evolve(needs, host=shrunk_host_bytes(needs, available))
    return (*rooms, Room(needs=needs, available=available))


def _info(file: TensorFile, spec: ModelSpec, settings: BackendSettings) -> BackendInfo:
    dtype = dtype_of(settings.dtype)
    layers = layer_groups(spec)
    groups = core_groups(layers, dtype.itemsize, settings.max_context)
    can_give_back = places_are_pages(layers, settings.block_size, dtype)
    ram = ram_budget(groups, settings) if can_give_back else None
    host = host_sizes(groups, settings, ram)
    info = BackendInfo(
        name="torch",
        groups=groups,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        num_host_blocks=host.num_blocks,
        num_window_blocks=device_parts(groups, settings),
        num_host_window_blocks=host.num_parts,
        num_state_slots=device_slots(groups, settings),
        num_host_state_slots=host.num_slots,
        ram=host.ram,
        is_unified=_is_unified(settings),
        vocab_size=spec.vocab_size,
        max_context=settings.max_context,
        pool_bytes=0,
        weight_bytes=weight_bytes(file, spec, dtype),
    )
    return evolve(info, pool_bytes=pool_bytes(info))


def _is_unified(settings: BackendSettings) -> bool:
    if settings.is_unified is not None:
        return settings.is_unified
    return torch.device(settings.device).type == "cpu"


def ropes_of(file: TensorFile, spec: ModelSpec) -> dict[RopeSpec, Tensor | None]:
    mixers = (layer.mixer for layer in spec.layers)
    attending = AttentionSpec | LatentAttentionSpec
    kinds = {mixer.rope for mixer in mixers if isinstance(mixer, attending)}
    return {
        rope: _divisors(file, rope)
        for rope in sorted(kinds, key=repr)
        if rope.style is not RopeStyle.NONE
    }


def _divisors(file: TensorFile, rope: RopeSpec) -> Tensor | None:
    if rope.factors is not None:
        return torch.from_numpy(file.dequantise(rope.factors))
    return torch.tensor(rope.divisors, dtype=torch.float64) if rope.divisors else None
