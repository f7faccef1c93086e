"""Copies between the tiers are as if done one after the other, whatever the two streams do."""

from random import Random

import pytest
import torch

from harness.cuda_moves import BLOCK, is_in_order, pools
from harness.devices import Bus, FakeDevice, lagging_device
from kvtrio.backends import cuda_moves, cuda_staging
from kvtrio.backends.base import BackendError
from kvtrio.backends.cuda_memory import block_major
from kvtrio.backends.cuda_moves import Mover
from kvtrio.core.batch import Copy
from kvtrio.core.types import Tier
from kvtrio.kernels.triton_blocks import copy_parts
from kvtrio.kernels.triton_common import ALIGNMENT


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_order_that_marks_allow_changes_what_arrives(seed, monkeypatch):
    """Both streams lag and overtake each other, and staging memory holds one place at a time."""
    monkeypatch.setattr(cuda_staging, "TURN_BYTES", 1)
    assert is_in_order(lagging_device(Random(seed)), seed)


@pytest.mark.slow
def test_many_places_travel_at_once():
    """In large staging memory, on a device without streams; each in one piece."""
    assert is_in_order(FakeDevice(copies=Bus()), 3)


@pytest.mark.slow
def test_kernels_get_the_addresses_that_they_were_compiled_for(monkeypatch):
    """Whatever the number of places: others would be compiled for while requests wait."""
    found = []

    def spy(source, target, pairs):
        found.append([each.data_ptr() % ALIGNMENT for each in vars(pairs).values()])
        copy_parts(source, target, pairs)

    monkeypatch.setattr(cuda_moves, "copy_parts", spy)
    device = FakeDevice()
    mover = Mover(pools(Random(1), device.place), device)
    for count in (1, 2, 3):
        mover.run([Copy(0, i, i, BLOCK, Tier.DEVICE, Tier.HOST) for i in range(count)])
    assert found == [[0, 0, 0]] * 6


class Driver:
    """Of a GPU: which RAM it may touch."""

    def __init__(self, most: int) -> None:
        self.pinned, self.most = {}, most

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.pinned[address] = num_bytes
        return int(num_bytes > self.most)

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_ram_is_pinned_to_the_byte_and_as_long_as_it_is_there(monkeypatch):
    """Rounded up it could be all that the machine has; more than the driver takes is refused."""
    driver = Driver(5000 * 4)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = block_major(torch.empty(1, 5, 1000), is_pinned=True)
    assert driver.pinned == {memory.data_ptr(): 5000 * 4}
    assert block_major(torch.empty(1, 0, 1000), is_pinned=True).numel() == 0
    part = memory[0]
    del memory
    assert len(driver.pinned) == 1
    assert not part.any()
    del part
    assert driver.pinned == {}
    with pytest.raises(BackendError, match="--cache-ram"):
        block_major(torch.empty(1, 5001, 1), is_pinned=True)


def test_a_turn_holds_the_largest_place():
    """Of whatever kind; and where it is small, as much as is worth a copy."""
    made = pools(Random(1), torch.device("cpu"))[Tier.DEVICE]
    assert cuda_staging.turn_bytes(made) == cuda_staging.TURN_BYTES
    sizes = [cuda_staging.place_bytes(t) for pool in made for t in cuda_staging.tensors_of(pool)]
    assert sizes == [2 * BLOCK * 2 * 8 * 4] * 2 + [2 * 32 * 4]
