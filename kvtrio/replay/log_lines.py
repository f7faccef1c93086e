"""Lines of a log, also of a rotated one that was packed with gzip."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvtrio.replay.scenario_file import MAX_LINE_BYTES, ScenarioError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5"


def log_lines(path: Path) -> Iterator[bytes]:
    """One at a time, with their ends; a longer one than ``MAX_LINE_BYTES`` comes in parts. Raises
    ``OSError``, and ``ScenarioError`` if it cannot be unpacked."""
    with path.open("rb") as plain:
        magic = plain.peek(len(GZIP))[: len(GZIP)]
        if magic == ZSTD:
            raise ScenarioError("packed with zstd: unpack it first")
        file = gzip.GzipFile(fileobj=plain) if magic == GZIP else plain
        try:
            yield from iter(lambda: file.readline(MAX_LINE_BYTES), b"")
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise ScenarioError("packed with gzip, and damaged or cut") from None
