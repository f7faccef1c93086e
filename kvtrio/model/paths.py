"""Files that the operator names and files that a request names: opened once, read from there.

1. A path becomes a descriptor once, so what was checked is what is read.
2. Reading copies into memory: whoever replaces a file meanwhile can neither change what was checked
   nor end the process, as truncating a mapped file would.
3. A name from a request stays below its root: each part is opened relative to the one before, and
   no link is followed. Messages do not repeat the name.
"""

import errno
import os
import stat
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from types import TracebackType
from typing import Self

from attrs import define

from kvtrio.model.errors import ModelFileError, safe_name

MAX_NAME_LENGTH = 1024
# Opening a named pipe would wait for a writer.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


@define(eq=False)
class OpenPath:
    """An open file or folder; ``close`` it, or use it as a context manager.

    As a context manager it puts its label before the ModelFileErrors of its block.
    """

    label: str
    """How messages call it."""
    _fd: int
    _follows_links: bool

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(os.fstat(self._fd).st_mode)

    def has(self, name: str) -> bool:
        """Whether there is something called ``name`` in this folder."""
        with suppress(OSError):
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            return True
        return False

    def child(self, name: str) -> "OpenPath":
        """Open ``name``, one of our own constants, in this folder.

        Raises ModelFileError when it cannot be opened.
        """
        flags = _FLAGS if self._follows_links else _FLAGS | os.O_NOFOLLOW
        try:
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            raise ModelFileError(f"{name}: {_reason(error)}") from None
        return OpenPath(name, fd, self._follows_links)

    def read(self, limit: int) -> mmap:
        """A private copy of a file of 1 to ``limit`` bytes, at a page's start.

        Raises ModelFileError for anything else.
        """
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError("not a regular file")
        if not 1 <= status.st_size <= limit:
            raise ModelFileError(f"larger than {limit} bytes" if status.st_size else "empty")
        try:
            return self._copy(status.st_size)
        except OSError:
            raise ModelFileError("it cannot be read") from None

    def _copy(self, size: int) -> mmap:
        data = mmap(-1, size)
        done = 0
        os.lseek(self._fd, 0, os.SEEK_SET)
        with memoryview(data) as view, open(self._fd, "rb", buffering=0, closefd=False) as file:
            while done < size:
                count = file.readinto(view[done:])
                if not count:
                    raise ModelFileError("it shrank while it was read")
                done += count
        return data

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if isinstance(error, ModelFileError):
            raise ModelFileError(f"{self.label}: {error}") from None


def open_path(path: Path) -> OpenPath:
    """A file or folder that the operator named; links are followed.

    Raises ModelFileError when it cannot be opened.
    """
    label = safe_name(path.name)
    try:
        return OpenPath(label, os.open(path, _FLAGS), True)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{label}: {_reason(error)}") from None


def open_inside(root: Path, name: str) -> OpenPath:
    """What a request calls ``name``, parts joined by "/", below the folder ``root``.

    Links in ``root`` itself are followed; below it, and later inside the opened folder, none.
    Raises ModelFileError for an absolute name, one with empty, "." or ".." parts, a NUL, a link on
    the way, or nothing there.
    """
    parts = _parts(name)
    try:
        fd = os.open(root, _FLAGS | os.O_DIRECTORY)
    except OSError:
        raise ModelFileError("the folder for adapters cannot be opened") from None
    for i, part in enumerate(parts):
        flags = _FLAGS | os.O_NOFOLLOW | (os.O_DIRECTORY if i < len(parts) - 1 else 0)
        try:
            below = os.open(part, flags, dir_fd=fd)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"the adapter: {_reason(error)}") from None
        finally:
            os.close(fd)
        fd = below
    return OpenPath("the adapter", fd, False)


def _parts(name: str) -> list[str]:
    parts = name.split("/")
    if len(name) > MAX_NAME_LENGTH or "\0" in name or {"", ".", ".."} & set(parts):
        raise ModelFileError(
            'the adapter\'s path must be relative, without NUL and without empty, "." or ".." parts'
        )
    return parts


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOTDIR):
        return "a link, or not a folder, on the way"
    return "it cannot be opened"
