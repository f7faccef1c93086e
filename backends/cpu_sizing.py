"""What a model would take on backend ``cpu``, before anything is allocated."""

from attrs import evolve, frozen

from kvtrio.backends.base import BackendInfo, BackendSettings
from kvtrio.backends.cpu_memory import (
    GroupSize,
    activation_bytes,
    core_groups,
    group_sizes,
    paged,
    places_are_pages,
    rounding,
)
from kvtrio.backends.cpu_native import Native
from kvtrio.backends.cpu_weights import (
    MatrixPlan,
    TensorFile,
    passing_bytes,
    plan_matrices,
    weight_bytes,
)
from kvtrio.backends.groups import (
    LayerGroup,
    device_parts,
    device_slots,
    host_sizes,
    layer_groups,
    pool_bytes,
    ram_budget,
)
from kvtrio.backends.memory import Needs, Room, Sizing, ram_available, shrunk_host_bytes
from kvtrio.model.spec import ModelSpec


@frozen(eq=False)
class Plan:
    """How a model will lie in memory; nothing is allocated yet."""

    matrices: tuple[MatrixPlan, ...]
    groups: tuple[LayerGroup, ...]
    sizes: tuple[GroupSize, ...]


def sized(
    native: Native, file: TensorFile, spec: ModelSpec, settings: BackendSettings
) -> tuple[Plan, Sizing]:
    groups = layer_groups(spec)
    sizes = group_sizes(native, spec, groups, settings)
    plan = Plan(plan_matrices(native, file, spec), groups, sizes)
    room = _room(native, plan, spec, settings)
    fitting = evolve(settings, host_bytes=room.needs.host)
    info = evolve(
        _info(native, plan, spec, fitting),
        host_is_short=fitting.host_bytes < settings.host_bytes,
    )
    return plan, Sizing(info=info, rooms=(room,))


def _room(native: Native, plan: Plan, spec: ModelSpec, settings: BackendSettings) -> Room:
    """With the RAM that may be taken."""
    bare = _info(native, plan, spec, evolve(settings, host_bytes=0))
    weights = weight_bytes(plan.matrices, spec) + passing_bytes(plan.matrices)
    needs = Needs(
        weights=weights + activation_bytes(spec, settings),
        pools=bare.pool_bytes + rounding(_info(native, plan, spec, settings)),
        host=settings.host_bytes,
    )
    available = ram_available()
    if settings.host_may_shrink:
        needs = evolve(needs, host=shrunk_host_bytes(needs, available))
    return Room(needs=needs, available=available)


def _info(native: Native, plan: Plan, spec: ModelSpec, settings: BackendSettings) -> BackendInfo:
    groups = core_groups(plan.groups, plan.sizes, settings)
    ram = None
    if places_are_pages(plan.sizes):
        ram = ram_budget(core_groups(plan.groups, paged(plan.sizes), settings), settings)
    host = host_sizes(groups, settings, ram)
    info = BackendInfo(
        name="cpu",
        groups=groups,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        num_host_blocks=host.num_blocks,
        num_window_blocks=device_parts(groups, settings),
        num_host_window_blocks=host.num_parts,
        num_state_slots=device_slots(groups, settings),
        num_host_state_slots=host.num_slots,
        ram=host.ram,
        is_unified=settings.is_unified is not False,
        vocab_size=spec.vocab_size,
        max_context=settings.max_context,
        pool_bytes=0,
        weight_bytes=weight_bytes(plan.matrices, spec),
        numerics=native.isa,
        num_converted=sum(each.kept != each.stored for each in plan.matrices),
    )
    return evolve(info, pool_bytes=pool_bytes(info) + rounding(info))
