"""What ``kvtrio simulate`` and ``kvtrio calibrate`` do with their flags."""

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from attrs import define, field, frozen
from msgspec import Meta

from kvtrio.cli import exits
from kvtrio.cli.collector import no_full_collections
from kvtrio.cli.logs import version
from kvtrio.cli.simulate import MAX_BLOCK_SIZE, MAX_PLACES, SimulateOptions
from kvtrio.core.config import CoreConfig, Group, RamBudget
from kvtrio.core.types import StateClass
from kvtrio.engine.records import Observer
from kvtrio.obs.logging import Clock, Log
from kvtrio.obs.observer import FanOut, JsonObserver
from kvtrio.obs.schema import Level
from kvtrio.plugins import SCHEDULERS, PluginError, load
from kvtrio.replay.log_lines import log_lines
from kvtrio.replay.machines import (
    Calibration,
    MachineError,
    StepSeconds,
    calibrate,
    describe,
    named,
)
from kvtrio.replay.outcome import Numbers, Outcome, side_by_side
from kvtrio.replay.scenario import MAX_TOKENS
from kvtrio.replay.scenario_file import Scenario, ScenarioError, read_scenario
from kvtrio.replay.simulated_start import simulated_start
from kvtrio.replay.simulation import SimulatedServer, Simulation

MAX_BATCH_TOKENS = 4096
LOG_KEY = bytes(32)
"""Known to everybody: equal runs write equal logs, and there is no user to hide."""
BUFFER_BYTES = 1 << 20
SHOW_EVERY = 256
MAX_BLOCKS = 1 << 24
MAX_BYTES = 1 << 50
PARTS_SHARE = 3
"""See ``backends.groups``."""
"""Of device and RAM together; each takes some dozens of bytes here."""
Many = Annotated[int, Meta(ge=0, le=1 << 40)]
USER_ERRORS = (MachineError, PluginError, ScenarioError, OSError)


class _Sizes(msgspec.Struct):
    """Of a server's first line, what a simulation takes over."""

    event: str
    num_places: Annotated[int, Meta(ge=1, le=MAX_PLACES)] = 4
    max_context: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 8192
    max_waiting: Many = 64
    max_batch_tokens: Annotated[int, Meta(ge=1, le=1 << 40)] = MAX_BATCH_TOKENS
    max_gap_s: Annotated[float, Meta(gt=0)] = 0.1
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)] = 16
    num_host_blocks: Many = 4096
    num_state_slots: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    num_host_state_slots: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    shared_ram_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)] = 0
    shared_block_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)] = 0
    shared_part_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)] = 0
    bytes_per_state: Annotated[int, Meta(ge=0)] = 0


def run_simulate(path: Path, options: SimulateOptions) -> int:
    """Return the exit code."""
    try:
        scenario = read_scenario(path)
        config = _config(scenario, options)
        machine = named(options.machine)
        runs = [_Run(name, config, machine, options) for name in options.scheduler]
        for run in runs if options.log is not None else ():
            others = (options.like, Path(options.machine))
            exits.keep_inputs(_log_path(run), (path, *filter(None, others)))
        columns = {run.scheduler: _simulated(scenario, run) for run in runs}
    except USER_ERRORS as error:
        exits.complain(error)
        return exits.USAGE
    print(json.dumps(columns, indent=1) if options.json else side_by_side(columns))
    return exits.OK


@frozen
class _Run:
    """One column of the table."""

    scheduler: str
    config: CoreConfig
    machine: StepSeconds
    options: SimulateOptions


@define(eq=False)
class _VirtualClock:
    """Of a simulation's log."""

    start_s: float
    simulation: Simulation | None = field(default=None)

    def wall_s(self) -> float:
        return self.start_s + (self.simulation.now if self.simulation else 0.0)

    def monotonic_ns(self) -> int:
        return round(1e9 * (self.simulation.now if self.simulation else 0.0))


def _simulated(scenario: Scenario, run: _Run) -> Numbers:
    options, outcome = run.options, Outcome()
    server = SimulatedServer(
        config=run.config,
        policy=load(SCHEDULERS, run.scheduler)(),
        machine=run.machine,
        is_closed=options.closed,
        is_merged=not options.one_by_one,
    )
    clock = _VirtualClock(scenario.header.started_s or 0.0)
    with ExitStack() as stack:
        observers: list[Observer] = [outcome]
        log, wants_step = None, _never
        if options.log is not None:
            file = stack.enter_context(_buffered(_log_path(run)))
            plain = Clock(monotonic_ns=clock.monotonic_ns, wall_s=clock.wall_s)
            log = Log(file, plain, Level(options.log_level))
            writer = JsonObserver(log, key=LOG_KEY)
            log.emit(simulated_start(run.config, len(scenario.adapters), version()))
            observers.append(writer)
            wants_step = writer.wants_step
        simulation = Simulation(server, scenario, FanOut(tuple(observers)), wants_step)
        clock.simulation = simulation
        gc.collect()  # the run before left its cache, whose blocks know each other
        with no_full_collections():
            _show(simulation, run.scheduler, scenario)
        if log is not None:
            log.file.flush()
            if log.num_lost:
                raise OSError(0, "not all of it could be written", str(_log_path(run)))
    return outcome.rows(simulation.now, simulation.num_steps)


def _never(step: int, duration_s: float) -> bool:
    return False


