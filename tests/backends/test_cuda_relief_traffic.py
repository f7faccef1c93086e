"""Traffic on a device that is short of memory: the others' answers are those of a large one."""

from collections.abc import Sequence
from random import Random

import pytest
import torch
from attrs import define, evolve, field

from harness.core_fakes import NumberMatcher
from harness.virtual import GROUPS, SimSettings
from kvtrio.backends.cuda_relief import Fitter
from kvtrio.backends.sim import SimBackend
from kvtrio.backends.sim_pools import BYTES_PER_SLOT
from kvtrio.core import invariants
from kvtrio.core.batch import Batch, Chunk, Sampled, StepResult
from kvtrio.core.config import Group
from kvtrio.core.events import Finished, Submit, TokenOut
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import FinishReason, RequestId, StateClass, Tier

SLOTS = len(GROUPS)
"""The group of recurrent layers."""
SIM = SimSettings(
    groups=(*GROUPS, Group(StateClass.POINT, None, 0, BYTES_PER_SLOT)),
    num_state_slots=8,
    num_host_state_slots=4,
    num_host_blocks=16,
    is_unified=False,
)
LARGE = 5
"""Whose prompt never fits."""


@define(eq=False)
class ShortSim:
    """Runs out of memory at random where prompts are read, with the step half done; the simulator
    finds every state that was not put back."""

    rng: Random | None
    sim: SimBackend = field(factory=SIM.backend)
    num_failures: int = 0
    fitter: Fitter = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.fitter = Fitter(self.compute, self)

    def step(self, batch: Batch) -> StepResult:
        self.sim.step(evolve(batch, chunks=()))
        done = self.fitter.run(batch)
        return StepResult(done.sampled, (), done.unplaced)

    def compute(self, batch: Batch) -> tuple[Sampled | None, ...]:
        bare = evolve(batch, copies=(), loads=())
        if self.fails(batch.chunks):
            self.num_failures += 1
            self.sim.step(evolve(bare, chunks=batch.chunks[: len(batch.chunks) // 2]))
            raise torch.OutOfMemoryError
        return self.sim.step(bare).sampled

    def fails(self, chunks: Sequence[Chunk]) -> bool:
        if self.rng is None:
            return False
        is_reading = any(len(chunk.token_ids) > 1 for chunk in chunks)
        is_large = any(chunk.request_id == LARGE for chunk in chunks)
        return is_large or (is_reading and self.rng.random() < 0.4)

    def relieve(self) -> None:
        pass

    @property
    def has_states(self) -> bool:
        return True

    def keep(self, chunks: Sequence[Chunk]):
        places = [chunk.block_tables[SLOTS][0] for chunk in chunks if chunk.start]
        kept = [(place, self.sim.read(SLOTS, place, Tier.DEVICE, 0)) for place in places]

        def put_back() -> None:
            for place, part in kept:
                self.sim.write(SLOTS, place, Tier.DEVICE, part)

        return put_back


def served(backend: ShortSim, seed: int) -> tuple[dict[int, list[int]], dict[int, FinishReason]]:
    """A dozen requests, some of which begin alike, each sent as an earlier one is under way."""
    core, rng = SIM.core(), Random(seed)
    told: dict[int, list[int]] = {}
    ended: dict[int, FinishReason] = {}
    shared = [rng.randrange(900) for _ in range(60)]
    now, number = 0.0, 0
    while core.has_work or number < 12:
        if number < 12 and (number < 3 or now % 0.03 < 0.01):
            number += 1
            tail = [rng.randrange(900) for _ in range(rng.randrange(1, 40))]
            tokens = tuple(shared[: rng.randrange(61)] + tail)
            told[number] = []
            core.handle(request(number, tokens), now)
        now += 0.01
        batch = core.schedule(now)
        if batch is None:
            continue
        for output in core.update(batch, backend.step(batch), now):
            if isinstance(output, TokenOut):
                told[output.request_id].append(output.sampled.token_id)
            elif isinstance(output, Finished):
                ended[output.request_id] = output.reason
        invariants.check(core)
    return told, ended


def request(number: int, tokens: tuple[int, ...]) -> Submit:
    return Submit(
        request_id=RequestId(number),
        token_ids=tokens,
        max_new_tokens=6,
        sampling=SamplingParams(temperature=0.0),
        matcher=NumberMatcher(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_answers_beside_failures_are_those_without(seed):
    """Also of requests that resume from what a step in parts left; only the one whose prompt never
    fits ends, with its own reason."""
    short = ShortSim(Random(seed))
    told, ended = served(short, seed)
    wanted, _ = served(ShortSim(None), seed)
    assert short.num_failures > 3
    assert ended.pop(LARGE) is FinishReason.NO_MEMORY
    assert told.pop(LARGE) == []
    assert set(ended.values()) == {FinishReason.LENGTH}
    del wanted[LARGE]
    assert told == wanted
