"""What a device's memory goes to: places by what is left, adapters from the same bytes."""

import pytest
from attrs import evolve

from harness.cuda_models import quantised_file
from harness.devices import FakeDevice
from harness.torch_adapters import random_adapter
from harness.torch_models import CONV, PLAIN, SHORT_CONV, layer, recurrent_layer, settings, spec
from kvtrio.backends import cuda_loading
from kvtrio.backends.base import BackendError, BackendInfo
from kvtrio.backends.cuda_backend import CudaBackend
from kvtrio.backends.cuda_forward import Forward
from kvtrio.backends.cuda_memory import scratch_bytes
from kvtrio.backends.cuda_sizing import DeviceNeeds, least_pools, sized
from kvtrio.backends.cuda_staging import moves_bytes
from kvtrio.backends.groups import core_groups, device_parts, layer_groups
from kvtrio.model.spec import ModelSpec

KIB = 1 << 10
MOVES = 4 * (16 << 20)
"""Of staging memory."""
SMALL = settings(
    block_size=4,
    num_blocks=2 * 9,
    num_state_slots=4,
    max_context=32,
    max_rows=4,
    max_sampled=2,
    host_bytes=4 * KIB,
)
"""Two requests of 32 tokens."""
HYBRID = spec(layer(0, 8), layer(1), recurrent_layer(2, SHORT_CONV))


def least(model: ModelSpec) -> BackendInfo:
    """With what two requests need."""
    groups = core_groups(layer_groups(model), 4, SMALL.max_context)
    return BackendInfo(
        name="test",
        groups=groups,
        block_size=SMALL.block_size,
        num_blocks=SMALL.num_blocks,
        num_window_blocks=device_parts(groups, SMALL),
        num_state_slots=SMALL.num_state_slots,
        vocab_size=1,
        max_context=SMALL.max_context,
        pool_bytes=0,
        weight_bytes=0,
    )


def needs(model: ModelSpec, room: int, **changes: object) -> DeviceNeeds:
    """A device with ``room`` for pools and adapters."""
    fields: dict[str, object] = {
        "name": "gpu",
        "allowed": 100 * KIB + room,
        "taken": 90 * KIB,
        "step": 9 * KIB,
        "moves": 1 * KIB,
        "adapters": 0,
        "groups": least(model).groups,
    }
    return DeviceNeeds(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [PLAIN, HYBRID, CONV], ids=["plain", "hybrid", "conv"])
