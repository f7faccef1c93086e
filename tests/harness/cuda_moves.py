"""Random copies between the tiers, beside kernels and the CPU, and what they should leave."""

from random import Random

import torch

from harness.torch_models import SHORT_CONV, layer, recurrent_layer, spec
from kvtrio.backends.base import BackendInfo
from kvtrio.backends.cuda_devices import Device
from kvtrio.backends.cuda_memory import travelling
from kvtrio.backends.cuda_moves import Mover
from kvtrio.backends.groups import core_groups, layer_groups
from kvtrio.backends.torch_caches import Pool
from kvtrio.backends.torch_memory import AnyPool, make_arenas, read_place, run_copy, write_place
from kvtrio.core.batch import Copy
from kvtrio.core.types import BlockId, Tier

Pools = dict[Tier, tuple[AnyPool, ...]]

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


def pools(rng: Random, place: torch.device) -> Pools:
    """A group of blocks and one of states, on the device and in RAM, with random numbers."""
    made = travelling(make_arenas(GROUPS, INFO, torch.float32, place), place)
    for tier, count in ((Tier.DEVICE, OWN), (Tier.HOST, HOST)):
        for pool in made[tier]:
            for i in range(count):
                fill(pool, i, rng.randrange(1000))
    return made


def fill(pool: AnyPool, place: int, number: int) -> None:
    """All of a place, with numbers that tell where they are."""
    parts = [pool.keys[:, place], pool.values[:, place]] if isinstance(pool, Pool) else [
        pool.states[place]
    ]  # fmt: skip
    for i, part in enumerate(parts):
        numbers = torch.arange(part.numel(), device=part.device).view(part.shape)
        part.copy_((numbers + 1000 * number + 500 * i).float())


def random_copy(rng: Random) -> Copy:
    """Between any two tiers; within one, to another place."""
    tiers = rng.choice(list(Tier)), rng.choice(list(Tier))
    counts = [OWN if tier is Tier.DEVICE else HOST for tier in tiers]
    places = [rng.randrange(count) for count in counts]
    if tiers[0] is tiers[1] and places[0] == places[1]:
        places[1] = (places[1] + 1) % counts[1]
    group, num_tokens = rng.randrange(2), rng.choice((BLOCK, BLOCK, 3))
    return Copy(group, BlockId(places[0]), BlockId(places[1]), num_tokens, *tiers)


def everything(made: Pools) -> list[bytes]:
    return [
        read_place(pool, place, BLOCK)
        for tier, count in ((Tier.DEVICE, OWN), (Tier.HOST, HOST))
        for pool in made[tier]
        for place in range(count)
    ]


def is_in_order(device: Device, seed: int, num_steps: int = 6, most: int = 5) -> bool:
    """Steps with up to ``most`` copies, kernels that overwrite blocks, and the CPU at places in
    RAM: whether all is as if done one after the other."""
    rng, is_right = Random(seed), True
    ours, wanted = pools(Random(seed), device.place), pools(Random(seed), torch.device("cpu"))
    mover = Mover(ours, device)
    for number in range(num_steps):
        copies = [random_copy(rng) for _ in range(rng.randrange(most + 1))]
        mover.run(copies)
        for copy in copies:
            run_copy(wanted[copy.source_tier], wanted[copy.target_tier], copy)
        group, place = rng.randrange(2), rng.randrange(OWN)
        device.compute.run(lambda g=group, p=place, n=number: fill(ours[Tier.DEVICE][g], p, n))
        fill(wanted[Tier.DEVICE][group], place, number)
        if rng.random() < 0.5:
            place = rng.randrange(HOST)
            mover.wait()
            parts = [read_place(made[Tier.HOST][group], place, BLOCK) for made in (ours, wanted)]
            is_right = is_right and parts[0] == parts[1]
            for made in (ours, wanted):
                write_place(made[Tier.HOST][group], place, bytes(len(parts[0])))
    device.compute.synchronise()
    device.copies.synchronise()
    return is_right and everything(ours) == everything(wanted)
