"""Which layers share a block table."""

from attrs import evolve

from harness.torch_models import CONV, DELTA, MAMBA, PLAIN, WINDOWED, layer, settings, spec
from kvtrio.backends.base import BackendInfo
from kvtrio.backends.groups import (
    StateShape,
    core_groups,
    device_parts,
    host_blocks,
    host_sizes,
    layer_groups,
    pool_bytes,
    ram_budget,
    with_slots,
)
from kvtrio.core.config import Group, RamBudget
from kvtrio.core.types import StateClass

TOKEN, WINDOW, POINT = StateClass.TOKEN, StateClass.WINDOW, StateClass.POINT


def test_layers_with_one_window_share_a_table():
    """Groups come in order of their first layer; windows of other sizes stay apart."""
    groups = layer_groups(WINDOWED)
    assert [(group.window, group.layers) for group in groups] == [
        (20, (0, 2)),
        (None, (1,)),
        (7, (3,)),
    ]


def test_a_plain_model_is_one_group():
    """Full attention alone needs one table."""
    assert [group.layers for group in layer_groups(PLAIN)] == [(0, 1, 2)]


def test_other_shapes_of_keys_are_another_group():
    """Layers whose K and V have other sizes cannot share a pool."""
    assert len(layer_groups(spec(layer(0), layer(1, num_kv_heads=4)))) == 2


def test_the_core_learns_class_window_and_size():
    """A token costs K and V of every layer of the group, in the cache's type."""
    assert core_groups(layer_groups(WINDOWED), 2, 64) == (
        Group(StateClass.WINDOW, 20, 2 * 2 * 16 * 2),
        Group(StateClass.TOKEN, None, 2 * 16 * 2),
        Group(StateClass.WINDOW, 7, 2 * 16 * 2),
    )


def test_recurrent_layers_share_slots():
    """They form a group of their own, in order of first layers, with the shape of their state."""
    delta, full = layer_groups(DELTA)
    assert (delta.state_class, delta.layers) == (StateClass.POINT, (0, 2))
    assert delta.state == StateShape((3, 44), (4, 6, 5))
    assert (full.state_class, full.layers, full.state) == (StateClass.TOKEN, (1,), None)
    assert layer_groups(CONV)[0].state == StateShape((2, 32), (0, 0, 0))
    assert [group.state for group in layer_groups(MAMBA)] == [StateShape((3, 52), (4, 6, 7))]


def test_a_state_has_one_size_whatever_the_type_of_the_cache():
    """A slot holds all layers of its group in float32, and a token adds nothing."""
    for itemsize in (2, 4):
        delta, full = core_groups(layer_groups(DELTA), itemsize, 64)
        assert delta == Group(StateClass.POINT, None, 0, 2 * (3 * 44 + 4 * 6 * 5) * 4)
        assert full == Group(StateClass.TOKEN, None, 2 * 16 * itemsize, 0)


def test_pools_hold_blocks_and_slots_of_both_memories():
    """Blocks cost what tokens cost, slots what states cost."""
    delta, full, window = Group(POINT, None, 0, 100), Group(TOKEN, None, 8), Group(WINDOW, 20, 4)
    info = BackendInfo(
        name="none",
        groups=(delta, full, window),
        block_size=16,
        num_blocks=3,
        num_host_blocks=2,
        num_window_blocks=6,
        num_host_window_blocks=1,
        num_state_slots=5,
        num_host_state_slots=7,
        vocab_size=1,
        max_context=64,
        pool_bytes=0,
        weight_bytes=0,
    )
    assert pool_bytes(info) == 12 * 100 + 5 * 16 * 8 + 7 * 16 * 4


def test_a_window_as_long_as_the_longest_request_is_none():
    """Then all tokens are kept, and requests resume anywhere."""
    classes = [group.state_class for group in core_groups(layer_groups(WINDOWED), 2, 20)]
    assert classes == [TOKEN, TOKEN, WINDOW]


