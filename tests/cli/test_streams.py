"""Exit codes where standard output, error or input is full, closed or gone."""

import io
import subprocess

import pytest

from harness.process import command
from kvtrio.cli import exits, main
from kvtrio.cli.streams import Errors, Output, OutputError

pytestmark = pytest.mark.slow


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run ``line``, in which ``kvtrio`` is the command under test."""
    script = f'kvtrio() {{ {" ".join(command())} "$@"; }}; {line}'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", ["--help", "--version", "serve --help", "fetch --help"])
@pytest.mark.parametrize(
    ("target", "reason"), [(">/dev/full", "No space left"), (">&-", "Bad file descriptor")]
)
def test_output_that_cannot_be_written(arguments: str, target: str, reason: str) -> None:
    """One line and exit code 2: the user can mend it."""
    answer = shell(f"kvtrio {arguments} {target}")
    (line,) = answer.stderr.splitlines()
    assert answer.returncode == exits.USAGE
    assert line.startswith("kvtrio: cannot write the output: ")
    assert reason in line


@pytest.mark.models
def test_the_path_of_a_model_that_cannot_be_written() -> None:
    """``fetch`` is no exception."""
    answer = shell("kvtrio fetch smollm2 > /dev/full")
    assert answer.returncode == exits.USAGE
    assert answer.stderr == "kvtrio: cannot write the output: No space left on device\n"


def test_a_reader_that_has_seen_enough() -> None:
    """``kvtrio --help | head -0`` is no failure."""
    answer = shell('kvtrio --help | true; echo "${PIPESTATUS[0]}"')
    assert (answer.stdout, answer.stderr) == ("0\n", "")


@pytest.mark.parametrize("target", ["2>/dev/full", "2>&-", "2> >(true)"])
def test_complaints_that_cannot_be_written(target: str) -> None:
    """The exit code stays what it is; nothing appears on the output instead."""
    answer = shell(f"kvtrio nonsense {target}")
    assert (answer.returncode, answer.stdout) == (exits.USAGE, "")


def test_no_input_at_all() -> None:
    """A closed input is an empty one."""
    answer = shell("kvtrio chat --url http://127.0.0.1:1 <&-")
    assert answer.returncode == exits.USAGE
    assert "no message" in answer.stderr


def test_input_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One clear line."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"))
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == exits.USAGE
    assert "cannot be read as text" in capsys.readouterr().err


def test_signs_that_the_terminal_lacks() -> None:
    """They become question marks; half a surrogate pair of a hostile server, too."""
    raw = io.BytesIO()
    output = Output(io.TextIOWrapper(raw, "latin-1", write_through=True))
    output.write("caf\xe9 \u2603 \ud800")
    assert raw.getvalue() == b"caf\xe9 ? ?"


def test_a_closed_stream() -> None:
    """Told for the output, swallowed for errors."""
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    stream.close()
    with pytest.raises(OutputError):
        Output(stream).write("x")
    with pytest.raises(OutputError):
        Output(stream).flush()
    Errors(stream).write("x")
    Errors(stream).flush()
