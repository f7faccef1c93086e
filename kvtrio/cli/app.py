"""The command line: parse, dispatch, turn errors into exit codes."""

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

import kvtrio
from kvtrio.cli import exits
from kvtrio.cli.analyze import analyze
from kvtrio.cli.bench import bench
from kvtrio.cli.chat import chat
from kvtrio.cli.fetch import fetch
from kvtrio.cli.inspect import inspect
from kvtrio.cli.numbers import numeric
from kvtrio.cli.replay import replay
from kvtrio.cli.scenario import scenario
from kvtrio.cli.serve import serve
from kvtrio.cli.session import session
from kvtrio.cli.simulate import calibrate, simulate
from kvtrio.cli.streams import OutputError, steady_streams

HELP = """Serve a language model to several users, over the OpenAI and llama-server APIs.

Start with `kvtrio serve`: it downloads a small model and serves it on http://127.0.0.1:8080.
"""

app = App(
    name="kvtrio",
    help=HELP,
    version=kvtrio.__version__,
    help_format="markdown",
    result_action="return_value",
    default_parameter=Parameter(converter=numeric),
)
app.command(serve)
app.command(fetch)
app.command(chat)
app.command(inspect)
app.command(bench)
app.command(analyze)
app.command(replay)
app.command(scenario)
app.command(session)
app.command(simulate)
app.command(calibrate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; see ``kvtrio.cli.exits``."""
    with steady_streams():
        try:
            code = _run(sys.argv[1:] if arguments is None else arguments)
            sys.stdout.flush()
        except OutputError as error:
            if error.is_reader_gone:
                return exits.OK  # whoever read has seen enough
            exits.complain(error)
            return exits.USAGE
    return code


def _run(arguments: Sequence[str]) -> int:
    try:
        code = app(list(arguments), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        exits.complain(f"{error} Try --help.")
        return exits.USAGE
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except OutputError:
        raise
    except Exception as error:  # a bug of ours: told as source lines, never as its message
        exits.report_bug(error)
        return exits.BUG
    return code if isinstance(code, int) else exits.OK
