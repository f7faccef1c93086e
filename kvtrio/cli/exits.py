"""How the process ends: exit codes, and what is said about a failure."""

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

OK = 0
"""Done; of ``serve``: stopped by SIGINT or SIGTERM, whenever that was."""
BUG = 1
"""A fault of ours."""
USAGE = 2
"""The command line, a file, the output or the machine does not fit; the user can change that."""
INTERRUPTED = 130
"""``fetch`` or ``chat`` was cut short; the shells' convention: 128 + SIGINT."""


def complain(message: object) -> None:
    """Tell the user in one line on stderr."""
    if isinstance(message, OSError) and message.strerror:
        where = "" if message.filename is None else f"{message.filename}: "
        message = f"{where}{message.strerror}"
    line = " ".join(str(message).split())
    print(f"kvtrio: {line}", file=sys.stderr)


class OverwriteError(OSError):
    """An output is a file that is read, too; nothing was written."""


def keep_inputs(output: Path | None, inputs: Iterable[Path]) -> None:
    """Raises ``OverwriteError``, also where links make the same file of two names."""
    if output is None or not output.exists():
        return
    if any(each.exists() and os.path.samefile(each, output) for each in inputs):
        raise OverwriteError(0, "it is read, and would be written over", str(output))


def report_bug(error: BaseException) -> None:
    """Print where a fault of ours happened, without any value: it could be a user's text."""
    print("kvtrio: internal error; the lines below hold no user data", file=sys.stderr)
    for line in trace_lines(error):
        print(line, file=sys.stderr)


def first_leaf(error: BaseException) -> BaseException:
    """Return the first error in a group that is no group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def trace_lines(error: BaseException) -> Iterator[str]:
    """Yield type and source positions of an error and of all it holds; no message."""
    for frame in traceback.extract_tb(error.__traceback__):
        yield f"  {frame.filename}:{frame.lineno} in {frame.name}"
    yield f"{type(error).__module__}.{type(error).__qualname__}"
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for other in (*inner, *((cause,) if cause else ())):
        yield "from:"
        yield from trace_lines(other)
