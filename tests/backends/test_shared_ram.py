"""One budget in RAM for all kinds of state: answers stay right, and memory stays within it."""

import ctypes
import mmap
from random import Random

import pytest
from attrs import define, evolve, field

from harness.core_fakes import NumberMatcher
from harness.cpu_models import random_cpu
from harness.torch_models import VOCAB, layer, random_backend, recurrent_layer, spec
from kvtrio.backends.torch_caches import Pool
from kvtrio.core import invariants
from kvtrio.core.batch import GiveBack
from kvtrio.core.config import CoreConfig
from kvtrio.core.events import Finished, Submit, TokenOut
from kvtrio.core.identity import KeyMaker
from kvtrio.core.machine import Core
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import RequestId
from kvtrio.model.spec import ConvSpec, Mamba2Spec
from kvtrio.schedulers.fcfs import FCFS

CONTEXT, BLOCK, PLACES, ROWS = 640, 64, 2, 128
SIZES = {
    "block_size": BLOCK,
    "num_blocks": PLACES * (CONTEXT // BLOCK + 1),
    "max_context": CONTEXT,
    "num_state_slots": PLACES,
    "max_rows": ROWS,
    "max_sampled": PLACES,
}
STATE_SIZE = 240
"""With it a state is whole pages, as those of many models are."""
MAMBA2 = Mamba2Spec(
    conv=ConvSpec(width=4, channels=4 * 16 + 4 * STATE_SIZE),
    num_heads=4,
    head_dim=16,
    num_groups=2,
    state_size=STATE_SIZE,
)
ALL = spec(layer(0), layer(1, window=100), recurrent_layer(2, MAMBA2))
ODD = spec(
    layer(0),
    recurrent_layer(1, evolve(MAMBA2, state_size=13, conv=ConvSpec(width=4, channels=116))),
)
"""Its state is not."""
WINDOWS = spec(layer(0), layer(1, window=100))
RAM = 400_000


@define(eq=False)
class Served:
    """A core on a backend, whose memory is looked at after each step."""

    backend: object
    core: Core = field(init=False)
    number: int = 0
    num_given_back: int = 0
    most_bytes: int = 0

    def __attrs_post_init__(self) -> None:
        info = self.backend.info
        config = CoreConfig(
            groups=info.groups,
            block_size=BLOCK,
            num_places=PLACES,
            max_context=CONTEXT,
            max_waiting=8,
            max_batch_tokens=ROWS,
            num_host_blocks=info.num_host_blocks,
            num_host_window_blocks=info.num_host_window_blocks,
            num_state_slots=info.num_state_slots,
            num_host_state_slots=info.num_host_state_slots,
            ram=info.ram,
            is_unified=info.is_unified,
        )
        self.core = Core(config, FCFS(), KeyMaker(b"secret of the tests", b"root"))

    def ask(self, prompts, reuse=True):
        """The answers to prompts that run together."""
        tokens = {}
        for prompt in prompts:
            self.number += 1
            tokens[self.number] = []
            submit = Submit(
                request_id=RequestId(self.number),
                token_ids=prompt,
                max_new_tokens=3,
                sampling=SamplingParams(temperature=0.0),
                matcher=NumberMatcher(),
                reuse=reuse,
            )
            assert self.core.handle(submit, float(self.number)) == []
        while self.core.has_work:
            batch = self.core.schedule(float(self.number))
            self.num_given_back += sum(isinstance(move, GiveBack) for move in batch.loads)
            result = self.backend.step(batch)
            for output in self.core.update(batch, result, float(self.number)):
                if isinstance(output, TokenOut):
                    tokens[output.request_id].append(output.sampled.token_id)
                assert not isinstance(output, Finished) or output.num_computed_tokens
            invariants.check(self.core)
            if self.backend.info.ram is not None:
                self.most_bytes = max(self.most_bytes, resident_bytes(self.backend))
        return list(tokens.values())


def resident_bytes(backend):
    """Of the pools' pages, those that are in RAM."""
    return sum(pages_in_ram(*region) * mmap.PAGESIZE for region in regions(backend))


def pages_in_ram(address, num_bytes):
    found = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(address, num_bytes, ctypes.addressof(found)) == 0
    return sum(each & 1 for each in found)


def regions(backend):
    """Address and bytes of each pool, where blocks and slots lie one behind the other."""
    parts = backend._parts
    if hasattr(parts, "places"):
        kinds = (parts.places._slots, parts.places._blocks)
        pools = [pool for kind in kinds for each in kind.values() for pool in each]
        return [(pool.address, len(pool.view)) for pool in pools]
    tensors = []
    for pools in {id(each): each for each in parts.pools.values()}.values():
        for pool in pools:
            tensors += [pool.keys, pool.values] if isinstance(pool, Pool) else [pool.states]
    return [(each.data_ptr(), each.numel() * each.itemsize) for each in tensors]


def some_prompts(rng, known):
    """One or two that go on from, or part from, what was said before; short ones and long ones."""
    prompts = []
    for _ in range(rng.choice([1, 2])):
        base = rng.choice(known)[: rng.randrange(CONTEXT - 160)]
        count = rng.choice([3, 10, 140])
        prompts.append((*base, *(rng.randrange(VOCAB) for _ in range(count))))
    return prompts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "model", "is_unified"),
    [
        (random_cpu, ALL, True),
        (random_cpu, WINDOWS, False),
        (random_cpu, ODD, True),
        (random_backend, ALL, False),
        (random_backend, WINDOWS, True),
    ],
    ids=["cpu", "cpu windows", "cpu odd states", "torch", "torch windows"],
)
def test_kinds_share_ram_and_answers_stay_right(make, model, is_unified):
    """Random conversations in little RAM: ids as computed anew; memory goes from kind to kind, and
    what the system has given never exceeds the device's share and the budget."""
    rng, known = Random(3), [()]
    sizes = {**SIZES, "is_unified": is_unified}
    warm = Served(make(model, **sizes, host_bytes=RAM))
    cold = Served(make(model, **sizes, num_host_state_slots=0))
    assert warm.backend.info.ram.num_bytes == RAM
    device_bytes = warm.backend.info.pool_bytes - RAM
    for _ in range(30):
        prompts = some_prompts(rng, known[-8:])
        answers = warm.ask(prompts)
        assert answers == [cold.ask([prompt], reuse=False)[0] for prompt in prompts]
        known += [(*p, *a) for p, a in zip(prompts, answers, strict=True)]
    assert warm.num_given_back > 4
    assert warm.most_bytes <= device_bytes + RAM
    assert warm.core.cache.ram.memory.num_bytes > RAM / 2
    assert sum(kind.num_in_ram() > 0 for kind in warm.core.cache.room.kinds) > 1


def test_places_that_are_no_pages_have_shares():
    """Where a block is less than a page nothing is given back, and each kind has its share."""
    info = random_cpu(WINDOWS, **{**SIZES, "block_size": 16}, host_bytes=RAM).info
    assert info.ram is None
    assert info.num_host_blocks > info.num_host_window_blocks > 0
