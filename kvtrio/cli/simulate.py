"""``kvtrio simulate`` and ``kvtrio calibrate``: servers in virtual time, and what steps cost."""

from pathlib import Path
from typing import Annotated, Literal

from attrs import frozen
from cyclopts import Parameter
from cyclopts.validators import Number

MAX_PLACES = MAX_BLOCK_SIZE = 1 << 14
Count = Number(gte=1)


@Parameter(name="*")
@frozen(kw_only=True)
class SimulateOptions:
    """What the server is like, and how the scenario is played."""

    machine: Annotated[
        str,
        Parameter(
            name="--machine",
            help="What steps cost: two-cores (a small model on two processor cores), h100-like (a "
            "model of 8B on a large accelerator, estimated), or a file that `kvtrio calibrate` "
            "wrote.",
        ),
    ] = "two-cores"
    scheduler: Annotated[
        tuple[str, ...],
        Parameter(
            name="--scheduler",
            negative="",
            help="As for `kvtrio serve`; by repeating the flag several, side by side.",
        ),
    ] = ("stall_free",)
    like: Annotated[
        Path | None,
        Parameter(
            name="--like",
            help="Log of a server: sizes that no flag sets are the same as there.",
        ),
    ] = None
    parallel: Annotated[
        int | None,
        Parameter(
            name=["--parallel", "-np"], validator=Number(gte=1, lte=MAX_PLACES), help="Places."
        ),
    ] = None
    ctx_size: Annotated[
        int | None,
        Parameter(
            name=["--ctx-size", "-c"],
            validator=Count,
            help="Longest request in tokens. Default: the scenario's.",
        ),
    ] = None
    ram_tokens: Annotated[
        int | None,
        Parameter(
            name="--ram-tokens",
            validator=Number(gte=0),
            help="Tokens whose state fits into RAM beside what is on the device: --cache-ram "
            "divided by the model's bytes per token. Default: 65536.",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        Parameter(
            name="--block-size",
            validator=Number(gte=1, lte=MAX_BLOCK_SIZE),
            help="Tokens per block.",
        ),
    ] = None
    max_waiting: Annotated[
        int | None,
        Parameter(
            name="--max-waiting",
            validator=Number(gte=0),
            help="Requests that may wait; more are refused. Default: 64.",
        ),
    ] = None
    max_gap_ms: Annotated[
        float | None,
        Parameter(name="--max-gap-ms", validator=Number(gt=0), help="As for `kvtrio serve`."),
    ] = None
    closed: Annotated[
        bool,
        Parameter(
            name="--closed",
            negative="",
            help="A conversation's next turn waits for the end of the turn before and then as long "
            "as its user thought. Without it requests come at their recorded times.",
        ),
    ] = False
    log: Annotated[
        Path | None,
        Parameter(
            name="--log",
            help="Write the log that the server would have written, for `kvtrio analyze`; with "
            "several schedulers the name gets theirs.",
        ),
    ] = None
    log_level: Annotated[
        Literal["info", "debug"],
        Parameter(name="--log-level", help="debug: a line of every step."),
    ] = "info"
    json: Annotated[
        bool, Parameter(name="--json", negative="", help="Print JSON instead of a table.")
    ] = False
    one_by_one: Annotated[
        bool,
        Parameter(
            name="--one-by-one",
            negative="",
            help="Take every step by itself: slower, and the same; needed for schedulers that are "
            "not kvtrio's own and change their mind about running answers as time goes by.",
        ),
    ] = False


def simulate(
    scenario: Annotated[Path, Parameter(help="A scenario file; see `kvtrio scenario`.")],
    /,
    *,
    options: SimulateOptions | None = None,
) -> int:
    """Play a scenario in virtual time: the server's own scheduler and cache, without its model.

    For example: `kvtrio simulate monday.jsonl --scheduler stall_free --scheduler fair -np 8`. The
    same scenario and flags give the same log, byte for byte.

    Exit codes: 0 done, 2 a file or a flag does not fit (one line says why), 130 interrupted, 1 a
    fault.
    """
    from kvtrio.cli.simulation import run_simulate

    return run_simulate(scenario, options or SimulateOptions())


def calibrate(
    logs: Annotated[list[Path], Parameter(help="Log files of one server, oldest first.")],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], help="File to write. Default: print to stdout."),
    ] = None,
) -> int:
    """Read from a server's log what steps cost on its machine, for `kvtrio simulate --machine`.

    The server should have run for a while under the load in question: what it never did, adapters
    say, is not known from its log.

    Exit codes: 0 done, 2 a file does not fit, 1 a fault.
    """
    from kvtrio.cli.simulation import run_calibrate

    return run_calibrate(logs, output)
