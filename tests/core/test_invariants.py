"""The checker notices damage: it is not a formality."""

import pytest

from harness.core_fakes import config, submit
from kvtrio.core import invariants
from kvtrio.core.machine import Core
from kvtrio.core.types import BlockId, RequestId, RequestState
from kvtrio.schedulers.fcfs import FCFS


def damaged_free_list(core):
    core.pools[0].free_ids.pop()


def damaged_count(core):
    core.pools[1].ref_counts[core.requests[RequestId(1)].block_tables[1][0]] += 1


def damaged_table(core):
    core.requests[RequestId(1)].block_tables[0].append(BlockId(29))


def damaged_state(core):
    core.requests[RequestId(2)].state = RequestState.RUNNING


def damaged_place(core):
    core.places.running[0] = None


def damaged_mark(core):
    core.requests[RequestId(1)].in_flight = False


def damaged_length(core):
    core.requests[RequestId(1)].num_computed_tokens = 99


@pytest.mark.parametrize(
    "damage",
    [
        damaged_free_list,
        damaged_count,
        damaged_table,
        damaged_state,
        damaged_place,
        damaged_mark,
        damaged_length,
    ],
)
def test_damage_is_found(damage):
    """Each rule that is broken by hand is reported."""
    core = Core(config(num_places=1, num_blocks=30), FCFS())
    core.handle(submit(1), 0.0)
    core.schedule(0.0)
    core.handle(submit(2), 0.0)
    invariants.check(core)
    damage(core)
    with pytest.raises(invariants.InvariantError):
        invariants.check(core)
