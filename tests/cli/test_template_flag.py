"""What is read beside the weights, and refused before the server starts: template, vocabulary."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtrio.cli import exits, main
from kvtrio.cli.prepare import Prepared, prepare
from kvtrio.config import (
    HttpOptions,
    LogSettings,
    ModelSettings,
    SchedulingSettings,
    ServeConfig,
)


def prepared(model: Path, chat_template: str | None = None) -> Prepared:
    config = ServeConfig(
        name=str(model),
        model=ModelSettings(chat_template=chat_template),
        http=HttpOptions(port=0),
        scheduling=SchedulingSettings(),
        logs=LogSettings(),
    )
    with ExitStack() as stack:
        return prepare(config, stack)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "the file is empty"),
        (" \n", "the file is empty"),
        ("You are helpful.", "no Jinja"),
        ("{{ 1/0 }}", "cannot render a plain user message"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render a plain user message"),
        ("{{ raise_exception('only tools') }}", "only tools"),
        ("{% for i in range(10**9) %}x{% endfor %}", "cannot render a plain user message"),
        ("{% if false %}x{% endif %}", "its prompt is empty"),
        ("{% for %}", "line 1"),
    ],
)
def test_a_template_that_cannot_serve_is_refused(
    shared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
    reason: str,
) -> None:
    """At the start and with one line, rather than at every chat."""
    path = tmp_path / "template.jinja"
    path.write_text(source)
    model = shared / "tiny" / "models" / "qwen3.gguf"
    arguments = ["serve", str(model), "--port", "0", "--chat-template", str(path)]
    assert main(arguments) == exits.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvtrio: ")
    assert reason in line


def test_a_good_template_is_taken(shared: Path, tmp_path: Path) -> None:
    """From a file, and those that are built in."""
    model = shared / "tiny" / "models" / "qwen3.gguf"
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert prepared(model, str(path)).served.template.name == "custom"
    for name in ("chatml", "gemma", "llama3", "mistral", "plain"):
        assert prepared(model, name).served.template.name == name


@pytest.mark.slow
@pytest.mark.models
def test_the_kind_of_vocabulary(smollm2: Path, gemma3: Path) -> None:
    """llama.cpp's numbers: 1 for SentencePiece, 2 for byte-level BPE."""
    assert prepared(gemma3).served.vocab_type == 1
    assert prepared(smollm2).served.vocab_type == 2
