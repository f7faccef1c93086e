"""What ``kvtrio analyze`` does with its flags: read, print, write."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from kvtrio.cli import exits
from kvtrio.cli.analyze import AnalyzeOptions
from kvtrio.replay.analysis.compare import compare, difference_table
from kvtrio.replay.analysis.compare_page import comparison_page
from kvtrio.replay.analysis.compare_text import text_comparison
from kvtrio.replay.analysis.errors import AnalysisError
from kvtrio.replay.analysis.export import try_file, write_csv, write_json, write_text
from kvtrio.replay.analysis.page import report_page
from kvtrio.replay.analysis.report import report_of
from kvtrio.replay.analysis.store import Store, open_store, total_bytes
from kvtrio.replay.analysis.table import Table
from kvtrio.replay.analysis.text import text_report
from kvtrio.replay.analysis.times import Limits

LONG_BYTES = 200_000_000
CLEAR_LINE = "\r\x1b[K"


@frozen
class Written:
    """The same answer in each form."""

    text: str
    plain: dict[str, Any]
    tables: tuple[Table, ...]
    page: str


def run_analysis(logs: tuple[Path, ...], options: AnalyzeOptions) -> int:
    """Return the exit code."""
    try:
        _check(logs, options)
        with _interrupted_by(signal.SIGTERM, signal.SIGHUP):
            written = _compared(logs, options) if options.compare else _reported(logs, options)
        if options.json_file is not None:
            write_json(options.json_file, written.plain)
        if options.csv_folder is not None:
            write_csv(options.csv_folder, written.tables)
        if options.html_file is not None:
            write_text(options.html_file, written.page)
        print(written.text)  # last: whoever reads it may stop reading
    except AnalysisError as error:
        exits.complain(error)
        return exits.USAGE
    return exits.OK


@contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """End as by Ctrl-C, so that the temporary files go; as before when the block ends."""
    before = [signal.signal(each, signal.default_int_handler) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def _check(logs: tuple[Path, ...], options: AnalyzeOptions) -> None:
    if not logs:
        raise AnalysisError("name a log")
    if options.compare and len(logs) != 2:
        raise AnalysisError("--compare takes two files")
    resolved = {path.resolve() for path in logs}
    if not options.compare and len(resolved) < len(logs):
        raise AnalysisError("a file is named twice, and would count twice")
    for path in (options.json_file, options.html_file):
        if path is not None and path.resolve() in resolved:
            raise AnalysisError(f"{path} is a log, and would be written over")
        if path is not None:
            try_file(path)


def _reported(logs: tuple[Path, ...], options: AnalyzeOptions) -> Written:
    with _opened(logs, options) as store:
        report = report_of(store, _limits(options))
    return Written(text_report(report), report.plain(), report.tables, report_page(report))


def _limits(options: AnalyzeOptions) -> Limits:
    gap_ms = options.gap_ms
    return Limits(options.first_token_ms / 1e3, None if gap_ms is None else gap_ms / 1e3)


@contextmanager
def _opened(paths: tuple[Path, ...], options: AnalyzeOptions) -> Iterator[Store]:
    """Says what takes a while, to whoever looks."""
    size = total_bytes(paths)
    is_long = size > LONG_BYTES and sys.stderr.isatty()
    if is_long:
        print(f"reading {size / 1e9:.1f} GB...", end="", file=sys.stderr, flush=True)
    with open_store(paths, options.memory_mib) as store:
        if is_long:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)
        yield store


def _compared(logs: tuple[Path, ...], options: AnalyzeOptions) -> Written:
    """Both are read before either is asked: what one server does not tell is asked of neither."""
    limits = _limits(options)
    a, b = ((path,) for path in logs)
    with _opened(a, options) as first, _opened(b, options) as second:
        comparison = compare(first, second, limits)
    tables = (difference_table(comparison.differences), *comparison.tables)
    page = comparison_page(comparison)
    return Written(text_comparison(comparison), comparison.plain(), tables, page)
