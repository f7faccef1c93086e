"""The order of things: both servers start, then each measure runs A, B, A, B, ..."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import trio
from attrs import field, frozen

from kvtrio.bench.errors import BenchError, NotMeasured
from kvtrio.bench.load import Load
from kvtrio.bench.measures import MIB, SECONDS, Measure
from kvtrio.bench.servers import Server, Target, open_server

IDLE_S = 1.0
"""From the first answer until memory counts as idle."""
SETTLE_S = 0.1
"""Between two measurements, for threads that still spin."""
READY = "ready after start"
IDLE_MEMORY = "memory, idle after start"
END_MEMORY = "memory, at the end"


@frozen(kw_only=True)
class Plan:
    """What to compare, and how often."""

    targets: tuple[Target, Target]
    measures: Sequence[Measure]
    rounds: int
    patience_s: float
    """For a start."""
    progress: Callable[[str], None]


@frozen
class Row:
    """One measure's values by server, one per round; fewer where a server would not."""

    name: str
    unit: str
    values: tuple[list[float], list[float]] = field(factory=lambda: ([], []))


@frozen(kw_only=True)
class Comparison:
    """All that was found."""

    versions: tuple[str, str]
    """What the servers call themselves; may be empty."""
    rows: list[Row]
    notes: list[str]


async def compare(plan: Plan) -> Comparison:
    """Raises ``BenchError``. Servers that were started are stopped, whatever happens."""
    for target in plan.targets:
        target.check()
    run = _Run(plan)
    async with AsyncExitStack() as stack:
        servers = await run.start(stack)
        before = Load.of(_processes(servers))
        for measure in plan.measures:
            await run.measure(measure, servers)
        run.note_others(before, servers)
        for side, server in enumerate(servers):
            run.remember(END_MEMORY, MIB, side, server.resident_mib())
        versions = await servers[0].version(), await servers[1].version()
    return Comparison(versions=versions, rows=list(run.rows.values()), notes=run.notes)


@frozen
class _Run:
    """A comparison under way."""

    plan: Plan
    rows: dict[str, Row] = field(factory=dict)
    notes: list[str] = field(factory=list)

    async def start(self, stack: AsyncExitStack) -> tuple[Server, Server]:
        """Start both in turn, as often as there are rounds; those of the last round stay."""
        for target in self.plan.targets:
            if target.url is not None:
                await open_server(target, self.plan.patience_s)  # before the other one is started
        for number in range(1, self.plan.rounds):
            for side, target in enumerate(self.plan.targets):
                if target.url is None:
                    async with AsyncExitStack() as this_round:
                        await self._open(side, number, this_round)
        last = self.plan.rounds
        return await self._open(0, last, stack), await self._open(1, last, stack)

    async def _open(self, side: int, number: int, stack: AsyncExitStack) -> Server:
        target = self.plan.targets[side]
        self.plan.progress(f"{READY}, round {number}, {target.label}")
        server = await open_server(target, self.plan.patience_s)
        stack.push_async_callback(server.stop)
        self.remember(READY, SECONDS, side, server.start_s)
        await trio.sleep(IDLE_S)
        self.remember(IDLE_MEMORY, MIB, side, server.resident_mib())
        return server

    async def measure(self, measure: Measure, servers: tuple[Server, Server]) -> None:
        for number in range(1, self.plan.rounds + 1):
            for side, server in enumerate(servers):
                self.plan.progress(f"{measure.name}, round {number}, {server.target.label}")
                await trio.sleep(SETTLE_S)
                await self._measure_once(measure, number, side, server)

    async def _measure_once(self, measure: Measure, number: int, side: int, server: Server) -> None:
        label = server.target.label
        try:
            value = await measure.run(server.client, f"{measure.name} {number}")
        except NotMeasured as error:
            note = f"{label} has no {measure.name}: {error}"
            self.notes.extend([note] if note not in self.notes else [])
            value = None
        except (OSError, BenchError) as error:
            if server.process:
                server.process.check()  # if it has ended, that says more
            raise BenchError(f"{label}, {measure.name}: {error}") from None
        self.remember(measure.name, measure.unit, side, value)

    def note_others(self, before: Load | None, servers: tuple[Server, Server]) -> None:
        """Only if both servers are known by their processes: another's work is not others' work."""
        after = Load.of(_processes(servers))
        if before and after and all(server.process for server in servers):
            share = after.others_since(before)
            self.notes.append(f"Others took {share:.0%} of the processors meanwhile.")

    def remember(self, name: str, unit: str, side: int, value: float | None) -> None:
        """Into the table; ``None`` is not known."""
        values = self.rows.setdefault(name, Row(name, unit)).values[side]
        values.extend([] if value is None else [value])


def _processes(servers: tuple[Server, Server]) -> list[int]:
    return [pid for server in servers if server.process for pid in server.process.members()]
