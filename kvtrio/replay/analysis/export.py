"""The report for programs: one JSON object, or a CSV file for each table."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvtrio.replay.analysis.errors import AnalysisError
from kvtrio.replay.analysis.table import Table


def write_json(path: Path, plain: dict[str, Any]) -> None:
    write_text(path, json.dumps(plain, indent=1, allow_nan=False) + "\n")


def write_csv(folder: Path, tables: Iterable[Table]) -> None:
    """``KEY.csv`` for each table; one without rows has its head."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for table in tables:
            path = folder / f"{table.key}.csv"
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow([column.key for column in table.columns])
                writer.writerows(table.rows)
    except OSError as error:
        raise AnalysisError(f"cannot write into {folder}: {error.strerror}") from None


def try_file(path: Path) -> None:
    """Better found out now than after the work: raises ``AnalysisError``."""
    try:
        path.touch()
    except OSError as error:
        raise AnalysisError(f"cannot write {path}: {error.strerror}") from None


def write_text(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise AnalysisError(f"cannot write {path}: {error.strerror}") from None
