"""Copies between the tiers are as if done one after the other, whatever the two streams do."""

from random import Random

import pytest
import torch

from harness.cuda_moves import BLOCK, is_in_order, pools
from harness.devices import FakeDevice, lagging_device
from kvtrio.backends import cuda_staging
from kvtrio.core.types import Tier


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_order_that_marks_allow_changes_what_arrives(seed, monkeypatch):
    """Both streams lag and overtake each other, and staging memory holds one place at a time."""
    monkeypatch.setattr(cuda_staging, "TURN_BYTES", 1)
    assert is_in_order(lagging_device(Random(seed)), seed)


@pytest.mark.slow
def test_many_places_travel_at_once():
    """In large staging memory, on a device without streams."""
    assert is_in_order(FakeDevice(), 3)


def test_a_turn_holds_the_largest_place():
    """Of whatever kind; and where it is small, as much as is worth a copy."""
    made = pools(Random(1), torch.device("cpu"))[Tier.DEVICE]
    assert cuda_staging.turn_bytes(made) == cuda_staging.TURN_BYTES
    sizes = [cuda_staging.place_bytes(t) for pool in made for t in cuda_staging.tensors_of(pool)]
    assert sizes == [2 * BLOCK * 2 * 8 * 4] * 2 + [2 * 32 * 4]
