"""How much of a device's memory is for KV, states and adapters: what ``--gpu-memory-fraction``
leaves when the weights are loaded and a step was measured.

1. Of all memory a fraction is ours; what others have of the device counts against it.
2. Every request that runs has its longest context, as on other backends: less is refused. What is
   left beyond keeps past state on the device, shared out as RAM is (``groups.host_blocks``).
3. Adapters have a part of the same bytes. What an unloaded one had is there for the next.
4. Of several devices the tightest decides: all have the same number of places.
"""

from collections.abc import Sequence

from attrs import evolve, frozen

from kvtrio.backends.base import BackendError, BackendInfo, BackendSettings, DeviceMemory
from kvtrio.backends.groups import device_parts, host_blocks, with_slots
from kvtrio.backends.memory import mib
from kvtrio.core.config import Group
from kvtrio.core.types import StateClass

ADAPTERS_PART = 8
"""Where adapters may come at run time, they have one part in so many of what is beyond the longest
contexts."""


@frozen(kw_only=True)
class DeviceNeeds:
    """Bytes of one device, before its pools are made."""

    name: str
    allowed: int
    """In all."""
    taken: int
    """By weights, and by others."""
    step: int
    """At most, for the values of a step."""
    moves: int
    """Staging memory."""
    adapters: int
    """Known at the start."""
    groups: tuple[Group, ...]
    """All of the model's, with this device's bytes."""

    @property
    def room(self) -> int:
        """For pools and adapters; less than 0 where the rest is too much already."""
        return self.allowed - self.taken - self.step - self.moves


def least_pools(groups: Sequence[Group], info: BackendInfo) -> int:
    """Bytes of one device's pools; ``groups`` with its bytes, ``info`` with the places."""
    return sum(
        info.places(i)[0] * (group.bytes_per_token * info.block_size + group.bytes_per_state)
        for i, group in enumerate(groups)
    )


def require_fit(
    devices: Sequence[DeviceNeeds], least: BackendInfo, settings: BackendSettings
) -> None:
    """Raise BackendError, with the sum, when a device has no room for all that may run at once."""
    for needs in devices:
        pools = least_pools(needs.groups, least)
        if needs.room >= pools + needs.adapters:
            continue
        parts = {
            "weights and others": needs.taken,
            "a step": needs.step,
            "moves": needs.moves,
            "--lora": needs.adapters,
            f"KV of {settings.max_sampled} requests": pools,
        }
        total = sum(parts.values())
        listed = " + ".join(f"{name} {mib(size)}" for name, size in parts.items())
        raise BackendError(
            f"not enough memory on {needs.name}: {listed} = {mib(total)}, and "
            f"--gpu-memory-fraction {settings.gpu_memory_fraction:g} leaves {mib(needs.allowed)}; "
            + _advice(needs, least, settings)
        )


def _advice(needs: DeviceNeeds, least: BackendInfo, settings: BackendSettings) -> str:
    for num_places in range(settings.max_sampled - 1, 0, -1):
        fewer = _of_places(num_places, least, settings)
        if needs.room >= least_pools(needs.groups, fewer) + needs.adapters:
            return f"--parallel {num_places} fits, or a smaller --ctx-size"
    return (
        f"not even one request of {settings.max_context} tokens fits: a smaller --ctx-size, "
        "--batch-size or model needs less"
    )


def _of_places(num_places: int, least: BackendInfo, settings: BackendSettings) -> BackendInfo:
    def part(count: int) -> int:
        return count * num_places // settings.max_sampled

    fewer = evolve(
        settings,
        num_blocks=part(least.num_blocks),
        num_state_slots=part(least.num_state_slots),
        max_sampled=num_places,
    )
    return evolve(
        least,
        num_blocks=fewer.num_blocks,
        num_state_slots=fewer.num_state_slots,
        num_window_blocks=device_parts(least.groups, fewer),
    )


def sized(
    devices: Sequence[DeviceNeeds], least: BackendInfo, settings: BackendSettings
) -> BackendInfo:
    """``least`` with as many more places as there is room for, and where all memory goes.

    Raises BackendError where not even those of ``least`` fit.
    """
    require_fit(devices, least, settings)
    spare = [_spare(needs, least, settings) for needs in devices]
    info = evolve(
        least,
        num_blocks=least.num_blocks + _fewest(spare, devices, StateClass.TOKEN),
        num_window_blocks=least.num_window_blocks + _fewest(spare, devices, StateClass.WINDOW),
        num_state_slots=least.num_state_slots + _fewest(spare, devices, StateClass.POINT),
    )
    return evolve(info, memory=tuple(_memory(needs, info) for needs in devices))


def _spare(
    needs: DeviceNeeds, least: BackendInfo, settings: BackendSettings
) -> dict[StateClass, int]:
    """Places beyond ``least`` that one device has room for, by class."""
    num_bytes = needs.room - needs.adapters - least_pools(needs.groups, least)
    if settings.adapters_may_come:
        num_bytes -= num_bytes // ADAPTERS_PART
    own = evolve(settings, host_bytes=num_bytes, num_host_state_slots=None)
    own = with_slots(needs.groups, own)
    num_blocks, num_parts = host_blocks(needs.groups, own)
    return {
        StateClass.TOKEN: num_blocks,
        StateClass.WINDOW: num_parts,
        StateClass.POINT: own.num_host_state_slots or 0,
    }


def _fewest(
    spare: Sequence[dict[StateClass, int]], devices: Sequence[DeviceNeeds], kind: StateClass
) -> int:
    """Of the devices that have layers of that class; without any, of all."""
    having = [
        counts[kind]
        for counts, needs in zip(spare, devices, strict=True)
        if any(
            group.state_class is kind and group.bytes_per_token + group.bytes_per_state
            for group in needs.groups
        )
    ]
    return min(having or [counts[kind] for counts in spare])


def _memory(needs: DeviceNeeds, info: BackendInfo) -> DeviceMemory:
    pools = least_pools(needs.groups, info)
    return DeviceMemory(
        name=needs.name,
        allowed_bytes=needs.allowed,
        taken_bytes=needs.taken,
        step_bytes=needs.step + needs.moves,
        pool_bytes=pools,
        adapter_bytes=needs.room - pools,
    )