def test_in_ram_every_third_block_has_its_part():
    """A sequence needs its last window and a few others; where all layers have windows, blocks are
    nodes of the index."""
    full, window = Group(TOKEN, None, 3), Group(WINDOW, 20, 15)
    chosen = settings(host_bytes=3 * 16 * (3 + 5) * 10)
    assert host_blocks((full, window), chosen) == (30, 10)
    assert host_blocks((full,), chosen) == (80, 0)
    assert host_blocks((window,), settings(host_bytes=10 * (240 + 3 * 1536))) == (30, 10)


def test_the_device_holds_what_running_requests_see_and_a_window_more_for_each():
    """Of groups with a window; with short requests never more than without."""
    groups = (Group(TOKEN, None, 3), Group(WINDOW, 64, 15))
    sizes = {"num_blocks": 1000, "max_sampled": 4, "max_rows": 512}
    assert device_parts(groups, settings(**sizes)) == 4 * (2 * 5 + 2) + 32
    assert device_parts(groups, settings(**{**sizes, "num_blocks": 30})) == 30
    assert device_parts(groups[:1], settings(**sizes)) == 0


def test_ram_is_shared_by_blocks_and_slots():
    """Half is for slots; fewer where they would stand closer than checkpoints are of use; they are
    whole, and the rest is for blocks. A number that was asked for stands."""
    groups = core_groups(layer_groups(DELTA), 2, 64)
    state, token = groups[0].bytes_per_state, groups[1].bytes_per_token
    chosen = with_slots(groups, settings(host_bytes=1 << 20))
    assert chosen.num_host_state_slots == (1 << 20) // (state + 64 * token)
    large = (evolve(groups[0], bytes_per_state=1 << 17), groups[1])
    chosen = with_slots(large, settings(host_bytes=(1 << 20) + 5))
    assert (chosen.num_host_state_slots, chosen.host_bytes) == (4, (1 << 19) + 5)
    assert with_slots(groups, settings(num_host_state_slots=3)).num_host_state_slots == 3
    assert with_slots(groups[1:], settings()).num_state_slots == 0


def test_kinds_share_one_budget_where_memory_can_be_given_back():
    """There may be as many of each as there is room for, and in all no more than was asked for."""
    full, window, state = Group(TOKEN, None, 4), Group(WINDOW, 20, 8), Group(POINT, None, 0, 500)
    chosen = settings(host_bytes=10_000)
    ram = ram_budget((full, window, state), chosen)
    assert ram == RamBudget(num_bytes=10_000, block_bytes=64, part_bytes=128, state_bytes=500)
    sizes = host_sizes((full, window, state), chosen, ram)
    assert (sizes.num_blocks, sizes.num_parts, sizes.num_slots) == (156, 78, 20)
    shares = host_sizes((full, window, state), chosen, None)
    assert 64 * shares.num_blocks + 128 * shares.num_parts + 500 * shares.num_slots <= 10_000
    assert shares.ram is None


def test_one_kind_has_no_budget():
    """Nor where slots are counted, or nothing is kept in RAM."""
    full, state = Group(TOKEN, None, 4), Group(POINT, None, 0, 500)
    assert ram_budget((full,), settings(host_bytes=1000)) is None
    assert ram_budget((state,), settings(host_bytes=1000)) is None
    assert ram_budget((full, state), settings(host_bytes=0)) is None
    told = settings(host_bytes=1000, num_host_state_slots=3)
    assert ram_budget((full, state), told) is None
    assert ram_budget((full, state), settings(host_bytes=1000)) is not None


def test_without_keys_and_values_ram_is_for_slots():
    """With nodes of the index for 512 tokens each, which take memory, too."""
    groups = core_groups(layer_groups(MAMBA), 4, 64)
    chosen = with_slots(groups, settings(host_bytes=1 << 20))
    num_slots = (1 << 20) // (groups[0].bytes_per_state + 32 * 1536)
    assert chosen.num_host_state_slots == num_slots > 0
    assert host_blocks(groups, chosen) == (32 * num_slots, 0)
