"""What ``kvtrio bench`` does with its flags: run, print, and leave no server behind."""

import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import trio
from attrs import frozen

from kvtrio.bench.compare import Comparison, Plan, compare
from kvtrio.bench.errors import BenchError
from kvtrio.bench.measures import QUICK, Sizes, measures
from kvtrio.bench.servers import Target
from kvtrio.bench.table import machine, plain_data, table
from kvtrio.cli import exits

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLEAR_LINE = "\r\x1b[K"


@frozen
class Wishes:
    """What the command line said."""

    a: str
    b: str
    rounds: int
    is_quick: bool
    patience_s: float

    def plan(self) -> Plan:
        return Plan(
            targets=(Target("A", self.a), Target("B", self.b)),
            measures=measures(QUICK if self.is_quick else Sizes()),
            rounds=self.rounds,
            patience_s=self.patience_s,
            progress=_show_progress if sys.stderr.isatty() else lambda _: None,
        )


def run_bench(wishes: Wishes, json_file: Path | None) -> int:
    """Return the exit code."""
    plan, comparison, problem = wishes.plan(), None, None
    try:
        if json_file is not None:
            json_file.touch()  # better found out now than after an hour
        comparison = trio.run(_until_signal, plan)
    except* (BenchError, OSError) as group:
        problem = exits.first_leaf(group)
    plan.progress("")
    if problem is not None:
        exits.complain(problem)
        return exits.USAGE
    if comparison is None:
        return exits.INTERRUPTED
    _print(comparison, plan)
    if json_file is not None:
        data = plain_data(comparison, plan)
        json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return exits.OK


async def _until_signal(plan: Plan) -> Comparison | None:
    """``None`` if a signal came first; the servers are stopped then too."""
    comparison = None
    with trio.open_signal_receiver(*SIGNALS) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_at_signal, signals, nursery.cancel_scope)
            comparison = await compare(plan)
            nursery.cancel_scope.cancel()
    return comparison


async def _cancel_at_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        scope.cancel()


def _print(comparison: Comparison, plan: Plan) -> None:
    for target, version in zip(plan.targets, comparison.versions, strict=True):
        print(f"{target.label}: {target.given}" + (f" ({version})" if version else ""))
    labels = plan.targets[0].label, plan.targets[1].label
    print(f"{machine()}; medians of {plan.rounds} rounds\n\n{table(comparison, labels)}")
    for note in comparison.notes:
        print(note)


def _show_progress(text: str) -> None:
    print(f"{CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)
