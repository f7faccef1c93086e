"""The command line as a stranger meets it."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

import kvtrio
from kvtrio.cli import exits, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the version and nothing else."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == kvtrio.__version__


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without arguments the help appears, and that is no error."""
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("serve", "fetch", "chat", "http://127.0.0.1:8080"))


@pytest.mark.parametrize(
    "flag",
    [
        "--model",
        "--host",
        "--port",
        "--parallel",
        "-np",
        "--ctx-size",
        "--threads",
        "--api-key",
        "--api-key-file",
        "--dtype",
        "--device",
        "--backend",
        "--scheduler",
        "--log-file",
        "--alias",
        "--chat-template",
        "--max-waiting",
        "--max-waiting-tokens",
        "--max-waiting-s",
        "--max-gap-ms",
        "--drain-s",
        "--paranoid",
    ],
)
def test_serve_help_explains_every_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag that the README lists is in the help, too."""
    assert main(["serve", "--help"]) == 0
    assert flag in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nonsense"], "Unknown command"),
        (["serve", "--nonsense"], "--nonsense"),
        (["serve", "-np", "0"], ">= 1"),
        (["serve", "--port", "65536"], "65535"),
        (["serve", "--dtype", "int3"], "int3"),
        (["serve", "-c", "one"], "-c"),
        (["serve", "--drain-s", "-1"], ">= 0"),
        (["serve", "--max-gap-ms", "0"], "> 0"),
        (["serve", "--max-waiting-tokens", "0"], ">= 1"),
        (["fetch"], "NAME"),
        (["fetch", "nonsense"], "smollm2"),
        (["chat", "--url", "ftp://x"], "--url"),
        (["serve", "no-such-model"], "smollm2"),
        (["serve", "a", "-m", "b"], "twice"),
        (["serve", ""], "MODEL is empty"),
        (["serve", " "], "MODEL is empty"),
        (["serve", "-m", ""], "--model is empty"),
        (["serve", "--alias", ""], "--alias is empty"),
        (["serve", "--host", ""], "--host is empty"),
        (["serve", "--chat-template", ""], "--chat-template is empty"),
        (["serve", "--api-key", ""], "--api-key"),
        (["serve", "--api-key", " , "], "--api-key"),
        (["serve", "--scheduler", "no-such"], "fcfs"),
        (["serve", "--backend", "no-such"], "torch"),
        (["serve", "-np", "8", "-b", "4"], "--batch-size"),
        (["serve", "--api-key-file", "/no/such/file"], "No such file"),
        (["serve", "--log-file", "/no/such/folder/log"], "No such file"),
        (["serve", "--host", "256.256.256.256"], "256.256.256.256"),
    ],
)
def test_mistakes_are_one_clear_line(
    arguments: Sequence[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command line exits with 2 and one line that says what is wrong."""
    is_free = arguments[0] == "serve" and "--port" not in arguments
    assert main([*arguments, *(["--port", "0"] if is_free else [])]) == exits.USAGE
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith("kvtrio: ")
    assert reason in line


def test_help_is_light() -> None:
    """The help appears without torch, trio or quart being imported."""
    code = (
        "import sys; from kvtrio.cli import main; main(['serve', '--help']);"
        "print(sorted({'torch', 'trio', 'quart', 'numpy'} & sys.modules.keys()), file=sys.stderr)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert answer.stderr.strip() == "[]"


def test_module_runs_like_the_command() -> None:
    """``python -m kvtrio`` is the same program."""
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "kvtrio", "--version"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert answer.stdout.strip() == kvtrio.__version__


def test_a_bug_report_shows_places_and_no_values(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages may quote a user, so only types and source lines are printed, all the way down."""
    secret = "what the user typed"

    def fail() -> None:
        try:
            raise ValueError(secret)
        except ValueError as error:
            raise ExceptionGroup(secret, [KeyError(secret)]) from error

    with pytest.raises(ExceptionGroup) as caught:
        fail()
    exits.report_bug(caught.value)
    err = capsys.readouterr().err
    assert secret not in err
    assert all(name in err for name in ("ExceptionGroup", "KeyError", "ValueError", "in fail"))
