"""A warm request says what a cold one says: core and backend together."""

from random import Random

import pytest
from attrs import define, field

from harness.core_fakes import NumberMatcher
from harness.cpu_models import random_cpu
from harness.torch_adapters import loaded, random_adapter
from harness.torch_models import (
    CONV,
    DELTA,
    MAMBA,
    MAMBA_EXPERTS,
    PLAIN,
    VOCAB,
    WINDOWED,
    random_backend,
)
from kvtrio.core import invariants
from kvtrio.core.config import CoreConfig
from kvtrio.core.events import Finished, Submit, TokenOut
from kvtrio.core.identity import AdapterUse, KeyMaker, Segment
from kvtrio.core.machine import Core
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import RequestId, Tier
from kvtrio.schedulers.fcfs import FCFS

CONTEXT, PLACES, HOST = 96, 2, 12


@define(eq=False)
class Served:
    """A core on a backend that answers one request or several at a time."""

    backend: object
    is_unified: bool
    keys: KeyMaker = field(factory=lambda: KeyMaker(b"secret of the tests", b"root"))
    core: Core = field(init=False)
    number: int = 0

    def __attrs_post_init__(self) -> None:
        config = CoreConfig(
            groups=self.backend.info.groups,
            block_size=self.backend.info.block_size,
            num_places=PLACES,
            max_context=CONTEXT,
            max_waiting=8,
            max_batch_tokens=24,
            num_host_blocks=HOST,
            num_host_window_blocks=self.backend.info.num_host_window_blocks,
            num_state_slots=self.backend.info.num_state_slots,
            num_host_state_slots=self.backend.info.num_host_state_slots,
            checkpoint_spacing=8,
            checkpoint_grid=16,
            is_unified=self.is_unified,
        )
        self.core = Core(config, FCFS(), self.keys)

    def ask(self, requests):
        """Token ids and account of each (prompt, segments, reuse), all running at once."""
        ids = [self._send(*request) for request in requests]
        tokens, ended = {request_id: [] for request_id in ids}, {}
        while self.core.has_work:
            batch = self.core.schedule(float(self.number))
            result = self.backend.step(batch)
            for output in self.core.update(batch, result, float(self.number)):
                if isinstance(output, TokenOut):
                    tokens[output.request_id].append(output.sampled.token_id)
                elif isinstance(output, Finished):
                    ended[output.request_id] = output
            invariants.check(self.core)
        return [(tokens[request_id], ended[request_id]) for request_id in ids]

    def _send(self, prompt, segments, reuse):
        self.number += 1
        submit = Submit(
            request_id=RequestId(self.number),
            token_ids=tuple(prompt),
            max_new_tokens=4,
            sampling=SamplingParams(temperature=0.0),
            matcher=NumberMatcher(),
            segments=segments,
            reuse=reuse,
        )
        assert self.core.handle(submit, float(self.number)) == []
        return submit.request_id


class Colliding(KeyMaker):
    """Every key is the same."""

    def block_key(self, parent, start, token_ids, runs):
        return b"x"


def serve(make, model, *, is_unified=True, keys=None):
    block_size = 8 if make is random_backend else 16
    sizes = {
        "block_size": block_size,
        "num_blocks": PLACES * (-(-CONTEXT // block_size) + 1),
        "is_unified": is_unified,
        "max_context": CONTEXT,
        "num_state_slots": 2 * PLACES,
        "num_host_state_slots": 4,
    }
    groups = make(model, **sizes).info.groups
    host_bytes = HOST * block_size * sum(group.bytes_per_token for group in groups)
    backend = make(model, **sizes, host_bytes=host_bytes)
    adapters = [random_adapter(model, seed) for seed in (1, 2)]
    handles = loaded(backend, *adapters).handles
    uses = [AdapterUse(handles[data.digest], data.digest, 0.5) for data in adapters]
    return Served(backend, is_unified, *([keys] if keys else [])), uses


def narrow_cpu(model, **sizes):
    """With the narrowest caches, which would show any state that is not the same."""
    return random_cpu(model, key_type="q8_0", value_type="q4_0", **sizes)


def some_requests(rng, known, uses):
    """One to three prompts that go on from, or part from, what was said before."""
    requests = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        base = rng.choice(known)[: rng.randrange(80)]
        prompt = [*base, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9)))]
        chosen = tuple(use for use in uses if rng.random() < 0.3)
        segments = (Segment(0, chosen),)
        if chosen and len(prompt) > 4 and rng.random() < 0.3:
            segments = (Segment(0), Segment(rng.randrange(1, len(prompt)), chosen))
        requests.append((prompt, segments, True))
    return requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "model", "is_unified", "keys"),
    [
        (random_backend, PLAIN, True, None),
        (random_backend, WINDOWED, True, None),
        (random_backend, PLAIN, False, None),
        (random_backend, PLAIN, True, Colliding(b"", b"")),
        (random_backend, DELTA, True, None),
        (random_backend, MAMBA_EXPERTS, False, None),
        (random_backend, CONV, True, None),
        (random_backend, MAMBA, False, None),
        (random_cpu, PLAIN, True, None),
        (random_cpu, WINDOWED, False, None),
        (narrow_cpu, WINDOWED, True, None),
    ],
    ids=["torch plain", "torch windowed", "torch two arenas", "torch colliding keys",
         "torch delta net", "torch mamba and experts", "torch convolutions", "torch mamba",
         "cpu plain", "cpu windowed, two arenas", "cpu narrow"],
)  # fmt: skip
def test_warm_requests_equal_cold_ones(make, model, is_unified, keys):
    """300 requests over a small cache, adapters and RAM included: ids equal, sums right."""
    rng = Random(7)
    warm, uses = serve(make, model, is_unified=is_unified, keys=keys)
    known: list[list[int]] = [[]]
    num_requests = num_reused = num_from_ram = 0
    while num_requests < 300:
        requests = some_requests(rng, known[-12:], uses)
        answers = warm.ask(requests)
        cold = [warm.ask([(prompt, segments, False)])[0] for prompt, segments, _ in requests]
        for (prompt, *_), (tokens, account), (expected, _) in zip(
            requests, answers, cold, strict=True
        ):
            assert tokens == expected
            assert account.num_cached_tokens + account.num_computed_tokens == len(prompt)
            known.append([*prompt, *tokens])
            num_reused += account.num_cached_tokens
            num_from_ram += account.cache.num_host_tokens
        num_requests += len(requests)
    # Prompts part anywhere, and recurrent layers go on from the few checkpoints that there are.
    assert num_reused > (2000 if warm.core.cache.states is None else 500)
    assert num_from_ram > 0
    assert warm.core.cache.num_used[Tier.HOST] <= HOST
