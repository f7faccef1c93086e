"""What ``kvtrio analyze`` does with its flags: read, print, write."""

from pathlib import Path
from typing import Any

from attrs import frozen

from kvtrio.cli import exits
from kvtrio.replay.analysis.compare import compare, difference_table
from kvtrio.replay.analysis.compare_page import comparison_page
from kvtrio.replay.analysis.compare_text import text_comparison
from kvtrio.replay.analysis.errors import AnalysisError
from kvtrio.replay.analysis.export import write_csv, write_json, write_text
from kvtrio.replay.analysis.page import report_page
from kvtrio.replay.analysis.report import Report, report_of
from kvtrio.replay.analysis.store import open_store
from kvtrio.replay.analysis.table import Table
from kvtrio.replay.analysis.text import text_report
from kvtrio.replay.analysis.times import Limits


@frozen(kw_only=True)
class Wishes:
    """What the command line said."""

    logs: tuple[Path, ...]
    is_comparison: bool
    json_file: Path | None
    csv_folder: Path | None
    html_file: Path | None
    limits: tuple[float, float | None]
    """Seconds: to the first token, between two tokens."""
    memory_mib: int


@frozen
class Written:
    """The same answer in each form."""

    text: str
    plain: dict[str, Any]
    tables: tuple[Table, ...]
    page: str


def run_analysis(wishes: Wishes) -> int:
    """Return the exit code."""
    try:
        _check(wishes)
        written = _compared(wishes) if wishes.is_comparison else _reported(wishes)
        print(written.text)
        if wishes.json_file is not None:
            write_json(wishes.json_file, written.plain)
        if wishes.csv_folder is not None:
            write_csv(wishes.csv_folder, written.tables)
        if wishes.html_file is not None:
            write_text(wishes.html_file, written.page)
    except AnalysisError as error:
        exits.complain(error)
        return exits.USAGE
    return exits.OK


def _check(wishes: Wishes) -> None:
    if not wishes.logs:
        raise AnalysisError("name a log")
    if wishes.is_comparison and len(wishes.logs) != 2:
        raise AnalysisError("--compare takes two files")
    if not wishes.is_comparison and len({path.resolve() for path in wishes.logs}) < len(
        wishes.logs
    ):
        raise AnalysisError("a file is named twice, and would count twice")


def _reported(wishes: Wishes) -> Written:
    report = _report(wishes, wishes.logs)
    return Written(text_report(report), report.plain(), report.tables, report_page(report))


def _report(wishes: Wishes, paths: tuple[Path, ...]) -> Report:
    with open_store(paths, wishes.memory_mib) as store:
        return report_of(store, Limits(*wishes.limits))


def _compared(wishes: Wishes) -> Written:
    """Both are read before either is asked: what one server does not tell is asked of neither."""
    limits = Limits(*wishes.limits)
    a, b = ((path,) for path in wishes.logs)
    with open_store(a, wishes.memory_mib) as first, open_store(b, wishes.memory_mib) as second:
        comparison = compare(first, second, limits)
    tables = (difference_table(comparison.differences), *comparison.tables)
    page = comparison_page(comparison)
    return Written(text_comparison(comparison), comparison.plain(), tables, page)
