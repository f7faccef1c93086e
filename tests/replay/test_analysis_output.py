"""The answer's forms: terminal, JSON, CSV, one HTML page; and the command."""

import csv
import errno
import io
import json
import re
import signal
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from attrs import define, evolve, field

from harness.logs import done, hit, made, write_log
from kvtrio.cli import main
from kvtrio.core.explain import CachePath, MissReason, TurnClass
from kvtrio.core.types import GapCause
from kvtrio.obs.events import SchedStep, ServerStart, TierUsage
from kvtrio.obs.schema import Digest
from kvtrio.obs.words import BackendKind, CacheKind, ComputeType, DeviceKind, TemplateSource
from kvtrio.replay.analysis import plots
from kvtrio.replay.analysis.errors import AnalysisError
from kvtrio.replay.analysis.page import report_page
from kvtrio.replay.analysis.report import Report, report_of
from kvtrio.replay.analysis.store import open_store
from kvtrio.replay.analysis.style import DARK, LIGHT, standalone
from kvtrio.replay.analysis.table import Kind, duration, shown
from kvtrio.replay.analysis.text import text_report
from kvtrio.replay.analysis.times import Limits

START = made(
    ServerStart,
    model=Digest(1),
    device=DeviceKind.CPU,
    backend=BackendKind.SIM,
    compute_type=ComputeType.FILE,
    key_type=CacheKind.F16,
    value_type=CacheKind.F16,
    template=TemplateSource.MODEL,
    max_gap_s=0.25,
    num_blocks=400,
    num_host_blocks=1000,
)


def everything() -> list[tuple[float, object]]:
    """A log with something for every table and every plot."""
    step = made(SchedStep, num_prefill_tokens=64, num_decode_rows=2, duration_s=0.03)
    usage = made(TierUsage, num_device_blocks=300, num_host_blocks=250, num_running=2)
    events: list[tuple[float, object]] = [(0.0, START)]
    for number in range(60):
        second = 1.0 + number
        causes = [GapCause.STEP, GapCause.PREFILL, GapCause.READER]
        line = done(
            place=number % 3,
            session=Digest(number % 20),
            longest_gap_s=0.01 * 1.1**number,
            longest_gap_cause=causes[number % 3],
        )
        if number > 10:
            reason = MissReason.EVICTED if number % 4 == 0 else MissReason.NEW_TOKENS
            turn = hit(TurnClass.CONTINUATION, reason, 80, CachePath.RAM)
            names = ("session", "place", "longest_gap_s", "longest_gap_cause")
            line = evolve(turn, **{name: getattr(line, name) for name in names})
        events += [(second, line), (second, step), (second, usage)]
    return events


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("logs") / "a<b>&.jsonl", everything())


@pytest.fixture(scope="module")
def report(log: Path) -> Report:
    with open_store([log]) as store:
        return report_of(store, Limits())


@define
class Reader(HTMLParser):
    """Collects what a browser would fetch or run, and whether all that was opened is closed."""

    open: list[str] = field(factory=list)
    outside: list[str] = field(factory=list)
    tags: set[str] = field(factory=set)

    def __attrs_pre_init__(self) -> None:
        HTMLParser.__init__(self)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        names = ("src", "href", "srcset", "data", "action", "style")
        self.outside += [f"{tag} {name}" for name, _ in attrs if name in names]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(report: Report) -> None:
    """No script, no link, no import, no address but the names of the two standards; and it says so
    to the browser, which then refuses any."""
    page = report_page(report)
    reader = Reader()
    reader.feed(page)
    assert (reader.open, reader.outside) == ([], [])
    assert not reader.tags & {"script", "link", "img", "iframe", "object", "embed"}
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert not any(word in page for word in ("url(", "@import", "@font-face"))
    assert "default-src 'none'" in page


def test_the_page_has_every_plot_and_table(report: Report) -> None:
    """Each plot is well-formed; a file's name is text, whatever it looks like."""
    page = report_page(report)
    pictures = [f"<svg{part.partition('</svg>')[0]}</svg>" for part in page.split("<svg")[1:]]
    assert len(pictures) == 5
    labels = [ElementTree.fromstring(picture).get("aria-label") for picture in pictures]
    assert labels == [
        "Where prompt tokens came from",
        "Turns over time, by whether they hit",
        "How full the tiers were",
        "Longest gap of each answer",
        "Places and chunks over time",
    ]
    assert "a&lt;b&gt;&amp;.jsonl" in page
    assert "a<b>" not in page
    for table in report.tables:
        assert (f"<h3>{table.title}</h3>" in page) is bool(table.rows)


def test_the_page_for_screens_and_paper(report: Report) -> None:
    """Light and dark have the same colours by name, and paper is light in both."""

    def names(colours: str) -> list[str]:
        return [part.partition(":")[0].strip() for part in colours.split(";") if part.strip()]

    assert names(LIGHT) == names(DARK)
    page = report_page(report)
    assert page.index("prefers-color-scheme: dark") < page.index("@media print")
    assert page.count(LIGHT.strip()) == 2


