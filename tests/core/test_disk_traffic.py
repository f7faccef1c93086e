"""Long random traffic with a disk tier: files that fail, restarts and crashes, small memories. The
memory checks that nothing is ever read but what the request's own history put there."""

from random import Random
from typing import Any

import pytest
from attrs import define, evolve, field

from harness.core_fakes import answer, config, submit
from harness.fake_disk import FakeDisk
from harness.memory import Memory
from kvtrio.core import fetching, invariants
from kvtrio.core.batch import Batch
from kvtrio.core.config import CoreConfig, Group
from kvtrio.core.events import Abort, Erase, Finished, Output, Submit, TokenOut
from kvtrio.core.identity import AdapterUse, KeyMaker, Segment
from kvtrio.core.keeping import LEAST_BYTES
from kvtrio.core.machine import Core
from kvtrio.core.types import FinishReason, StateClass
from kvtrio.schedulers.stall_free import StallFree

TOKEN = Group(StateClass.TOKEN, None, 8)
WINDOW = Group(StateClass.WINDOW, 6, 8)
POINT = Group(StateClass.POINT, None, 0, 64)
NEAR = {"checkpoint_spacing": 4, "checkpoint_grid": 8}
SMALL = {"num_places": 1, "max_context": 36, "max_waiting": 6, "num_host_blocks": 6}
SLOTS = {"num_state_slots": 4, "num_host_state_slots": 2}
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"groups": (TOKEN, TOKEN), **SMALL},
    "apart": {"groups": (TOKEN,), **SMALL, "is_unified": False},
    "no_ram": {"groups": (TOKEN,), **SMALL, "num_host_blocks": 0},
    "hybrid": {"groups": (POINT, TOKEN), **SMALL, **SLOTS, **NEAR},
    "hybrid_apart": {"groups": (TOKEN, POINT), **SMALL, **SLOTS, **NEAR, "is_unified": False},
    "windows": {"groups": (WINDOW, TOKEN), **SMALL, "num_host_window_blocks": 4, **NEAR},
    "windows_apart": {"groups": (TOKEN, WINDOW, WINDOW), **SMALL, **NEAR, "is_unified": False},
    "windows_alone": {"groups": (WINDOW,), **SMALL, "num_host_window_blocks": 2, **NEAR},
    "recurrent": {"groups": (POINT, POINT), **SMALL, **SLOTS, **NEAR},
}
ADAPTERS = ((), (AdapterUse(1, b"a" * 32, 0.5),))


@define(eq=False)
class Traffic:
    """Requests that go on from earlier ones, on servers that follow one another."""

    random: Random
    config: CoreConfig
    disk: FakeDisk = field(init=False)
    core: Core = field(init=False)
    memory: Memory = field(init=False)
    batch: Batch | None = field(init=False, default=None)
    now: float = field(init=False, default=0.0)
    number: int = field(init=False, default=0)
    open: dict[int, Submit] = field(init=False, factory=dict)
    histories: dict[int, list[Any]] = field(init=False, factory=dict)
    prompts: list[tuple[int, ...]] = field(init=False, factory=lambda: [()])
    num_disk_tokens: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.disk = FakeDisk(self.config.disk_bytes, lambda _: self.random.random() < 0.05)
        self.boot()

    def boot(self) -> None:
        """Memory is empty, and the disk is what it was."""
        keys = KeyMaker(b"secret of the tests", b"root")
        self.core = Core(self.config, StallFree(), keys)
        config = self.config
        self.memory = Memory.of(config)
        self.core.fill_disk(self.disk.heads())

    def step(self) -> None:
        """Anything that may happen."""
        chance = self.random.random()
        if chance < 0.12 and len(self.open) < 6:
            self.ask()
        elif chance < 0.14 and self.open:
            self.take(self.core.handle(Abort(self.random.choice(list(self.open))), self.now))
        elif chance < 0.15 and self.core.places.running[0] is None:
            self.take(self.core.handle(Erase(0, b""), self.now))
        elif chance < 0.5:
            self.use_disk(self.random.randint(1, 3))
        elif chance < 0.504:
            self.restart()
        elif self.batch is None:
            self.batch = self.core.schedule(self.now)
        else:
            self.update()
        invariants.check(self.core)

    def ask(self) -> None:
        base = self.random.choice(self.prompts[-8:])
        tokens = list(
            base[: self.random.choice((len(base), len(base), self.random.randint(0, len(base))))]
        )
        tokens += [self.random.randint(1, 3) for _ in range(self.random.randint(1, 8))]
        segments = (Segment(0, self.random.choice(ADAPTERS)),)
        if self.random.random() < 0.2:
            segments = (Segment(0), Segment(min(9, len(tokens)), ADAPTERS[1]))
        tokens = tokens[-30:] if len(tokens) > 30 else tokens
        self.number += 1
        event = submit(self.number, token_ids=tuple(tokens), max_new_tokens=4, segments=segments)
        self.open[event.request_id] = event
        self.histories[event.request_id] = []
        for token_id in event.token_ids:
            self.note(event.request_id, token_id)
        self.take(self.core.handle(event, self.now))

    def note(self, request_id: int, token_id: int) -> None:
        history = self.histories[request_id]
        segment = [s for s in self.open[request_id].segments if s.start <= len(history)][-1]
        history.append((token_id, segment.adapters))

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, TokenOut):
                self.note(output.request_id, output.sampled.token_id)
            elif isinstance(output, Finished):
                del self.open[output.request_id]
                self.num_disk_tokens += output.cache.num_disk_tokens
                if output.reason is FinishReason.LENGTH:
                    used = output.num_cached_tokens + output.num_computed_tokens
                    assert used == output.num_prompt_tokens
                    assert output.cache.num_reused_tokens == output.num_cached_tokens

    def update(self) -> None:
        self.now += 0.01
        batch, self.batch = self.batch, None
        assert batch is not None
        saved = self.memory.run(batch, self.histories)
        result = evolve(answer(batch, self.random.randint(1, 3)), saved=saved)
        self.take(self.core.update(batch, result, self.now))
        for chunk in batch.chunks:
            tokens = [item[0] for item in self.histories[chunk.request_id]]
            self.prompts.append(tuple(tokens))

    def use_disk(self, num_orders: int) -> None:
        self.disk.listen(self.core)
        for _ in range(min(num_orders, len(self.disk.orders))):
            self.disk.do_one(self.core, self.now)
            self.disk.listen(self.core)

    def finish(self) -> None:
        """All requests end, and what is idle is saved."""
        for _ in range(2000):
            self.use_disk(1000)
            if self.batch is None:
                self.batch = self.core.schedule(self.now)
            if self.batch is not None:
                self.update()
            elif not self.core.has_work:
                break
            invariants.check(self.core)
        assert not self.open

    def restart(self) -> None:
        """In order, or at any moment."""
        if self.random.random() < 0.5:
            self.finish()
            keeper = self.core.cache.keeper
            assert keeper is not None
            assert keeper.is_done
        self.open.clear()
        self.disk.orders.clear()
        self.batch = None
        self.boot()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_traffic_with_a_disk(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules hold after every event, prompts are accounted for once, and the disk is of use."""
    monkeypatch.setattr(fetching, "PIECE_BYTES", 2 * LEAST_BYTES)
    disk_bytes = 100_000 if kind == "hybrid" else 1_000_000
    traffic = Traffic(Random(kind), config(**KINDS[kind], disk_bytes=disk_bytes))
    for _ in range(2000):
        traffic.step()
    traffic.finish()
    assert traffic.num_disk_tokens > 10
