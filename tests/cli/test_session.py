"""``kvtrio session``: what is printed, written and refused, and the exit codes."""

from contextlib import closing
from pathlib import Path

import pytest

from kvtrio.cli import exits
from kvtrio.cli.app import main
from kvtrio.core.session import SavedContext, ServerIdentity, SessionHead, owner_tag
from kvtrio.core.stored import StoreError
from kvtrio.store.sessions import SessionStore

IDENTITY = ServerIdentity(bytes(32), bytes(32), 4)
HEAD = SessionHead(token_ids=tuple(range(7)), contexts=(SavedContext(0),), state_positions=(5,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sessions that share a block, one of them another owner's."""
    folder = tmp_path / "sessions"
    folder.mkdir()
    with closing(SessionStore.open(folder)) as store:
        for name, owner in (("one", b""), ("two", b"somebody")):
            with store.saving(name, HEAD, IDENTITY, owner) as writer:
                writer.add_block((b"first" * 100,))
                writer.add_block((name.encode() * 100,))
                writer.add_state((b"state",))
                writer.commit()
    return folder


def run(folder: Path, *arguments: str) -> int:
    return main(["session", *arguments, "--slot-save-path", str(folder)])


def names(folder: Path) -> list[str]:
    with closing(SessionStore.open(folder)) as store:
        return store.names()


def test_sessions_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, whoever's they are; a damaged one says so."""
    raw = (folder / "two").read_bytes()
    (folder / "two").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert run(folder, "list") == exits.OK
    one, two = capsys.readouterr().out.splitlines()
    assert one.startswith("one: 7 tokens, 1 checkpoints, ")
    assert two == "two: it is damaged"


def test_names_are_shown_without_what_would_change_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Marks that turn the direction of text, or break lines, are spelled out."""
    with (
        closing(SessionStore.open(tmp_path)) as store,
        store.saving("a\u202eb\u2028c", HEAD, IDENTITY, b"") as writer,
    ):
        writer.add_block((b"first",))
        writer.add_block((b"second",))
        writer.add_state((b"state",))
        writer.commit()
    assert run(tmp_path, "list") == exits.OK
    assert capsys.readouterr().out.startswith("a\\u202eb\\u2028c: 7 tokens")


def test_a_session_goes_into_a_file_and_comes_back(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To another folder, with all its bytes and its owner, or another one."""
    file, other = tmp_path / "file", tmp_path / "other"
    other.mkdir()
    assert run(folder, "export", "two", str(file)) == exits.OK
    assert file.stat().st_mode & 0o777 == 0o600
    assert run(other, "import", str(file), "kept") == exits.OK
    assert run(other, "import", str(file), "mine", "--api-key", "key") == exits.OK
    assert run(other, "import", str(file), "all", "--api-key", "") == exits.OK
    assert "kept: 7 tokens" in capsys.readouterr().out
    with closing(SessionStore.open(other)) as store:
        owners = {"kept": b"somebody", "mine": owner_tag(b"key", ""), "all": b""}
        for name, owner in owners.items():
            with store.reading(name, owner) as reader:
                assert reader.head == HEAD
                assert reader.block(1) == (b"two" * 100,)
                assert reader.state(0) == (b"state",)


def test_a_session_is_erased(folder: Path) -> None:
    """With the state that no other one has."""
    pieces = len(list((folder / ".blocks").iterdir()))
    assert run(folder, "erase", "two") == exits.OK
    assert names(folder) == ["one"]
    assert len(list((folder / ".blocks").iterdir())) == pieces - 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("export", "none", "new"), "no such session"),
        (("export", "a/b", "new"), "no session can have this name"),
        (("export", "one", "there"), "there: File exists"),
        (("export", "one", "no/folder"), "No such file or directory"),
        (("erase", "none"), "no such session"),
        (("import", "none", "x"), "none: No such file or directory"),
        (("import", "there", "x"), "this is no session of kvtrio's"),
        (("import", "cut", "x"), "a part is missing"),
        (("import", "flipped", "one"), "it is damaged"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    reason: str,
) -> None:
    """Exit code 2, nothing changed, and no file is left behind."""
    monkeypatch.chdir(tmp_path)
    assert run(folder, "export", "one", "good") == exits.OK
    raw = Path("good").read_bytes()
    Path("there").write_bytes(b"something else")
    Path("cut").write_bytes(raw[:-1])
    Path("flipped").write_bytes(raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run(folder, *arguments) == exits.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvtrio: ")
    assert reason in line
    assert not Path("new").exists()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_in_use_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a server saves, the command says so rather than wait."""
    with (
        closing(SessionStore.open(folder)) as store,
        store.saving("three", HEAD, IDENTITY, b""),
    ):
        assert run(folder, "erase", "one") == exits.USAGE
        assert "try again" in capsys.readouterr().err
    with pytest.raises(StoreError, match="not_found"), closing(SessionStore.open(folder)) as store:
        store.info("three", None)
    assert run(folder.parent / "none", "list") == exits.USAGE
    assert "no such folder" in capsys.readouterr().err