def test_places_fill_what_is_left_and_no_more(model):
    """Of every kind that the model has; never beyond what is allowed, and nearly all of it."""
    bare = least(model)
    pools = least_pools(bare.groups, bare)
    for spare in (0, 5 * KIB, 400 * KIB):
        device = needs(model, pools + spare)
        info = sized([device], bare, SMALL)
        (memory,) = info.memory
        assert memory.pool_bytes == least_pools(bare.groups, info)
        assert 0 <= memory.adapter_bytes <= max(3 * KIB, spare // 40)
        total = memory.taken_bytes + memory.step_bytes + memory.pool_bytes + memory.adapter_bytes
        assert total == memory.allowed_bytes
    assert info.num_blocks > bare.num_blocks
    assert (info.num_window_blocks > bare.num_window_blocks) is (bare.num_window_blocks > 0)
    has_states = any(group.bytes_per_state for group in bare.groups)
    assert (info.num_state_slots > bare.num_state_slots) is has_states


def test_adapters_that_are_known_or_may_come_have_their_part():
    """The first in full, the others an eighth of what is beyond the longest contexts."""
    bare = least(PLAIN)
    device = needs(PLAIN, least_pools(bare.groups, bare) + 80 * KIB, adapters=16 * KIB)
    (memory,) = sized([device], bare, SMALL).memory
    assert 16 * KIB <= memory.adapter_bytes < 20 * KIB
    (memory,) = sized([device], bare, evolve(SMALL, adapters_may_come=True)).memory
    assert 24 * KIB <= memory.adapter_bytes < 28 * KIB


def test_the_tightest_device_decides():
    """All have the same number of places, of the kinds that they have at all."""
    bare = least(HYBRID)
    groups = bare.groups
    only = [evolve(groups[0], bytes_per_token=0), groups[1], evolve(groups[2], bytes_per_state=0)]
    pools = least_pools(groups, bare)
    roomy, tight = needs(HYBRID, pools + 400 * KIB), needs(HYBRID, pools, groups=tuple(only))
    alone = [sized([each], bare, SMALL) for each in (roomy, tight)]
    both = sized([roomy, tight], bare, SMALL)
    assert both.num_blocks == min(each.num_blocks for each in alone)
    assert both.num_window_blocks == alone[0].num_window_blocks
    assert both.num_state_slots == alone[0].num_state_slots


@pytest.mark.parametrize(
    ("share", "advice"), [(0.6, "--parallel 1 fits"), (0.3, "not even one request of 32 tokens")]
)
def test_what_does_not_fit_is_refused_with_the_sum(share, advice):
    """All parts, what they are together, what is allowed, and what would help."""
    bare = least(PLAIN)
    pools = least_pools(bare.groups, bare)
    device = needs(PLAIN, int(share * pools), name="cuda:1")
    with pytest.raises(BackendError, match=advice) as refused:
        sized([device], bare, evolve(SMALL, gpu_memory_fraction=0.5))
    line = str(refused.value)
    assert line.startswith("not enough memory on cuda:1: weights and others 0 MiB + a step 0 MiB")
    assert "KV of 2 requests 0 MiB = 0 MiB, and --gpu-memory-fraction 0.5 leaves 0 MiB" in line


def opened(device: FakeDevice, **changes: object) -> CudaBackend:
    return CudaBackend.load_on((device,), quantised_file(PLAIN), PLAIN, evolve(SMALL, **changes))


def device_with(room: int, peak: int = 100 * KIB) -> FakeDevice:
    """With so much beside a step and moves when the default part of it is taken."""
    total = 1 << 30
    return FakeDevice(total, total - int(0.9 * total) + room + peak + MOVES, peak=peak)


@pytest.mark.slow
def test_pools_are_made_when_weights_are_there_and_a_step_was_measured():
    """Blocks fill what the largest step leaves; adapters come and go with what is left."""
    adapters = [random_adapter(PLAIN, seed) for seed in (1, 2)]
    sizes = [adapter.num_bytes for adapter in adapters]
    bare = least(PLAIN)
    pools = least_pools(bare.groups, bare)
    device = device_with(pools + max(sizes) + 100 * KIB)
    assert moves_bytes(bare.groups, SMALL.block_size) == MOVES
    backend = opened(device, adapter_bytes=max(sizes))
    (memory,) = backend.info.memory
    assert device.num_measured == 1
    scratch = scratch_bytes(bare.groups, SMALL.block_size)
    assert memory.step_bytes == device.peak + MOVES + scratch
    assert backend.info.num_blocks > bare.num_blocks
    assert not backend.info.is_unified
    first = backend.load_adapter(adapters[0])
    with pytest.raises(BackendError, match="not enough memory for an adapter"):
        backend.load_adapter(adapters[1])
    backend.unload_adapter(first)
    assert backend.load_adapter(adapters[1]) > first


@pytest.mark.slow
@pytest.mark.parametrize(("room", "num_measured"), [(-90 << 20, 0), (0, 1)])
def test_a_model_without_room_is_refused_as_soon_as_that_is_known(room, num_measured):
    """Before it is loaded, or when its step was measured."""
    device = device_with(room)
    with pytest.raises(BackendError, match="not even one request"):
        opened(device)
    assert device.num_measured == num_measured


@pytest.mark.slow
def test_the_largest_step_is_measured_beside_the_captured_one(monkeypatch):
    """Which keeps its memory, so that both are taken at once."""
    done = []

    class Noting(Forward):
        def capture(self, make, limits, is_trial=False):
            done.append(("captured", is_trial))

        def choices(self, batch):
            done.append(("step", sum(len(chunk.token_ids) for chunk in batch.chunks)))
            return super().choices(batch)

    monkeypatch.setattr(cuda_loading, "Forward", Noting)
    monkeypatch.setattr(cuda_loading, "are_captured", lambda devices, settings: True)
    monkeypatch.setattr(cuda_loading, "graph_maker", lambda: None)
    opened(device_with(1 << 20))
    assert done == [("captured", True), ("step", SMALL.max_rows)]
