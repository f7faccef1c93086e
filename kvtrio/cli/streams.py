"""Standard streams that fail in one known way: a full disk is no fault of ours.

1. What cannot be written to standard output is an ``OutputError``, and nothing else is.
2. What cannot be written to standard error is lost: there is nobody left to tell.
3. Python finds nothing to complain about when it closes both at the end.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast


class OutputError(Exception):
    """Standard output cannot be written; one clear line says why."""

    def __init__(self, error: OSError | ValueError) -> None:
        number = getattr(error, "errno", None) or errno.EBADF
        super().__init__(f"cannot write the output: {os.strerror(number)}")
        self.is_reader_gone = number == errno.EPIPE


class Output:
    """Standard output. Signs that its encoding lacks become question marks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                return self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:
            raise OutputError(error) from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            raise OutputError(error) from None


class Errors:
    """Standard error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            return


@contextmanager
def steady_streams() -> Iterator[None]:
    """Inside, the streams are as the module says; afterwards as before, with nothing unwritten."""
    open_missing()
    stdout, stderr = sys.stdout, sys.stderr
    try:
        with (
            redirect_stdout(cast(TextIO, Output(stdout))),
            redirect_stderr(cast(TextIO, Errors(stderr))),
        ):
            yield
    finally:
        drop_unwritten(stdout)
        drop_unwritten(stderr)


def open_missing() -> None:
    """Put the null device where the process was started without a stream.

    Else the next file that is opened, a log or a socket, would take its place. Output goes to a
    descriptor that cannot be written, so that it fails as it should.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # takes the lowest free number
    # Python makes no object for a closed descriptor, whatever its types say.
    streams = cast("dict[str, TextIO | None]", vars(sys))
    for name, mode, way in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if streams[name] is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, mode), way))


def drop_unwritten(stream: TextIO) -> None:
    """Flush; what cannot be written goes to the null device rather than fail once more at exit."""
    try:
        stream.flush()
    except (OSError, ValueError):
        if not stream.closed:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
