"""Every Triton kernel compiles for GPUs that are not there, and fits into their registers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.triton_cases import ALIKE

TESTS = Path(__file__).resolve().parents[1]
MOST_SHARED = {80: 163 << 10, 90: 227 << 10}
"""Bytes that a block of threads may have, by compute capability (CUDA C programming guide)."""


def run(target: int, cache: Path) -> subprocess.Popen[str]:
    """In a process of its own: whether kernels are interpreted is settled when Triton is loaded."""
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    paths = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "harness.triton_compiled", str(target)],
        env={**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=cache,
        stdout=subprocess.PIPE,
        text=True,
    )


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        f"{'case':28}{'kernel':20}{'sm':>4}{'warps':>7}{'registers':>11}{'shared':>8}{'spilled':>9}"
    )
    lines = [
        f"{row['case']:28}{row['kernel']:20}{row['target']:4}{row['warps']:7}{row['registers']:11}"
        f"{row['shared']:8}{row['spilled']:9}"
        for row in rows
    ]
    return "\n".join(["", head, *lines])


@pytest.mark.slow
def test_shipped_tiles_compile_and_do_not_spill(tmp_path, capsys):
    """For sm_80 and sm_90, with the tiles that the launchers choose for models of today; once,
    however many rows and chunks a step has."""
    processes = [run(target, tmp_path) for target in MOST_SHARED]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    found = [json.loads(line) for output in outputs for line in output.splitlines()]
    rows = [row for row in found if "alike" not in row]
    # Else a server that runs would stall for the compiler.
    assert [row for row in found if "alike" in row and row["one"] != row["all"]] == []
    assert len(found) - len(rows) == len(MOST_SHARED) * len(ALIKE)
    with capsys.disabled():
        print(table(rows))
    assert {row["target"] for row in rows} == set(MOST_SHARED)
    assert [row for row in rows if row["spilled"]] == []
    assert [row for row in rows if row["shared"] > MOST_SHARED[row["target"]]] == []
