"""The checker notices damage: it is not a formality."""

import pytest

from harness.core_fakes import answer, make_core, submit
from kvtrio.core import invariants
from kvtrio.core.config import Group
from kvtrio.core.types import RequestId, RequestState, StateClass, Tier


def damaged_free_list(core):
    core.cache.arenas[Tier.DEVICE][0].free_ids.pop()


def damaged_count(core):
    core.requests[RequestId(1)].blocks[0].num_refs += 1


def damaged_table(core):
    core.requests[RequestId(1)].blocks.append(core.cache.take(0.0))


def damaged_tier(core):
    core.requests[RequestId(1)].blocks[0].tier = Tier.HOST


def damaged_total(core):
    core.cache.num_used[Tier.HOST] += 1


def damaged_index(core):
    core.cache.index.by_key.clear()


def damaged_standing(core):
    core.cache.index.root.children[0].children[0].is_candidate = False


def damaged_state(core):
    core.requests[RequestId(2)].state = RequestState.RUNNING


def damaged_place(core):
    core.places.running[0] = None


def damaged_mark(core):
    core.requests[RequestId(1)].in_flight = False


def damaged_length(core):
    core.requests[RequestId(1)].num_computed_tokens = 99


def damaged_slots(core):
    core.cache.states.num_used[Tier.HOST] += 1


def damaged_slot(core):
    core.requests[RequestId(1)].slot = None


def damaged_order(core):
    core.cache.states.heaps[Tier.DEVICE].clear()


def damaged_offset(core):
    core.cache.index.root.children[0].children[0].checkpoints[0].offset = 9


def damaged_states(core):
    core.cache.index.root.children[0].num_states = 0


def check_damage(core, damage):
    """All is well before, and not after."""
    core.handle(submit(3, token_ids=(1, 2, 3, 4, 5), max_new_tokens=1), 0.0)
    batch = core.schedule(0.0)
    core.update(batch, answer(batch), 0.0)
    core.handle(submit(1), 0.0)
    core.schedule(0.0)
    core.handle(submit(2), 0.0)
    invariants.check(core)
    damage(core)
    with pytest.raises(invariants.InvariantError):
        invariants.check(core)


@pytest.mark.parametrize(
    "damage",
    [
        damaged_free_list,
        damaged_count,
        damaged_table,
        damaged_tier,
        damaged_total,
        damaged_index,
        damaged_standing,
        damaged_state,
        damaged_place,
        damaged_mark,
        damaged_length,
    ],
)
def test_damage_is_found(damage):
    """Each rule that is broken by hand is reported."""
    check_damage(make_core(num_places=1), damage)


@pytest.mark.parametrize(
    "damage", [damaged_slots, damaged_slot, damaged_order, damaged_offset, damaged_states]
)
def test_damage_to_states_is_found(damage):
    """The same for recurrent layers."""
    groups = (Group(StateClass.POINT, None, 0, 8), Group(StateClass.TOKEN, None, 8))
    check_damage(make_core(num_places=1, groups=groups, num_state_slots=2), damage)
