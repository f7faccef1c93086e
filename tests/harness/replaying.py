"""A scenario played over HTTP to a server in virtual time that records it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio
from attrs import define, evolve, frozen

from harness.cpu_models import random_cpu
from harness.serving import VOCAB_SIZE, Serving, serving
from harness.torch_models import PLAIN
from harness.virtual import SimSettings
from kvtrio.backends.cpu_backend import CpuBackend
from kvtrio.bench.http import Client
from kvtrio.cli.replay_http import ReplayClient, key_line
from kvtrio.engine.records import RequestRecord
from kvtrio.replay.actions import Operator
from kvtrio.replay.pacing import PlaySettings, schedule
from kvtrio.replay.player import Player
from kvtrio.replay.recorder import Recorder
from kvtrio.replay.results import Api, Pacing, Result, Verdict
from kvtrio.replay.scenario import SCHEMA, Header, Line, Origin
from kvtrio.replay.scenario_file import Scenario, checked, collect
from kvtrio.replay.target import Wishes, look
from kvtrio.replay.verdicts import Judge

KEY = b"log key of the tests"
PURPOSES = ("chat", "title", "recap", "probe", "tool")
SERIAL = PlaySettings(pacing=Pacing.SERIAL)


@frozen(kw_only=True)
class CpuSettings(SimSettings):
    """A server in virtual time that really computes, with a small random model."""

    made: CpuBackend

    def backend(self) -> CpuBackend:  # type: ignore[override]
        return self.made


@contextmanager
def computing(settings: SimSettings) -> Iterator[CpuSettings]:
    """``settings``, with the cpu backend."""
    model = evolve(PLAIN, vocab_size=VOCAB_SIZE)
    config = settings.config
    made = random_cpu(
        model,
        num_threads=1,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_context=config.max_context,
    )
    try:
        yield CpuSettings(
            made=made,
            groups=made.info.groups,
            num_host_blocks=made.info.num_host_blocks,
            num_places=settings.num_places,
            max_context=settings.max_context,
            max_batch_tokens=settings.max_batch_tokens,
            block_size=settings.block_size,
            is_paranoid=settings.is_paranoid,
        )
    finally:
        made.close()


@define
class Play:
    """What came of it."""

    recorded: Scenario
    """What the server recorded."""
    records: list[RequestRecord]
    """In the order of admission."""
    results: list[Result]
    verdicts: list[Verdict]
    num_left_out: int
    """Actions."""


async def play(
    scenario: Scenario,
    sim: SimSettings,
    settings: PlaySettings = SERIAL,
    *,
    adapters: int = 0,
    api: Api | None = None,
    also: Callable[[Result], None] = lambda _: None,
) -> Play:
    """Play ``scenario`` to a server with ``sim``; needs a mock clock. ``also`` gets results."""
    lines: list[Line] = []
    recorder = Recorder(lines.append, trio.current_time(), KEY)
    results: list[Result] = []
    judge = Judge(scenario.expects, counts_tokens=True)

    def tell(result: Result, answer: list[int]) -> None:
        results.append(result)
        judge.take(result, answer)
        also(result)

    async with serving(sim=evolve(sim, tap=recorder), purposes=PURPOSES) as server:
        for number in range(adapters):
            await server.add_adapter(f"adapter-{number}")
        http = client(server)
        target = await look(http, Wishes(api=api), scenario.adapters)
        plan = schedule(scenario, settings)
        operator = Operator(http, target, judge.doubt)
        await Player(scenario, plan, settings, target, http, operator, tell).play()
        records = sorted(server.stack.records.requests, key=lambda record: record.request_id)
    header = Header(
        schema=SCHEMA, origin=Origin.RECORDED, max_context=sim.max_context, purposes=PURPOSES
    )
    recorded = collect(checked([header, *lines]))
    return Play(recorded, records, results, list(judge.verdicts()), operator.left_out.total())


def client(server: Serving, api_key: str | None = None) -> ReplayClient:
    """A replay's client over memory streams."""

    async def connect() -> trio.abc.Stream:
        return server.http.connect()

    return ReplayClient(Client("localhost:8080", connect, key_line(api_key)))
