"""Links, pipes and folders where files should be: never followed, never waited for."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.stored import SECRET, entry, head_of, restored, save
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.store.disk import DiskStore
from kvtrio.store.files import open_folder
from kvtrio.store.scan import entry_name
from kvtrio.store.sessions import PIECES, SessionStore

SHORT = head_of(range(5))
NAME = entry_name(entry(1).head.key, 0)


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def folder(path: Path, target: Path) -> None:
    path.mkdir()


def pipe(path: Path, target: Path) -> None:
    os.mkfifo(path)


def listener(path: Path, target: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    try:  # through a descriptor, since such a name may have 107 bytes only
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/s")
        os.rename("s", path.name, src_dir_fd=here, dst_dir_fd=here)
    finally:
        os.close(here)


ODD = pytest.mark.parametrize("make", [link, folder, pipe, listener])
Make = Callable[[Path, Path], None]


def fault_of(act, *args) -> StoreFault:
    with pytest.raises(StoreError) as caught:
        act(*args)
    return caught.value.fault


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """Whole files of a store elsewhere, as targets of links."""
    sessions = SessionStore.open(tmp_path / "good")
    save(sessions, "a", SHORT)
    sessions.close()
    disk = DiskStore.open(tmp_path / "good disk", 1 << 20, SECRET)
    disk.write(entry(1))
    disk.close()
    return tmp_path / "good"


@ODD
def test_odd_sessions_are_refused(tmp_path: Path, good: Path, make: Make):
    """What is no regular file is not restored, even if it leads to a good session, and neither
    replaced nor removed."""
    store = SessionStore.open(tmp_path / "mine")
    make(tmp_path / "mine" / "a", good / "a")
    for act in (
        lambda: restored(store, "a"),
        lambda: save(store, "a", SHORT),
        lambda: store.erase("a", None),
    ):
        assert fault_of(act) is StoreFault.NOT_REGULAR
    assert store.names() == []
    assert os.path.lexists(tmp_path / "mine" / "a")
    store.close()


@ODD
def test_odd_state_is_refused(tmp_path: Path, good: Path, make: Make):
    """A piece that is no regular file is no piece."""
    store = SessionStore.open(tmp_path / "mine")
    save(store, "a", SHORT)
    name = min(os.listdir(tmp_path / "mine" / PIECES))
    (tmp_path / "mine" / PIECES / name).unlink()
    make(tmp_path / "mine" / PIECES / name, good / PIECES / name)
    assert fault_of(restored, store, "a") is StoreFault.NOT_REGULAR
    store.close()


@ODD
def test_odd_entries_are_discarded(tmp_path: Path, make: Make):
    """The disk tier removes the link itself, not what it leads to; it never opens it."""
    target = tmp_path / "secret"
    target.write_bytes(b"somebody's")
    DiskStore.open(tmp_path / "cache", 1 << 20, SECRET).close()
    make(tmp_path / "cache" / NAME, target)
    store = DiskStore.open(tmp_path / "cache", 1 << 20, SECRET)
    assert store.heads() == ()
    assert store.discarded == {StoreFault.NOT_REGULAR: 1}
    if make is not folder:
        assert store.write(entry(1)).size == 4096
    store.close()
    assert target.read_bytes() == b"somebody's"


@ODD
def test_entries_that_turn_odd_are_refused(tmp_path: Path, good: Path, make: Make):
    """What took the place of an entry while the server ran is not read."""
    store = DiskStore.open(tmp_path / "cache", 1 << 20, SECRET)
    store.write(entry(1))
    (tmp_path / "cache" / NAME).unlink()
    make(tmp_path / "cache" / NAME, tmp_path / "good disk" / NAME)
    assert fault_of(store.read, entry(1).head.key, 0) is StoreFault.NOT_REGULAR
    store.close()


def test_a_linked_folder_of_state_is_refused(tmp_path: Path, good: Path):
    """The folder of pieces is not followed either."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / PIECES).symlink_to(good / PIECES)
    assert fault_of(SessionStore.open, tmp_path / "mine") is StoreFault.NOT_REGULAR


def test_the_operators_own_link_is_followed(tmp_path: Path, good: Path):
    """A folder given on the command line may be a link."""
    (tmp_path / "link").symlink_to(good)
    store = SessionStore.open(tmp_path / "link")
    assert restored(store, "a") == SHORT
    store.close()


def test_a_link_is_not_written_through(tmp_path: Path):
    """A link planted under a temporary name is replaced, not followed."""
    target = tmp_path / "target"
    files = open_folder(tmp_path / "folder")
    (tmp_path / "folder" / "x").symlink_to(target)
    fd = files.create("x")
    files.write(fd, b"data")
    files.close(fd)
    files.leave()
    assert not target.exists()
    assert (tmp_path / "folder" / "x").read_bytes() == b"data"


def test_folders_that_cannot_be_had(tmp_path: Path):
    """A file in the folder's place, or no permission to make it, is one typed fault."""
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert fault_of(DiskStore.open, path, 1 << 20, SECRET) is StoreFault.NOT_REGULAR
        assert fault_of(SessionStore.open, path) is StoreFault.NOT_REGULAR
