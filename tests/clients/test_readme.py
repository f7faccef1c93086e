"""What the README says to type works as it stands there."""

import json
import re
import subprocess
import sys
from enum import Enum

import attrs
import pytest

from harness.process import ServerProcess
from harness.source_tree import ROOT
from kvtrio.cli import main
from kvtrio.core.explain import MissReason, TurnClass
from kvtrio.core.types import GapCause
from kvtrio.obs.events import CATALOGUE, RequestDone
from kvtrio.obs.schema import name_of

README_URL = "http://127.0.0.1:8080"


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def curl_blocks() -> list[str]:
    return [block for block in blocks("sh") if block.startswith("curl ")]


def test_there_are_examples() -> None:
    """The tests below would pass on an empty list."""
    assert len(curl_blocks()) >= 2
    assert len(blocks("python")) >= 1


@pytest.mark.slow
@pytest.mark.models
def test_curl_examples(server: ServerProcess) -> None:
    """Each curl command, word for word but the address, gets a good answer."""
    for block in curl_blocks():
        assert README_URL in block
        answer = subprocess.run(
            ["bash", "-euc", block.replace(README_URL, server.url)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        if '"stream": true' in block:
            assert answer.stdout.endswith("data: [DONE]\n\n")
        else:
            assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


@pytest.mark.slow
@pytest.mark.models
def test_python_examples(server: ServerProcess) -> None:
    """Each Python program runs and prints an answer."""
    for block in blocks("python"):
        answer = subprocess.run(
            [sys.executable, "-c", block.replace(README_URL, server.url)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert answer.stdout.strip()


def test_the_two_commands_come_first() -> None:
    """Before anything else the README says how to start and how to test."""
    first = blocks("sh")[0]
    assert "make serve" in first
    assert "make test" in first


def test_every_flag_is_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of settings and the help name the same flags."""
    main(["serve", "--help"])
    in_help = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    in_readme = set(re.findall(r"`(--[a-z][a-z-]+)`", (ROOT / "README.md").read_text()))
    assert in_help <= in_readme


def test_every_event_is_in_the_readme() -> None:
    """The table of log lines is the catalogue."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in map(name_of, CATALOGUE) if f"`{name}`" not in text] == []


def test_the_example_of_a_log_line_has_every_field() -> None:
    """As ``request.done`` is today, in its order."""
    (example,) = (json.loads(block) for block in blocks("json") if '"request.done"' in block)
    names = [attribute.name for attribute in attrs.fields(RequestDone)]
    assert list(example)[-len(names) :] == names


@pytest.mark.parametrize(
    "words", [MissReason, TurnClass, GapCause], ids=["reason", "turn", "cause"]
)
def test_every_word_about_reuse_and_pauses_is_in_the_readme(words: type[Enum]) -> None:
    """Answers and log lines use no other."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [each.value for each in words if f"`{each.value}`" not in text] == []