def test_the_terminal_has_what_the_page_has(report: Report) -> None:
    """Every table that has rows, with its note; no line of dashes alone for an empty one."""
    said = text_report(report)
    for table in report.tables:
        assert (f"{table.title}\n{'=' * len(table.title)}\n" in said) is bool(table.rows)
    assert re.search(" continuation +all +49 +12 ", said)


def test_an_empty_report_is_a_page_too(tmp_path: Path) -> None:
    """A log without requests."""
    with open_store([write_log(tmp_path / "log", [(0.0, START)])]) as store:
        page = report_page(report_of(store, Limits()))
    Reader().feed(page)
    assert "<svg" not in page


@pytest.mark.slow
def test_the_command_writes_all_forms(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same numbers in each; the limits are the server's where the command gives none."""
    page, plain, folder = tmp_path / "p.html", tmp_path / "p.json", tmp_path / "csv"
    arguments = ["--html", str(page), "--json", str(plain), "--csv", str(folder)]
    assert main(["analyze", str(log), *arguments]) == 0
    assert "Turns that should hit" in capsys.readouterr().out
    data = json.loads(plain.read_text())
    assert data["schema"] == "kvtrio.analysis/1"
    assert data["limits"] == {"first_token_s": 1.0, "gap_s": 0.25}
    with (folder / "hits_should.csv").open(newline="") as file:
        (first, *_) = csv.DictReader(file)
    row = data["tables"]["hits_should"]["rows"][0]
    assert first == {key: str(value) for key, value in row.items()}
    assert (row["turns"], row["missed"]) == (49, 12)
    assert {path.stem for path in folder.iterdir()} == set(data["tables"])
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_the_command_compares(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two files, one answer in each form."""
    page, plain, folder = tmp_path / "p.html", tmp_path / "p.json", tmp_path / "csv"
    arguments = ["--html", str(page), "--json", str(plain), "--csv", str(folder)]
    assert main(["analyze", "--compare", str(log), str(log), *arguments]) == 0
    assert "within noise" in capsys.readouterr().out
    data = json.loads(plain.read_text())
    assert {each["difference"] for each in data["differences"]} == {0.0}
    assert (folder / "differences.csv").exists()
    Reader().feed(page.read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "is not a file"),
        (["--compare", "{log}"], "--compare takes two files"),
        (["{log}", "{log}"], "named twice"),
        (["{log}", "--json", "{log}"], "written over"),
        (["{log}", "--html", "{log}/page.html"], "cannot write"),
        (["{log}", "--csv", "{log}"], "cannot write"),
        (["{log}", "--memory-mib", "1"], "--memory-mib"),
    ],
)
def test_what_does_not_fit_is_one_line(
    log: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Exit code 2, and what to change."""
    assert main(["analyze", *(each.format(log=log) for each in arguments)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (-5e-08, "0 s"),
        (0.00042, "420 µs"),
        (0.0523, "52 ms"),
        (0.9999, "1 s"),
        (7.25, "7.25 s"),
        (119.0, "119 s"),
        (300.0, "5 min"),
        (9000.0, "2.5 h"),
        (-0.25, "-250 ms"),
    ],
)
def test_times_have_the_unit_that_fits(seconds: float, words: str) -> None:
    """Two or three digits, whatever the size."""
    assert duration(seconds) == words


def test_cells_for_people() -> None:
    """A share in hundredths, a count with separators, a dash for nothing."""
    assert shown(0.673, Kind.SHARE) == "67.3 %"
    assert shown(1234567, Kind.COUNT) == "1,234,567"
    assert shown(None, Kind.SHARE) == "-"
    assert shown(0.0123, Kind.RATE) == "0.0123"


def test_signals_are_as_before(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a log is read SIGTERM ends the command as Ctrl-C does, with its temporary files; later
    it means what it meant."""
    meant = []

    def opened(*_: object) -> None:
        meant.append(signal.getsignal(signal.SIGTERM))
        raise AnalysisError("stopped for the test")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("kvtrio.cli.analysis.open_store", opened)
    assert main(["analyze", str(log)]) == 2
    assert meant == [signal.default_int_handler]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_plot_alone_is_a_picture(report: Report) -> None:
    """It brings all the colours that it uses, light and dark, and needs nothing else."""
    picture = standalone(plots.waterfall(report.figures))
    ElementTree.fromstring(picture)
    used = set(re.findall(r"var\((--\w+)\)", picture))
    assert used
    assert all(picture.count(f"{name}: #") == 2 for name in used)
    assert not any(word in picture for word in ("url(", "@import", "href"))


class _Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "gone")


def test_files_are_written_before_anybody_reads(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops reading the tables, as ``head`` does, has the files all the same."""
    page = tmp_path / "p.html"
    monkeypatch.setattr("sys.stdout", _Gone())
    main(["analyze", str(log), "--html", str(page)])
    assert page.read_text().endswith("</html>\n")
