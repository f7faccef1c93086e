"""Consecutive layers of a model on one device, with all that belongs to them.

1. All stages have the same groups of layers, block tables and numbers of places; of each group a
   stage has memory for its own layers only, which may be none.
2. The first stage has the embedding, the last one the head; both where they are one matrix.
"""

from collections.abc import Sequence

import torch
from attrs import evolve, frozen

from kvtrio.backends.base import BackendInfo, BackendSettings
from kvtrio.backends.cuda_adapters import AdapterTables
from kvtrio.backends.cuda_devices import Device
from kvtrio.backends.cuda_memory import travelling, with_scratch
from kvtrio.backends.cuda_moves import Mover
from kvtrio.backends.cuda_ops import CudaOps
from kvtrio.backends.cuda_step import (
    CudaStep,
    Frame,
    build_cuda_step,
    frame_of,
    heads_of,
    padded_ratios,
)
from kvtrio.backends.cuda_weights import Plan, Weights, load_weights
from kvtrio.backends.groups import LayerGroup, layer_groups
from kvtrio.backends.torch_adapters import TorchAdapters
from kvtrio.backends.torch_backend import dtype_of, ropes_of
from kvtrio.backends.torch_caches import layer_caches
from kvtrio.backends.torch_memory import AnyPool, make_arenas
from kvtrio.backends.torch_states import layer_states
from kvtrio.backends.torch_step import StepLayout
from kvtrio.backends.torch_weights import TensorFile, weight_plan
from kvtrio.core.batch import Batch
from kvtrio.core.types import Tier
from kvtrio.model.adapter_pairs import HEAD
from kvtrio.model.adapters import AdapterData
from kvtrio.model.spec import ModelSpec


@frozen(kw_only=True, eq=False)
class Share:
    """What of a model is one device's; nothing is loaded yet."""

    device: Device
    spec: ModelSpec
    """With its own layers only."""
    is_last: bool
    """It has the head."""
    groups: tuple[LayerGroup, ...]
    """All of the model's, with its own layers only."""
    plan: Plan
    """Its weights."""

    def own(self, data: AdapterData) -> AdapterData:
        """What of an adapter is for these layers."""
        names = {part for parts in self.plan.values() for part in parts}
        has_head = HEAD if self.is_last else None
        targets = {name: t for name, t in data.targets.items() if name in names or name == has_head}
        return evolve(data, targets=targets)


@frozen(eq=False)
class Loaded:
    """A share's weights, and what does not depend on how large its pools are."""

    share: Share
    weights: Weights
    frame: Frame
    adapters: TorchAdapters


@frozen(eq=False)
class Stage:
    """A share that computes."""

    loaded: Loaded
    pools: dict[Tier, tuple[AnyPool, ...]]
    """Per tier, one pool per group; the same ones where both are one memory."""
    ops: CudaOps
    mover: Mover

    @property
    def device(self) -> Device:
        return self.loaded.share.device

    def begin(self, batch: Batch) -> CudaStep:
        """A step of these layers, without its copies. Raises KeyError for an adapter that is not
        loaded."""
        self.device.activate()  # events are of the device that is active
        return build_cuda_step(batch, self.loaded.frame)


def shares_of(
    spec: ModelSpec, devices: Sequence[Device], counts: Sequence[int]
) -> tuple[Share, ...]:
    """``counts``: layers of each device, in order."""
    groups, shares, first = layer_groups(spec), list[Share](), 0
    for device, count in zip(devices, counts, strict=True):
        part = evolve(spec, layers=spec.layers[first : first + count])
        own = {layer.index for layer in part.layers}
        is_last = first + count == len(spec.layers)
        shares.append(
            Share(
                device=device,
                spec=part,
                is_last=is_last,
                groups=tuple(
                    evolve(group, layers=tuple(i for i in group.layers if i in own))
                    for group in groups
                ),
                plan=_plan(part, first == 0, is_last),
            )
        )
        first += count
    return tuple(shares)


def _plan(part: ModelSpec, is_first: bool, is_last: bool) -> Plan:
    def is_own(name: str) -> bool:
        if name == "token_embd.weight":
            return is_first or (is_last and part.tied_output)
        return name.startswith("blk.") or is_last

    return {name: parts for name, parts in weight_plan(part).items() if is_own(name)}


def load_share(share: Share, file: TensorFile, settings: BackendSettings) -> Loaded:
    """Weights onto the device. Raises ModelFileError for damaged ones, BackendError for layers that
    cannot share tiles."""
    dtype, place = dtype_of(settings.dtype), share.device.place
    ratios = padded_ratios(share.groups, heads_of(share.spec))
    limits = (settings.max_rows, settings.max_sampled, settings.max_context)
    share.device.activate()
    with torch.inference_mode():
        weights = load_weights(file, share.plan, dtype, place)
        layout = StepLayout(
            groups=share.groups,
            ropes=ropes_of(file, share.spec),
            block_size=settings.block_size,
            dtype=dtype,
            device=place,
        )
        adapters = TorchAdapters(share.spec, place)
        frame = frame_of(layout, ratios, AdapterTables(adapters.loaded, place), limits)
    return Loaded(share, weights, frame, adapters)


def open_stage(loaded: Loaded, info: BackendInfo) -> Stage:
    """With pools as large as ``info`` says, and a place that no request has in each."""
    share, frame = loaded.share, loaded.frame
    dtype = frame.layout.dtype
    share.device.activate()
    with torch.inference_mode():
        pools = make_arenas(share.groups, with_scratch(info), dtype, share.device.place)
        pools = travelling(pools, share.device.place)
        own = pools[Tier.DEVICE]
        caches, states = layer_caches(own), layer_states(own)
        ops = CudaOps(loaded.weights, caches, states, frame.tables, dtype)
        mover = Mover(pools, share.device)
    return Stage(loaded, pools, ops, mover)
