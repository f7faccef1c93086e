"""What is checked before the server starts."""

from pathlib import Path

import pytest

from kvtrio.cli.announce import is_local
from kvtrio.cli.backend import backend_settings
from kvtrio.cli.prepare import choose_context, find_model, read_keys
from kvtrio.config import (
    ConfigError,
    HttpOptions,
    LogSettings,
    ModelSettings,
    SchedulingSettings,
    ServeConfig,
)


def config(**scheduling: int) -> ServeConfig:
    return ServeConfig(
        name=None,
        model=ModelSettings(),
        http=HttpOptions(),
        scheduling=SchedulingSettings(**scheduling),
        logs=LogSettings(),
    )


@pytest.mark.parametrize(
    ("trained", "asked", "chosen"),
    [(2048, None, 2048), (131072, None, 8192), (131072, 16384, 16384), (2048, 100, 100)],
)
def test_context(trained: int, asked: int | None, chosen: int) -> None:
    """The model's limit, at most 8192 unless more is asked for."""
    assert choose_context(trained, asked) == chosen


def test_context_beyond_the_model() -> None:
    """More than the model was made for is refused."""
    with pytest.raises(ConfigError, match="2048"):
        choose_context(2048, 2049)


def test_every_place_can_hold_the_longest_request() -> None:
    """Blocks are rounded up per place, and each has one more to copy from."""
    settings = backend_settings(config(parallel=3, block_size=16), 100)
    assert (settings.num_blocks, settings.max_context) == (3 * 8, 100)


def test_keys_come_from_flags_and_file(tmp_path: Path) -> None:
    """Commas, repetition and lines all work; blanks and doubles do not count."""
    file = tmp_path / "keys"
    file.write_text("c\n\n a \n")
    assert read_keys(["a, b", "", "b"], file) == ("a", "b", "c")
    assert read_keys([], None) == ()


def test_an_empty_key_file_does_not_open_the_server(tmp_path: Path) -> None:
    """Whoever names a file wants keys."""
    file = tmp_path / "keys"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys([], file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_keys([], file)


def test_a_file_wins_over_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name from the catalogue is only looked up where no such file exists."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").write_bytes(b"x")
    assert find_model("smollm2", None) == Path("smollm2")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("192.0.2.1", False),
        ("example.org", False),
    ],
)
def test_who_can_reach_the_server(host: str, local: bool) -> None:
    """The start-up line warns where others can."""
    assert is_local(host) is local
