"""Writes the picture of this folder, as `kvtrio analyze` draws it: the Mooncake sample, simulated.

Run it in this folder, where kvtrio is installed: `python make_picture.py`.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from kvtrio.cli.app import main as kvtrio
from kvtrio.replay.analysis import plots
from kvtrio.replay.analysis.report import report_of
from kvtrio.replay.analysis.store import open_store
from kvtrio.replay.analysis.style import standalone
from kvtrio.replay.analysis.times import Limits

FOLDER = Path(__file__).parent
PICTURE = "mooncake-sample.svg"
MACHINE = ["--machine", "h100-like", "-np", "8"]


def picture() -> str:
    with TemporaryDirectory() as folder:
        scenario, log = (str(Path(folder) / name) for name in ("scenario.jsonl", "log.jsonl"))
        trace = str(FOLDER / "mooncake-sample.jsonl")
        steps = [
            ["scenario", "import", "mooncake", trace, scenario],
            ["simulate", scenario, *MACHINE, "--log", log],
        ]
        for step in steps:
            if code := kvtrio(step):
                sys.exit(code)
        with open_store([Path(log)]) as store:
            return standalone(plots.waterfall(report_of(store, Limits()).figures))


if __name__ == "__main__":
    (FOLDER / PICTURE).write_text(picture(), encoding="utf-8")
