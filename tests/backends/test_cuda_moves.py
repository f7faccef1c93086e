"""Copies between the tiers are as if done one after the other, whatever the two streams do."""

from random import Random

import pytest
import torch

from harness.devices import FakeDevice, lagging_device
from harness.torch_models import SHORT_CONV, layer, recurrent_layer, spec
from kvtrio.backends import cuda_staging
from kvtrio.backends.base import BackendInfo
from kvtrio.backends.cuda_memory import travelling
from kvtrio.backends.cuda_moves import Mover
from kvtrio.backends.groups import core_groups, layer_groups
from kvtrio.backends.torch_caches import Pool
from kvtrio.backends.torch_memory import make_arenas, read_place, run_copy, write_place
from kvtrio.core.batch import Copy
from kvtrio.core.types import BlockId, Tier

GROUPS = layer_groups(spec(layer(0), layer(1), recurrent_layer(2, SHORT_CONV)))
BLOCK, OWN, HOST = 4, 5, 6
INFO = BackendInfo(
    name="test",
    groups=core_groups(GROUPS, 4, 100),
    block_size=BLOCK,
    num_blocks=OWN,
    num_host_blocks=HOST,
    num_state_slots=OWN,
    num_host_state_slots=HOST,
    is_unified=False,
    vocab_size=1,
    max_context=100,
    pool_bytes=0,
    weight_bytes=0,
)


def pools(rng: Random):
    """A group of blocks and one of states, on the device and in RAM, with random numbers."""
    cpu = torch.device("cpu")
    made = travelling(make_arenas(GROUPS, INFO, torch.float32, cpu), cpu)
    for tier, count in ((Tier.DEVICE, OWN), (Tier.HOST, HOST)):
        for pool in made[tier]:
            for place in range(count):
                fill(pool, place, rng.randrange(1000))
    return made


def fill(pool, place: int, number: int) -> None:
    """All of a place, with numbers that tell where they are."""
    parts = [pool.keys[:, place], pool.values[:, place]] if isinstance(pool, Pool) else [
        pool.states[place]
    ]  # fmt: skip
    for i, part in enumerate(parts):
        part.copy_((torch.arange(part.numel()).view(part.shape) + 1000 * number + 500 * i).float())


def random_copy(rng: Random) -> Copy:
    """Between any two tiers; within one, to another place."""
    tiers = rng.choice(list(Tier)), rng.choice(list(Tier))
    counts = [OWN if tier is Tier.DEVICE else HOST for tier in tiers]
    places = [rng.randrange(count) for count in counts]
    if tiers[0] is tiers[1] and places[0] == places[1]:
        places[1] = (places[1] + 1) % counts[1]
    group, num_tokens = rng.randrange(2), rng.choice((BLOCK, BLOCK, 3))
    return Copy(group, BlockId(places[0]), BlockId(places[1]), num_tokens, *tiers)


def everything(made) -> list[bytes]:
    return [
        read_place(pool, place, BLOCK)
        for tier, count in ((Tier.DEVICE, OWN), (Tier.HOST, HOST))
        for pool in made[tier]
        for place in range(count)
    ]


def drive(device: FakeDevice, seed: int) -> None:
    """Steps with copies, kernels that overwrite blocks, and the CPU at places in RAM; each compared
    with the same done in order."""
    rng = Random(seed)
    ours, wanted = pools(Random(seed)), pools(Random(seed))
    mover = Mover(ours, device)
    for number in range(6):
        copies = [random_copy(rng) for _ in range(rng.randrange(6))]
        mover.run(copies)
        for copy in copies:
            run_copy(wanted[copy.source_tier], wanted[copy.target_tier], copy)
        group, place = rng.randrange(2), rng.randrange(OWN)
        device.compute.run(lambda g=group, p=place, n=number: fill(ours[Tier.DEVICE][g], p, n))
        fill(wanted[Tier.DEVICE][group], place, number)
        if rng.random() < 0.5:
            place = rng.randrange(HOST)
            mover.wait()
            part = read_place(ours[Tier.HOST][group], place, BLOCK)
            assert part == read_place(wanted[Tier.HOST][group], place, BLOCK)
            for made in (ours, wanted):
                write_place(made[Tier.HOST][group], place, bytes(len(part)))
    device.compute.synchronise()
    device.copies.synchronise()
    assert everything(ours) == everything(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_order_that_marks_allow_changes_what_arrives(seed, monkeypatch):
    """Both streams lag and overtake each other, and staging memory holds one place at a time."""
    monkeypatch.setattr(cuda_staging, "TURN_BYTES", 1)
    drive(lagging_device(Random(seed)), seed)


@pytest.mark.slow
def test_many_places_travel_at_once():
    """In large staging memory, on a device without streams."""
    drive(FakeDevice(), 3)


def test_a_turn_holds_the_largest_place():
    """Of whatever kind; and where it is small, as much as is worth a copy."""
    made = pools(Random(1))[Tier.DEVICE]
    assert cuda_staging.turn_bytes(made) == cuda_staging.TURN_BYTES
    sizes = [cuda_staging.place_bytes(t) for pool in made for t in cuda_staging.tensors_of(pool)]
    assert sizes == [2 * BLOCK * 2 * 8 * 4] * 2 + [2 * 32 * 4]
