"""Which layers share a block table."""

from harness.torch_models import PLAIN, WINDOWED, layer, spec
from kvtrio.backends.groups import core_groups, layer_groups
from kvtrio.core.config import Group
from kvtrio.core.types import StateClass


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
    assert core_groups(layer_groups(WINDOWED), 2) == (
        Group(StateClass.WINDOW, 20, 2 * 2 * 16 * 2),
        Group(StateClass.TOKEN, None, 2 * 16 * 2),
        Group(StateClass.WINDOW, 7, 2 * 16 * 2),
    )
