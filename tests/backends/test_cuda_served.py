"""A core on the cuda backend, in Triton's interpreter, answers as one on the torch backend does."""

import pytest
from attrs import define, field

from harness.core_fakes import NumberMatcher
from harness.cuda_models import late_cuda, same_torch
from harness.fake_graph import FakeGraph
from harness.torch_adapters import loaded, random_adapter
from harness.torch_models import PLAIN
from kvtrio.core import invariants
from kvtrio.core.config import CoreConfig
from kvtrio.core.events import Abort, Finished, Submit, TokenOut
from kvtrio.core.identity import AdapterUse, KeyMaker, Segment
from kvtrio.core.machine import Core
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import RequestId
from kvtrio.schedulers.fcfs import FCFS

PLACES, CONTEXT, BLOCK, HOST = 2, 48, 16, 8
ADAPTER = random_adapter(PLAIN, 1, only=("attn_q", "ffn_down"))


@define(eq=False)
class Served:
    """A core with two small memories, on one backend."""

    backend: object
    use: AdapterUse
    core: Core = field(init=False)
    told: dict[int, list[int]] = field(factory=dict)
    ended: dict[int, Finished] = field(factory=dict)
    step: int = 0

    def __attrs_post_init__(self) -> None:
        config = CoreConfig(
            groups=self.backend.info.groups,
            block_size=BLOCK,
            num_places=PLACES,
            max_context=CONTEXT,
            max_waiting=8,
            max_batch_tokens=32,
            num_host_blocks=HOST,
            is_unified=False,
        )
        self.core = Core(config, FCFS(), KeyMaker(b"secret of the tests", b"root"))

    def send(self, number: int, prompt: list[int], with_adapter: bool = False) -> None:
        segments = (Segment(0, (self.use,) if with_adapter else ()),)
        submit = Submit(
            request_id=RequestId(number),
            token_ids=tuple(prompt),
            max_new_tokens=3,
            sampling=SamplingParams(temperature=0.0),
            matcher=NumberMatcher(),
            segments=segments,
        )
        assert self._note(self.core.handle(submit, 0.0)) is None
        self.told[number] = []

    def once(self, leaver: int | None = None) -> None:
        """One step; ``leaver`` goes away while it runs."""
        batch = self.core.schedule(0.0)
        result = self.backend.step(batch)
        if leaver is not None:
            self._note(self.core.handle(Abort(RequestId(leaver)), 0.0))
        self._note(self.core.update(batch, result, 0.0))
        invariants.check(self.core)

    def all(self) -> None:
        while self.core.has_work:
            self.once()

    def _note(self, outputs: object) -> None:
        for output in outputs:
            if isinstance(output, TokenOut):
                self.told[output.request_id].append(output.sampled.token_id)
            elif isinstance(output, Finished):
                self.ended[output.request_id] = output


def serve(make) -> Served:
    backend = make(
        PLAIN,
        block_size=BLOCK,
        num_blocks=PLACES * (CONTEXT // BLOCK + 1),
        is_unified=False,
        max_context=CONTEXT,
        host_bytes=HOST * BLOCK * 2 * 3 * 2 * 8 * 4,
    )
    handle = loaded(backend, ADAPTER).handles[ADAPTER.digest]
    return Served(backend, AdapterUse(handle, ADAPTER.digest, 0.5))


@pytest.mark.slow
def test_ids_through_adapters_ram_and_cancellation():
    """One prompt with and without an adapter side by side, one that leaves, then others until the
    first state has gone to RAM, and the first again; what travels comes as late as it may, and
    decoding steps are captured ones."""
    results, graphs = [], []

    def captured(*args, **changes):
        backend = late_cuda(*args, **changes)
        backend.capture(lambda: graphs.append(FakeGraph()) or graphs[-1], PLACES)
        return backend

    for make in (captured, same_torch):
        served, prompt = serve(make), list(range(5, 38))
        served.send(1, prompt)
        served.send(2, prompt, with_adapter=True)
        served.all()
        served.send(3, list(range(50, 72)))
        served.once()
        served.once(leaver=3)
        for number in (4, 5):
            served.send(number, [number, *range(20, 52)])
            served.all()
        served.send(6, prompt)
        served.send(7, [*prompt[:20], 1, 2], with_adapter=True)
        served.all()
        results.append(served)
    ours, reference = results
    assert ours.told == reference.told
    assert ours.told[6] == ours.told[1]
    assert ours.told[1] != ours.told[2]
    assert ours.ended[6].cache.num_host_tokens > 0
    for part in (graphs[:PLACES], graphs[PLACES:]):  # without adapters, and with some
        assert any(graph.replays for graph in part)
