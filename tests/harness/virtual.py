"""The engine in virtual time: no threads; ``virtual_http`` puts HTTP on top.

Use with pytest-trio's ``autojump_clock`` fixture, or run a scenario with ``run_virtual``.

>>> async def test_it(autojump_clock: MockClock) -> None:
...     async with sim_stack() as stack:
...         with stack.engine.submit(stack.request((1, 2, 3))) as handle:
...             async for outputs in handle: ...
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
from attrs import Factory, define, evolve, field, frozen
from trio.testing import MockClock

from harness.core_fakes import NumberMatcher
from harness.fake_disk import MemoryFiles
from harness.virtual_http import Answer, Call, VirtualServer
from kvtrio.backends.base import BackendInfo
from kvtrio.backends.sim import HashTokens, Moment, SimBackend, StepCost, TokenFunction
from kvtrio.core.batch import Batch
from kvtrio.core.config import CoreConfig, Group, RamBudget
from kvtrio.core.events import Cached, Finished, Matcher, Output, Rejected, Submit, TokenOut
from kvtrio.core.identity import KeyMaker
from kvtrio.core.machine import Core
from kvtrio.core.policy import Policy
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.state import CoreStatistics
from kvtrio.core.storage import TierMoves
from kvtrio.core.stored import StoreFault
from kvtrio.core.types import StateClass
from kvtrio.engine import Engine, Handle, open_engine
from kvtrio.engine.executor import VirtualExecutor
from kvtrio.engine.mover import Disk
from kvtrio.engine.offload import InlineOffload
from kvtrio.engine.records import CostRecord, Observer, RequestRecord, StepRecord
from kvtrio.engine.tap import Tap
from kvtrio.obs.observer import FanOut
from kvtrio.schedulers.fcfs import FCFS

__all__ = [
    "Answer",
    "Call",
    "Records",
    "SimSettings",
    "SimStack",
    "VirtualServer",
    "answer_of",
    "read_all",
    "run_virtual",
    "script",
    "sim_stack",
]

T = TypeVar("T")

HORIZON_S = 1e6
"""A deadlock under the autojump clock would spin for ever; here it becomes ``TooSlowError``."""
GROUPS = (Group(StateClass.TOKEN, None, 24), Group(StateClass.WINDOW, 16, 24))


def run_virtual(main: Callable[[], Awaitable[T]], *, horizon_s: float = HORIZON_S) -> T:
    """Run ``main`` under an autojumping clock that starts at 0."""

    async def bounded() -> T:
        with trio.fail_after(horizon_s):
            return await main()

    return trio.run(bounded, clock=MockClock(autojump_threshold=0))


@frozen(kw_only=True)
class SimSettings:
    """A small server; ``config`` keeps the core's own rules (pool = places x context)."""

    num_places: int = 4
    max_context: int = 256
    max_waiting: int = 64
    max_waiting_tokens: int | None = None
    max_gap_s: float = 0.1
    max_batch_tokens: int = 32
    block_size: int = 4
    num_host_blocks: int = 32
    num_state_slots: int = 0
    num_host_state_slots: int = 0
    ram: RamBudget | None = None
    is_unified: bool = True
    disk_bytes: int = 0
    vocab_size: int = 1000
    groups: tuple[Group, ...] = GROUPS
    policy: Policy = Factory(FCFS)
    token_function: TokenFunction | None = None
    """None: tokens by hash, all of ``vocab_size``."""
    cost: Callable[[Batch], float] = Factory(StepCost)
    horizon_s: float = HORIZON_S
    tap: Tap | None = None
    """Of the engine."""
    is_paranoid: bool = True
    """False: without the checks after each event; for long traffic."""
    is_virtual: bool = True
    """False: in real time, without the checks after each event; for measurements."""

    @property
    def config(self) -> CoreConfig:
        return CoreConfig(
            groups=self.groups,
            block_size=self.block_size,
            num_host_blocks=self.num_host_blocks,
            num_state_slots=self.num_state_slots,
            num_host_state_slots=self.num_host_state_slots,
            is_unified=self.is_unified,
            ram=self.ram,
            num_places=self.num_places,
            max_context=self.max_context,
            max_waiting=self.max_waiting,
            max_waiting_tokens=self.max_waiting_tokens,
            max_gap_s=self.max_gap_s,
            max_batch_tokens=self.max_batch_tokens,
            disk_bytes=self.disk_bytes,
        )

    @property
    def info(self) -> BackendInfo:
        config = self.config
        return BackendInfo(
            name="sim",
            groups=config.groups,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            num_host_blocks=config.num_host_blocks,
            num_window_blocks=config.num_window_blocks,
            num_host_window_blocks=config.num_host_window_blocks,
            num_state_slots=config.num_state_slots,
            num_host_state_slots=config.num_host_state_slots,
            is_unified=config.is_unified,
            ram=config.ram,
            vocab_size=self.vocab_size,
            max_context=config.max_context,
            pool_bytes=0,
            weight_bytes=0,
        )

    def core(self) -> Core:
        return Core(self.config, self.policy, KeyMaker(b"secret of the tests", b"root"))

    def backend(self) -> SimBackend:
        return SimBackend(self.info, self.token_function or HashTokens(self.vocab_size))


