"""``kvtrio analyze``: what logs and replays say."""

from pathlib import Path
from typing import Annotated

from attrs import frozen
from cyclopts import Parameter
from cyclopts.validators import Number


@Parameter(name="*")
@frozen(kw_only=True)
class AnalyzeOptions:
    """What is asked, and where the answer goes beside the terminal."""

    compare: Annotated[
        bool,
        Parameter(
            name="--compare",
            negative="",
            help="Put two files side by side, A and B, with the noise of each difference.",
        ),
    ] = False
    json_file: Annotated[
        Path | None, Parameter(name="--json", help="Also write all tables to this file, as JSON.")
    ] = None
    csv_folder: Annotated[
        Path | None,
        Parameter(name="--csv", help="Also write each table into this folder, as a CSV file."),
    ] = None
    html_file: Annotated[
        Path | None,
        Parameter(
            name="--html",
            help="Also write one page with tables and plots, which needs nothing else.",
        ),
    ] = None
    first_token_ms: Annotated[
        float,
        Parameter(
            name="--first-token-ms",
            validator=Number(gt=0),
            help="Goodput: a request's first token is in time within this.",
        ),
    ] = 1000.0
    gap_ms: Annotated[
        float | None,
        Parameter(
            name="--gap-ms",
            validator=Number(gt=0),
            help="Goodput and stalls: an answer that pauses longer is late. Default: the bound "
            "that the server had, else 100.",
        ),
    ] = None
    memory_mib: Annotated[
        int,
        Parameter(
            name="--memory-mib",
            validator=Number(gte=256),
            help="What the database may use; what does not fit lies on disk, in $TMPDIR.",
        ),
    ] = 384


def analyze(
    logs: Annotated[
        list[Path],
        Parameter(
            help="Logs of `kvtrio serve` or of `kvtrio simulate`, or results of `kvtrio replay`, "
            "also packed with gzip or zstd. Several are read as one."
        ),
    ],
    /,
    *,
    options: AnalyzeOptions | None = None,
) -> int:
    """Turn logs into tables and plots: hits and misses, reasons, waiting, stalls, shares.

    For example: `kvtrio analyze log.jsonl --html report.html`, or
    `kvtrio analyze --compare before.jsonl after.jsonl`.

    A log may be of any length: it is read once, line by line, and kept as a fifth of its size in
    the folder for temporary files meanwhile. Damaged lines are counted and left out.

    Exit codes: 0 done, 2 something does not fit (one line says what), 130 interrupted, 1 a fault.
    """
    # The database takes a while to import; --help does without it.
    from kvtrio.cli.analysis import run_analysis

    return run_analysis(tuple(logs), options or AnalyzeOptions())
