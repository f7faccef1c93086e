"""Logs and results, read once into a temporary database.

1. A file is read line by line, whatever its length; the database lies on disk and takes a fifth of
   the log's size, in the folder for temporary files.
2. A line that is not one of ours is counted and says nothing further.
3. What DuckDB says about a file may quote it, and is never passed on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
from attrs import define, frozen

from kvtrio.replay.analysis.errors import AnalysisError
from kvtrio.replay.analysis.views import REQUESTS, VIEWS
from kvtrio.replay.analysis.words import COLUMNS as READ
from kvtrio.replay.analysis.words import RAW, SCHEMAS, checked, declarations, enum_types

MEMORY_MIB = 384
"""What the database may use; the process takes about 300 MiB more."""
MAX_LINE_BYTES = 16 << 20
MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5": ".zst"}
MACROS = (
    "CREATE MACRO within(x) AS CASE WHEN x BETWEEN 0 AND 1000000000000000 THEN x END",
    """CREATE MACRO session_of(x, kind) AS
        TRY_CAST(CASE WHEN kind IS NULL THEN '0x' || x ELSE x END AS UBIGINT)""",
    """CREATE MACRO tenant_of(x, kind) AS
        CASE WHEN kind IS NULL AND regexp_full_match(x, '[0-9a-f]{16}') THEN x
             WHEN regexp_full_match(x, '[0-9]{1,9}') THEN '#' || x END""",
    """CREATE MACRO adapters_of(x, kind) AS
        CASE WHEN kind IS NULL AND regexp_full_match(x, '[0-9a-f]{16}') THEN x
             WHEN kind IS NOT NULL THEN nullif(replace(replace(array_to_string(
                 regexp_extract_all(x, '"alias":"(a[0-9]{1,6}"(,"scale":[-+.e0-9]{1,24})?)', 1),
                 ' + '), '","scale":', ' x '), '"', ''), '') END""",
)
STATUS = """CASE
    WHEN event IS NULL AND kind IS NULL THEN 'bad'
    WHEN kind IS NULL AND schema IS DISTINCT FROM $log THEN 'foreign'
    WHEN kind = 'run' AND schema IS DISTINCT FROM $results THEN 'foreign'
    WHEN TRY_CAST(event AS event_word) IS NULL AND TRY_CAST(kind AS kind_word) IS NULL
        THEN 'unknown'
    WHEN event = 'request.done' AND (timestamp IS NULL OR within(num_prompt_tokens) IS NULL)
        THEN 'bad'
    ELSE 'good' END"""
SOURCE = """CASE WHEN kind IS NULL THEN 0
    ELSE CAST(regexp_extract(filename, '([0-9]+)[.]jsonl', 1) AS UINTEGER) END"""
"""Which of the files a replay's line is from: replays number their sessions and time alike."""


@frozen(kw_only=True)
class Source:
    """One body of traffic: what was read, and how much of it could be used."""

    names: tuple[str, ...]
    num_bytes: int
    num_lines: int
    num_bad: int
    """Neither a log's line nor a result, or one without what it needs."""
    num_foreign: int
    """Of another version."""
    num_unknown: int
    """Of a kind that this version does not know."""


@define(eq=False)
class Store:
    """Ask with ``rows``; views are in ``views``."""

    connection: duckdb.DuckDBPyConnection
    source: Source

    def rows(self, sql: str, **values: Any) -> list[tuple[Any, ...]]:
        """The query's rows. ``$name`` stands for a value."""
        with _translated():
            return self.connection.execute(sql, values or None).fetchall()

    def row(self, sql: str, **values: Any) -> tuple[Any, ...]:
        (row,) = self.rows(sql, **values)
        return row

    @property
    def scenario(self) -> int | None:
        """A digest of the scenario that was replayed; None: a log, or more than one scenario."""
        found = self.rows("SELECT DISTINCT scenario_hash FROM good WHERE kind = 'run'")
        return found[0][0] if len(found) == 1 else None

    @property
    def is_untold(self) -> bool:
        """Whether a replayed server did not say why it reused no more."""
        (number,) = self.row(
            """SELECT count(*) FROM good WHERE kind = 'result' AND outcome = 'done'
               AND miss_reason IS NULL"""
        )
        return bool(number)

    def judge_by_tokens(self, is_so: bool) -> None:
        """Take no notice of what replayed servers said themselves; see ``views``."""
        with _translated():
            self.connection.execute(f"SET VARIABLE is_untold = {is_so}")
            self.connection.execute(REQUESTS)


