"""What ``kvtrio replay`` does with its flags: read, look, play, tell; and keep what there is."""

import hashlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import trio
from attrs import define, frozen
from tqdm import tqdm

from kvtrio.cli import exits
from kvtrio.cli.replay import ReplayOptions
from kvtrio.cli.replay_http import client_for
from kvtrio.replay.actions import Operator
from kvtrio.replay.pacing import PlaySettings, Schedule, schedule
from kvtrio.replay.played import Played
from kvtrio.replay.player import Player
from kvtrio.replay.realise import mixed
from kvtrio.replay.results import Api, End, Line, Pacing, Result, Run, Verdict, encode_line
from kvtrio.replay.scenario import Adapter, What
from kvtrio.replay.scenario_file import Scenario, ScenarioError, read_scenario
from kvtrio.replay.target import ReplayError, Target, Wishes, look
from kvtrio.replay.verdicts import Judge

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MISSING = {
    What.SCALES: "the server has no such adapters, or cannot set scales",
    What.SAVE: "the server cannot, or has no --slot-save-path",
    What.RESTORE: "the server cannot, or has no --slot-save-path",
    What.ERASE: "the server cannot",
    What.RESTART: "--restart COMMAND says how",
}
"""What an action that was left out needs."""
NOT_AS_EXPECTED = 3
"""Exit code."""


def wishes(options: ReplayOptions) -> Wishes:
    """Raises ``ReplayError``."""
    pairs = [each.partition("=") for each in options.adapter]
    if not all(alias and name for alias, _, name in pairs):
        raise ReplayError("--adapter: not like a0=NAME")
    try:
        more = json.loads(options.body)
    except ValueError:
        more = None
    if not isinstance(more, dict):
        raise ReplayError("--body: not a JSON object")
    return Wishes(
        api=None if options.api is None else Api(options.api),
        model=options.model,
        adapters={alias: name for alias, _, name in pairs},
        without_adapters=not options.adapters,
        more=more,
    )


@frozen
class _Given:
    """What is played, and how."""

    scenario: Scenario
    digest: str
    """Of its file."""
    url: str
    options: ReplayOptions

    @property
    def settings(self) -> PlaySettings:
        """Another file has other tokens, so that what one leaves in a server is no use to the
        next."""
        return PlaySettings(
            pacing=Pacing(self.options.pacing),
            speed=self.options.speed,
            sample=self.options.sample,
            seed=mixed(self.options.seed, int(self.digest[:16], 16)),
        )


def run_replay(path: Path, url: str, options: ReplayOptions) -> int:
    """Return the exit code."""
    problem: BaseException | None = None
    code = exits.INTERRUPTED
    try:
        exits.keep_inputs(options.out, [path])
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        given = _Given(read_scenario(path), digest, url, options)
        with _opened(options.out) as file:
            code = trio.run(_replay, given, file)
    except* (ReplayError, ScenarioError, OSError) as group:
        problem = exits.first_leaf(group)
    if problem is not None:
        exits.complain(problem)
        return exits.USAGE
    return code


@contextmanager
def _opened(path: Path | None) -> Iterator[BinaryIO | None]:
    if path is None:
        yield None
    else:
        with path.open("wb", buffering=0) as file:
            yield file


async def _replay(given: _Given, file: BinaryIO | None) -> int:
    scenario, options = given.scenario, given.options
    http = client_for(given.url, options.api_key)
    target = await look(http, wishes(options), _used_adapters(scenario))
    plan = schedule(scenario, given.settings)
    _warn(scenario, target)
    report = _Report(
        file=file,
        summary=Played(len(plan.numbers)),
        judge=Judge(scenario.expects, target.api is Api.TOKENS),
    )
    report.write(_run_line(given, plan, target))
    operator = Operator(http, target, report.judge.doubt, _restarter(options.restart))
    player = Player(scenario, plan, given.settings, target, http, operator, report.take)
    began_s = trio.current_time()
    # A second signal is looked at when all is told: `timeout` sends two, impatient people more.
    with trio.open_signal_receiver(*SIGNALS) as signals:
        with tqdm(total=len(plan.numbers), unit=" requests", disable=None) as bar:
            report.bar = bar
            is_complete = await _until_signal(player, signals)
        for what, number in operator.left_out.items():
            exits.complain(f"left out {number} times {what.value}: {MISSING[what]}")
        return _tell(report, is_complete, trio.current_time() - began_s)


async def _until_signal(player: Player, signals: AsyncIterator[int]) -> bool:
    """Whether all was played; else a signal came first."""
    is_complete = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_at_signal, signals, nursery.cancel_scope)
        await player.play()
        is_complete = True
        nursery.cancel_scope.cancel()
    return is_complete


async def _cancel_at_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        scope.cancel()


@define(eq=False)
class _Report:
    """Where results go."""

    file: BinaryIO | None
    summary: Played
    judge: Judge
    bar: Any = None

    def take(self, result: Result, answer: list[int]) -> None:
        self.write(result)
        self.summary.take(result)
        self.judge.take(result, answer)
        self.bar.update()

    def write(self, line: Line) -> None:
        if self.file is not None:
            self.file.write(encode_line(line))


def _tell(report: _Report, is_complete: bool, wall_s: float) -> int:
    verdicts: list[Verdict] = list(report.judge.verdicts())
    for verdict in verdicts:
        report.write(verdict)
    num_results = report.summary.num_results
    report.write(End(is_complete=is_complete, num_results=num_results, wall_s=round(wall_s, 3)))
    for line in report.summary.lines(wall_s, verdicts):
        print(line)
    if not is_complete:
        return exits.INTERRUPTED
    return NOT_AS_EXPECTED if any(each.is_met is False for each in verdicts) else exits.OK


def _run_line(given: _Given, plan: Schedule, target: Target) -> Run:
    settings = given.settings
    return Run(
        scenario=given.digest,
        num_requests=len(plan.numbers),
        pacing=settings.pacing,
        speed=settings.speed,
        sample=settings.sample,
        seed=given.options.seed,
        server=target.kind,
        api=target.api,
        started_s=round(time.time(), 3),
    )


def _used_adapters(scenario: Scenario) -> tuple[Adapter, ...]:
    used = {use.alias for request in scenario.requests for use in request.adapters}
    used |= {use.alias for _, action in scenario.actions for use in action.scales}
    return tuple(each for each in scenario.adapters if each.alias in used)


def _warn(scenario: Scenario, target: Target) -> None:
    longest = max(
        (each.prompt_tokens + each.output_tokens for each in scenario.requests), default=0
    )
    room = target.max_context
    if room is not None and longest > room:
        exits.complain(f"the longest request has {longest} tokens and the server room for {room}")


def _restarter(command: str | None) -> Any:
    if command is None:
        return None

    async def restart() -> None:
        done = await trio.run_process(command, shell=True, check=False, stdout=sys.stderr)
        if done.returncode:
            raise ReplayError(f"--restart: the command ended with {done.returncode}")

    return restart
