"""From a model file to stages: decided, refused, loaded, measured, sized, opened, in that order."""

from collections.abc import Sequence

import torch
from attrs import evolve

from kvtrio.backends.base import BackendError, BackendInfo, BackendSettings
from kvtrio.backends.cuda_devices import Device
from kvtrio.backends.cuda_forward import Forward
from kvtrio.backends.cuda_graphs import are_captured, graph_maker
from kvtrio.backends.cuda_measure import allowed_bytes, largest_step, smallest, step_bytes
from kvtrio.backends.cuda_memory import scratch_bytes
from kvtrio.backends.cuda_sizing import DeviceNeeds, require_fit, sized
from kvtrio.backends.cuda_split import split_layers
from kvtrio.backends.cuda_stage import Loaded, Share, Stage, load_share, open_stage, shares_of
from kvtrio.backends.cuda_staging import moves_bytes
from kvtrio.backends.cuda_weights import num_converted, passing_bytes, weight_bytes
from kvtrio.backends.groups import (
    core_groups,
    device_parts,
    host_blocks,
    layer_groups,
    pool_bytes,
    with_slots,
)
from kvtrio.backends.memory import Needs, require_memory, shrunk_host_bytes
from kvtrio.backends.torch_backend import dtype_of
from kvtrio.backends.torch_memory import available_memory
from kvtrio.backends.torch_weights import TensorFile, weight_plan
from kvtrio.core.config import Group
from kvtrio.model.spec import ModelSpec

NO_ROOM = "not enough memory on the GPU to load the model; a smaller one needs less"


def load_stages(
    devices: Sequence[Device], file: TensorFile, spec: ModelSpec, settings: BackendSettings
) -> tuple[BackendInfo, tuple[Stage, ...]]:
    """One stage per device; see ``CudaBackend.load`` on errors. ``spec`` for the context."""
    counts = split_layers(len(spec.layers), settings.tensor_split or (1.0,))
    shares = shares_of(spec, devices, counts)
    fitting = _with_ram(file, spec, settings, devices)
    least = evolve(
        _info(file, spec, fitting, devices),
        host_is_short=fitting.host_bytes < settings.host_bytes,
    )
    has_figures = all(device.has_own_memory for device in devices)
    if has_figures:
        require_fit([_foretold(file, share, settings) for share in shares], least, settings)
    try:
        loaded = [load_share(share, file, settings) for share in shares]
        if has_figures:
            least = sized(_measured(loaded, spec, least, settings), least, settings)
        info = evolve(least, pool_bytes=pool_bytes(least))
        return info, tuple(open_stage(each, info) for each in loaded)
    except torch.OutOfMemoryError:
        pass
    raise BackendError(NO_ROOM)


def _foretold(file: TensorFile, share: Share, settings: BackendSettings) -> DeviceNeeds:
    """Before anything is loaded; a step is not counted yet, and what loading needs besides is given
    back before pools are made."""
    dtype = dtype_of(settings.dtype)
    allowed, taken = allowed_bytes(share.device, settings)
    weights = weight_bytes(file, share.plan, dtype)
    return _needs(share, settings, (allowed, taken + weights, 0))


def _measured(
    loaded: Sequence[Loaded], spec: ModelSpec, least: BackendInfo, settings: BackendSettings
) -> list[DeviceNeeds]:
    """With weights where they are and the largest step done once."""
    steps = _steps(loaded, spec, smallest(least), settings)
    # Behind the step: what the driver loads for kernels is there by now.
    memory = [allowed_bytes(each.share.device, settings) for each in loaded]
    return [
        _needs(each.share, settings, (*figures, step))
        for each, figures, step in zip(loaded, memory, steps, strict=True)
    ]


def _steps(
    loaded: Sequence[Loaded], spec: ModelSpec, info: BackendInfo, settings: BackendSettings
) -> list[int]:
    """Bytes of the largest step on each device, and of the largest captured one, which keeps what
    it has; pools, as ``info`` says, are no part of it."""
    stages = [open_stage(each, info) for each in loaded]
    devices = [stage.device for stage in stages]

    def work() -> None:
        forward = Forward(spec, stages)
        with torch.inference_mode():
            # First, as it keeps what it has while the largest step runs.
            if are_captured(devices, settings):
                limits = (settings.max_sampled, settings.max_context)
                forward.capture(graph_maker(), limits, is_trial=True)
            forward.choices(largest_step(info.groups, settings))

    return step_bytes(devices, work, settings)


def _needs(share: Share, settings: BackendSettings, figures: tuple[int, int, int]) -> DeviceNeeds:
    """``figures``: bytes allowed, taken, and of a step."""
    dtype = dtype_of(settings.dtype)
    groups = core_groups(share.groups, dtype.itemsize, settings.max_context)
    return DeviceNeeds(
        name=str(share.device.place),
        allowed=figures[0],
        taken=figures[1],
        step=figures[2] + scratch_bytes(groups, settings.block_size),
        moves=moves_bytes(groups, settings.block_size),
        adapters=settings.adapter_bytes,
        groups=groups,
    )


def _with_ram(
    file: TensorFile, spec: ModelSpec, settings: BackendSettings, devices: Sequence[Device]
) -> BackendSettings:
    """The settings, with the RAM that may be taken. Raises BackendError where it is too little."""
    bare = _info(file, spec, evolve(settings, host_bytes=0), devices)
    weights = bare.weight_bytes + passing_bytes(file, weight_plan(spec))
    needs = Needs(weights=weights, pools=bare.pool_bytes, host=settings.host_bytes)
    if devices[0].has_own_memory:
        needs = evolve(needs, weights=0, pools=0)
    available = available_memory(torch.device("cpu"))
    if settings.host_may_shrink:
        needs = evolve(needs, host=shrunk_host_bytes(needs, available))
    require_memory(needs, available)
    return evolve(settings, host_bytes=needs.host)


def _info(
    file: TensorFile, spec: ModelSpec, settings: BackendSettings, devices: Sequence[Device]
) -> BackendInfo:
    """With as much on the device as requests that run may need."""
    dtype, plan = dtype_of(settings.dtype), weight_plan(spec)
    groups: tuple[Group, ...] = core_groups(
        layer_groups(spec), dtype.itemsize, settings.max_context
    )
    settings = with_slots(groups, settings)
    num_host_blocks, num_host_parts = host_blocks(groups, settings)
    info = BackendInfo(
        name="cuda",
        groups=groups,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        num_host_blocks=num_host_blocks,
        num_window_blocks=device_parts(groups, settings),
        num_host_window_blocks=num_host_parts,
        num_state_slots=settings.num_state_slots,
        num_host_state_slots=settings.num_host_state_slots or 0,
        is_unified=not devices[0].has_own_memory and settings.is_unified is not False,
        vocab_size=spec.vocab_size,
        max_context=settings.max_context,
        pool_bytes=0,
        weight_bytes=weight_bytes(file, plan, dtype),
        numerics=_numerics(devices, settings.tensor_split),
        num_converted=num_converted(file, plan),
    )
    return evolve(info, pool_bytes=pool_bytes(info))


def _numerics(devices: Sequence[Device], split: Sequence[float]) -> str:
    """Of GPUs that are not alike it counts which layers each of them has."""
    if devices[0].place.type != "cuda":
        return "triton interpreter"
    found = [torch.cuda.get_device_capability(device.place) for device in devices]
    kinds = [f"sm_{major}{minor}" for major, minor in found]
    if len(set(kinds)) == 1:
        return f"triton {kinds[0]}"
    return "triton " + " ".join(f"{k}:{part:g}" for k, part in zip(kinds, split, strict=True))