@define
class Records:
    """Observer that keeps everything."""

    steps: list[StepRecord] = field(factory=list)
    requests: list[RequestRecord] = field(factory=list)
    hits: list[Cached] = field(factory=list)
    moves: list[TierMoves] = field(factory=list)
    faults: list[StoreFault] = field(factory=list)
    rejections: list[Rejected] = field(factory=list)
    costs: list[CostRecord] = field(factory=list)
    usages: list[CoreStatistics] = field(factory=list)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def cached(self, record: Cached) -> None:
        self.hits.append(record)

    def moved(self, record: TierMoves) -> None:
        self.moves.append(record)

    def lost(self, fault: StoreFault) -> None:
        self.faults.append(fault)

    def rejected(self, record: Rejected) -> None:
        self.rejections.append(record)

    def cost(self, record: CostRecord) -> None:
        self.costs.append(record)

    def usage(self, record: CoreStatistics) -> None:
        self.usages.append(record)


@frozen
class SimStack:
    """A running engine and what it is made of."""

    engine: Engine
    core: Core
    backend: SimBackend
    records: Records
    settings: SimSettings

    def request(
        self,
        token_ids: tuple[int, ...],
        max_new_tokens: int | None = 8,
        *,
        matcher: Matcher | None = None,
        **changes: Any,
    ) -> Submit:
        """A greedy request with a fresh id, whose text is its token numbers."""
        request = Submit(
            request_id=self.engine.new_id(),
            token_ids=token_ids,
            max_new_tokens=max_new_tokens,
            sampling=SamplingParams(temperature=0.0),
            matcher=matcher or NumberMatcher(),
        )
        return evolve(request, **changes)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests hold and the cache does not have."""
        return sum(self.core.cache.num_used.values()) - self.core.cache.index.num_blocks

    @property
    def is_empty(self) -> bool:
        """Nothing waits or runs, and every block is free or cached."""
        statistics = self.engine.statistics()
        return not (statistics.num_running or statistics.num_waiting or self.num_held_blocks)


@asynccontextmanager
async def sim_stack(
    settings: SimSettings | None = None, *others: Observer, files: MemoryFiles | None = None
) -> AsyncIterator[SimStack]:
    """Core, policy, sim backend and virtual executor under a paranoid engine; needs a mock clock.

    ``others`` observe too.
    The body has ``horizon_s`` of virtual time.
    """
    # pytest-trio sees the fixture only as an argument of the test itself, not by ``usefixtures``.
    settings = settings or SimSettings()
    is_virtual = isinstance(trio.lowlevel.current_clock(), MockClock)
    assert is_virtual is settings.is_virtual, "ask for autojump_clock"
    core, backend, records = settings.core(), settings.backend(), Records()
    disk = None
    if files is not None:
        core.fill_disk(files.heads())
        disk = Disk(files, InlineOffload(), lambda: 0.0)
    executor = VirtualExecutor(backend, settings.cost)
    with trio.fail_after(settings.horizon_s):
        observer = FanOut((records, *others))
        paranoid = is_virtual and settings.is_paranoid
        async with open_engine(
            core, executor, observer, paranoid=paranoid, tap=settings.tap, disk=disk
        ) as engine:
            yield SimStack(engine, core, backend, records, settings)


async def read_all(handle: Handle) -> list[Output]:
    """Everything a request says, to its end."""
    return [output async for outputs in handle for output in outputs]


async def answer_of(handle: Handle) -> tuple[tuple[int, ...], Finished]:
    """A request's token ids and its account."""
    outputs = await read_all(handle)
    tokens = tuple(each.sampled.token_id for each in outputs if isinstance(each, TokenOut))
    finished = outputs[-1]
    assert isinstance(finished, Finished)
    return tokens, finished


def script(token_ids: tuple[int, ...], then: int) -> TokenFunction:
    """Every request gets these tokens in turn, whatever it asked, and ``then`` from there on."""

    def choose(moment: Moment) -> int:
        return token_ids[moment.index] if moment.index < len(token_ids) else then

    return choose