@contextmanager
def open_store(paths: Sequence[Path], memory_mib: int = MEMORY_MIB) -> Iterator[Store]:
    """Read the files; what is on disk goes when the block ends. Raises ``AnalysisError``."""
    num_bytes = total_bytes(paths)
    with TemporaryDirectory(prefix="kvtrio-analyze-") as name, _translated():
        folder = Path(name)
        with _connected(folder, memory_mib) as connection:
            links = _linked(paths, folder)
            _read(connection, links)
            yield Store(connection, _source(connection, paths, num_bytes))


def total_bytes(paths: Sequence[Path]) -> int:
    """Of all files. Raises ``AnalysisError`` if one is none, or cannot be looked at."""
    total = 0
    for path in paths:
        try:
            if not path.is_file():
                raise AnalysisError(f"{path} is not a file")
            total += path.stat().st_size
        except OSError as error:
            raise AnalysisError(f"cannot read {path}: {error.strerror}") from None
    return total


@contextmanager
def _connected(folder: Path, memory_mib: int) -> Iterator[duckdb.DuckDBPyConnection]:
    config: dict[str, Any] = {
        "memory_limit": f"{memory_mib}MiB",
        "temp_directory": str(folder / "spill"),
        "preserve_insertion_order": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    connection = duckdb.connect(folder / "lines.db", config=config)
    try:
        yield connection
    finally:
        connection.close()


def _linked(paths: Sequence[Path], folder: Path) -> list[str]:
    """Names without any character that the reader would take for a pattern or a protocol."""
    links = []
    for number, path in enumerate(paths):
        try:
            with path.open("rb") as file:
                suffix = MAGIC.get(file.read(2), "")
        except OSError as error:
            raise AnalysisError(f"cannot read {path}: {error.strerror}") from None
        link = folder / f"{number}.jsonl{suffix}"
        link.symlink_to(path.resolve())
        links.append(str(link))
    return links


def _read(connection: duckdb.DuckDBPyConnection, links: list[str]) -> None:
    connection.begin()
    for statement in (*enum_types(), *MACROS):
        connection.execute(statement)
    kept = ", ".join(checked(name) for name in READ if name not in RAW)
    connection.execute(
        f"""CREATE TABLE lines AS SELECT {STATUS} AS status, {kept},
                hash(scenario) AS scenario_hash, {SOURCE} AS source
            FROM read_json($links, format = 'newline_delimited', columns = {declarations()},
                filename = true, ignore_errors = true, maximum_object_size = {MAX_LINE_BYTES})""",
        {"links": links, "log": SCHEMAS[0], "results": SCHEMAS[1]},
    )
    for statement in (*VIEWS, REQUESTS):
        connection.execute(statement)
    connection.commit()


def _source(connection: duckdb.DuckDBPyConnection, paths: Sequence[Path], num_bytes: int) -> Source:
    counts = dict(connection.execute("SELECT status, count(*) FROM lines GROUP BY 1").fetchall())
    return Source(
        names=tuple(path.name for path in paths),
        num_bytes=num_bytes,
        num_lines=sum(counts.values()),
        num_bad=counts.get("bad", 0),
        num_foreign=counts.get("foreign", 0),
        num_unknown=counts.get("unknown", 0),
    )


@contextmanager
def _translated() -> Iterator[None]:
    """DuckDB's errors as ours, without its words."""
    try:
        yield
    except duckdb.OutOfMemoryException:
        raise AnalysisError("more memory is needed than --memory-mib allows") from None
    except duckdb.InvalidInputException:
        raise AnalysisError("a file is no log: it has a line longer than 16 MiB") from None
    except (duckdb.IOException, duckdb.HTTPException):
        raise AnalysisError("cannot read a file, or no room for temporary files") from None