def _log_path(run: _Run) -> Path:
    path = run.options.log
    assert path is not None
    several = len(run.options.scheduler) > 1
    return path.with_stem(f"{path.stem}-{run.scheduler}") if several else path


@contextmanager
def _buffered(path: Path) -> Iterator[BinaryIO]:
    """Written anew; if it is new, for its owner's eyes. A name that is a device's stays one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=BUFFER_BYTES)
    try:
        yield file
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from None
    finally:
        with suppress(OSError):
            file.close()


def _show(simulation: Simulation, name: str, scenario: Scenario) -> None:
    """Run it, with progress at a terminal."""
    end_s = scenario.requests[-1].at_s if scenario.requests else 0.0
    is_shown = sys.stderr.isatty()
    for number, now in enumerate(simulation.run()):
        if is_shown and number % SHOW_EVERY == 0:
            done = f"{min(now / end_s, 1.0):.0%}" if end_s else ""
            print(f"\r\x1b[K{name} {done}", end="", file=sys.stderr, flush=True)
    if is_shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if simulation.num_left_out:
        print(
            f"{simulation.num_left_out} actions left out: saving, restoring and erasing places is "
            "not simulated",
            file=sys.stderr,
        )


def _config(scenario: Scenario, options: SimulateOptions) -> CoreConfig:
    sizes = _sizes_like(options.like) if options.like else _Sizes(event="")
    if not options.like:
        sizes.num_places = scenario.header.num_places or sizes.num_places
        sizes.max_context = scenario.header.max_context
    block_size = options.block_size or sizes.block_size
    num_host_blocks = _host_blocks(sizes) * sizes.block_size // block_size
    if options.ram_tokens is not None:
        num_host_blocks = options.ram_tokens // block_size
    groups = [Group(StateClass.TOKEN, None, 1)]
    if sizes.bytes_per_state:
        groups.append(Group(StateClass.POINT, None, 0, sizes.bytes_per_state))
    num_places = options.parallel or sizes.num_places
    gap_s = options.max_gap_ms / 1e3 if options.max_gap_ms else sizes.max_gap_s
    ram = _shared_ram(sizes, options.ram_tokens, block_size)
    if ram is not None:
        num_host_blocks = ram.most(ram.block_bytes)
    config = CoreConfig(
        groups=tuple(groups),
        block_size=block_size,
        num_places=num_places,
        max_context=options.ctx_size or sizes.max_context,
        max_waiting=sizes.max_waiting if options.max_waiting is None else options.max_waiting,
        max_batch_tokens=max(sizes.max_batch_tokens, num_places),
        max_gap_s=gap_s,
        num_host_blocks=num_host_blocks,
        num_state_slots=max(sizes.num_state_slots, 2 * num_places) if sizes.bytes_per_state else 0,
        num_host_state_slots=ram.most(ram.state_bytes) if ram else sizes.num_host_state_slots,
        ram=ram,
    )
    if config.num_blocks + config.num_host_blocks > MAX_BLOCKS:
        raise MachineError(f"more than {MAX_BLOCKS:,} blocks: places, context or RAM are too many")
    return config


def _host_blocks(sizes: _Sizes) -> int:
    """Windows are not simulated: where they share RAM, a block has as much of a part as where
    each kind has its share."""
    part_bytes = sizes.shared_part_bytes
    if sizes.bytes_per_state or not (part_bytes and sizes.shared_block_bytes):
        return sizes.num_host_blocks
    return (
        PARTS_SHARE
        * sizes.shared_ram_bytes
        // (PARTS_SHARE * sizes.shared_block_bytes + part_bytes)
    )


def _shared_ram(sizes: _Sizes, ram_tokens: int | None, block_size: int) -> RamBudget | None:
    """What blocks and states share; ``ram_tokens``: as much as these would take alone."""
    block_bytes = sizes.shared_block_bytes * block_size // sizes.block_size
    if not (sizes.bytes_per_state and block_bytes and sizes.shared_ram_bytes):
        return None
    asked = None if ram_tokens is None else ram_tokens // block_size * block_bytes
    return RamBudget(
        num_bytes=sizes.shared_ram_bytes if asked is None else asked,
        block_bytes=block_bytes,
        state_bytes=sizes.bytes_per_state,
    )


def _sizes_like(path: Path) -> _Sizes:
    decode = msgspec.json.Decoder(_Sizes).decode
    for raw in log_lines(path):
        if b'"server.start"' in raw:
            try:
                return decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
    raise MachineError(f"{path}: no server.start line of a kvtrio log")


def _accuracy(found: Calibration) -> str:
    if not found.num_compared:
        return "the log has no step behind that to compare with"
    steps, error = f"{found.num_compared:,} steps in the log", f"{found.error:.0%}"
    return f"half of the {steps} took within {error} of it"


def run_calibrate(paths: list[Path], output: Path | None) -> int:
    """Return the exit code."""
    try:
        exits.keep_inputs(output, paths)
        found = calibrate(chain.from_iterable(map(log_lines, paths)))
        data = describe(found.machine, found.num_observed)
        if output is None:
            print(data.decode(), end="")
        else:
            output.write_bytes(data)
    except USER_ERRORS as error:
        exits.complain(error)
        return exits.USAGE
    print(f"fitted to {found.num_observed:,} steps; {_accuracy(found)}", file=sys.stderr)
    return exits.OK
