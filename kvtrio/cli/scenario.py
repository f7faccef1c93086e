"""``kvtrio scenario``: make, import and look at scenario files."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from kvtrio.cli import exits
from kvtrio.replay.make_settings import MakeSettings

if TYPE_CHECKING:
    from kvtrio.replay.scenario import Line

NOTHING_MADE = "that makes no request: there are none, or none fits into --max-context"

scenario = App(name="scenario", help="Make, import and look at scenario files.")

Out = Annotated[Path, Parameter(help="The scenario file to write.")]


@scenario.command
def make(
    out: Out,
    /,
    *,
    settings: Annotated[MakeSettings | None, Parameter(name="*")] = None,
) -> int:
    """Make up traffic: conversations of several turns, and what happens beside them.

    The same flags give the same scenario.
    """
    from kvtrio.replay import maker

    chosen = settings or MakeSettings()
    if (fault := chosen.fault()) is not None:
        exits.complain(fault)
        return exits.USAGE
    return _written(out, lambda: _with_requests(maker.make(chosen), NOTHING_MADE))


@scenario.command(name="import")
def import_trace(
    kind: Annotated[
        Literal["mooncake", "azure", "log"],
        Parameter(help="mooncake (JSON lines), azure (CSV), or log: one that kvtrio wrote."),
    ],
    file: Annotated[Path, Parameter(help="The trace.")],
    out: Out,
    /,
    *,
    shrink: Annotated[
        int,
        Parameter(
            name="--shrink",
            validator=Number(gte=1),
            help="Divide all lengths of a trace by this, for small models.",
        ),
    ] = 1,
) -> int:
    """Turn a traffic trace into a scenario.

    An Azure trace does not say what prompts have in common, and a log only how much of a prompt
    was known: there it is guessed.
    """
    from kvtrio.replay import import_log, imports

    def lines() -> "Iterable[Line]":
        if kind == "mooncake":
            return imports.import_mooncake(file, shrink)
        if kind == "azure":
            return imports.import_azure(file, shrink)
        return import_log.import_log(file)

    nothing = f"there is no request in it, as {kind} has them"
    return _written(out, lambda: _with_requests(lines(), nothing), file)


@scenario.command
def incident(
    name: Annotated[str, Parameter(help="Its name; `all` writes each to a file of its name.")],
    out: Annotated[Path, Parameter(help="The scenario file to write, or the folder for all.")],
    /,
) -> int:
    """Write what went wrong on some server as a scenario that says what has to come out instead.

    scenarios/README.md of the repository tells the stories.
    """
    from kvtrio.replay.incidents import INCIDENTS

    if name == "all":
        written = [_written(out / f"{each}.jsonl", INCIDENTS[each]) for each in INCIDENTS]
        return max(written)
    if name not in INCIDENTS:
        exits.complain(f"no incident of that name: {', '.join(INCIDENTS)}, or all")
        return exits.USAGE
    return _written(out, INCIDENTS[name])


@scenario.command
def show(file: Annotated[Path, Parameter(help="A scenario file.")], /) -> int:
    """Check a scenario file, and say what is in it."""
    from kvtrio.replay.outline import outline
    from kvtrio.replay.scenario_file import ScenarioError, read_scenario

    try:
        found = read_scenario(file)
    except (ScenarioError, OSError) as error:
        exits.complain(error)
        return exits.USAGE
    for line in outline(found):
        print(line)
    return exits.OK


def _with_requests(lines: "Iterable[Line]", nothing: str) -> "Iterator[Line]":
    from kvtrio.replay.scenario import Request
    from kvtrio.replay.scenario_file import ScenarioError

    is_empty = True
    for line in lines:
        is_empty = is_empty and not isinstance(line, Request)
        yield line
    if is_empty:
        raise ScenarioError(nothing)


def _written(out: Path, lines: "Callable[[], Iterable[Line]]", *sources: Path) -> int:
    from kvtrio.replay.scenario_file import ScenarioError, write_scenario

    try:
        exits.keep_inputs(out, sources)
        write_scenario(out, lines())
    except (ScenarioError, OSError) as error:
        exits.complain(error)
        return exits.USAGE
    return exits.OK
