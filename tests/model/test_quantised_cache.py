"""Quantised models that were kept: found, doubted, and done without."""

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.quantise import QuantisedFile, quantised
from kvtrio.model.quantised_cache import FOLDER, Kept, kept_or_made

DIGEST = bytes(range(32))


@pytest.fixture
def file(shared: Path) -> Iterator[QuantisedFile]:
    with quantised(open_gguf(shared / "tiny" / "models" / "llama256-f16.gguf"), "q4_0") as made:
        yield made


def kept(file: QuantisedFile, folder: Path) -> Kept:
    found = kept_or_made(file, DIGEST, folder, "1")
    for name in file.tensors:
        np.testing.assert_array_equal(found.file.raw(name), file.raw(name), name)
    return found


def entry(folder: Path) -> Path:
    (found,) = (folder / FOLDER).glob("*.safetensors")
    return found


def test_made_once(file: QuantisedFile, tmp_path: Path) -> None:
    """The second start reads what the first has written, which only its owner may read."""
    assert kept(file, tmp_path).problem is None
    first = entry(tmp_path).stat()
    assert stat.S_IMODE(first.st_mode) == 0o600
    assert kept(file, tmp_path).problem is None
    assert entry(tmp_path).stat().st_ino == first.st_ino


def test_another_source_type_or_version_is_another_entry(
    file: QuantisedFile, tmp_path: Path
) -> None:
    """None is ever found in the place of another."""
    for digest, version in ((DIGEST, "1"), (bytes(32), "1"), (DIGEST, "2")):
        assert kept_or_made(file, digest, tmp_path, version).problem is None
    assert len(list((tmp_path / FOLDER).glob("*.safetensors"))) == 3


@pytest.mark.slow
def test_a_broken_entry_is_made_anew(file: QuantisedFile, tmp_path: Path) -> None:
    """Cut, emptied, changed in its head, its values or its checksum, or of other tensors."""
    kept(file, tmp_path)
    path = entry(tmp_path)
    whole = path.read_bytes()
    changed = [bytearray(whole) for _ in range(4)]
    for each, place in zip(changed, (3, 40, len(whole) // 2, -1), strict=True):
        each[place] ^= 1
    renamed = whole.replace(b"blk.0.attn_q.weight", b"blk.9.attn_q.weight")
    for broken in (whole[: len(whole) // 2], whole[:-1], b"", renamed, *changed):
        path.write_bytes(broken)
        assert kept(file, tmp_path).problem is None
        assert path.read_bytes() == whole


def test_leftovers_go(file: QuantisedFile, tmp_path: Path) -> None:
    """What a killed process left half written is removed by the next that writes."""
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "left.part").write_bytes(b"half")
    kept(file, tmp_path)
    names = {path.name for path in (tmp_path / FOLDER).iterdir()}
    assert names == {entry(tmp_path).name, "lock"}


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """As on a full disk, writing goes well for a while and then fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(file: QuantisedFile, tmp_path: Path) -> None:
    """The model is there all the same, nothing half written stays, and the reason is said."""
    with no_file_above(200_000):
        assert kept(file, tmp_path).problem == "the disk is full"
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["lock"]


def test_no_folder_to_write_to(file: QuantisedFile, tmp_path: Path) -> None:
    """The same where the cache folder is no folder."""
    (tmp_path / FOLDER).write_bytes(b"a file")
    assert kept(file, tmp_path).problem == "File exists"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_lock_that_is_no_file_of_its_own(file: QuantisedFile, tmp_path: Path, kind: str) -> None:
    """Nothing waits for a pipe's reader, and no file that a link leads to is emptied."""
    lock, other = tmp_path / FOLDER / "lock", tmp_path / "other"
    lock.parent.mkdir()
    other.write_bytes(b"precious")
    if kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to(other)
    assert kept(file, tmp_path).problem is not None
    assert other.read_bytes() == b"precious"
