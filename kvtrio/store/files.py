"""All that the stores do with a file system, operation by operation.

1. Names are single parts, relative to a folder that is held open; the last part of a name is never
   followed if it is a link.
2. Only regular files are opened, and a pipe with no writer does not make the opener wait.
3. What is made is readable by its owner only.

A test puts something else in the place of ``Folder``, to let one operation fail or be the last.
"""

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from attrs import define, frozen

from kvtrio.core.stored import StoreError, StoreFault

TEMPORARY = ".tmp"
"""End of the name of a file that is being written."""
_MAX_READ = 1 << 30  # Linux reads at most 2 GiB at a time
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_FAULTS = {
    errno.ENOENT: StoreFault.NOT_FOUND,
    errno.ELOOP: StoreFault.NOT_REGULAR,
    errno.ENXIO: StoreFault.NOT_REGULAR,
    errno.EISDIR: StoreFault.NOT_REGULAR,
    errno.ENOTDIR: StoreFault.NOT_REGULAR,
    errno.ENAMETOOLONG: StoreFault.NAME,
    errno.ENOSPC: StoreFault.NO_SPACE,
    errno.EDQUOT: StoreFault.NO_SPACE,
    errno.EFBIG: StoreFault.NO_SPACE,
    errno.EWOULDBLOCK: StoreFault.LOCKED,
}


# One call instead of one for each file: a thousand times fsync took seconds on a busy machine.
_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


@frozen
class FileStatus:
    """Of an open file."""

    size: int
    modified_ns: int


class Files(Protocol):
    """One folder. Every method but ``leave`` may raise OSError; ``open`` also StoreError."""

    def names(self) -> list[str]: ...
    def open(self, name: str) -> int:
        """For reading. Raises StoreError(NOT_REGULAR) for what is no regular file."""
        ...

    def status(self, fd: int) -> FileStatus: ...
    def size(self, name: str) -> int:
        """In bytes, of whatever has that name."""
        ...

    def read(self, fd: int, num_bytes: int) -> bytes:
        """So many bytes, or fewer at the file's end."""
        ...

    def create(self, name: str) -> int:
        """A new file for writing; what else had that name is removed."""
        ...

    def write(self, fd: int, data: bytes) -> None: ...
    def sync(self, fd: int) -> None: ...
    def close(self, fd: int) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, name: str) -> None: ...
    def sync_names(self) -> None:
        """Afterwards what was created, renamed and removed survives a power cut."""
        ...

    def sync_all(self) -> None:
        """The same for all that was written, here and elsewhere on this file system."""
        ...

    def touch(self, name: str, time_s: float) -> None: ...
    def lock(self, is_shared: bool) -> int:
        """Lock the folder without waiting, until the returned descriptor is closed."""
        ...

    def subfolder(self, name: str) -> "Files":
        """It is made if it is not there. ``leave`` it."""
        ...

    def leave(self) -> None:
        """Idempotent."""
        ...


@define(eq=False)
class Folder:
    """``Files`` in a real folder."""

    _fd: int

    def names(self) -> list[str]:
        return os.listdir(self._fd)

    def open(self, name: str) -> int:
        fd = os.open(name, _READ, dir_fd=self._fd)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise StoreError(StoreFault.NOT_REGULAR)

    def status(self, fd: int) -> FileStatus:
        status = os.fstat(fd)
        return FileStatus(status.st_size, status.st_mtime_ns)

    def size(self, name: str) -> int:
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_size

    def read(self, fd: int, num_bytes: int) -> bytes:
        data = os.read(fd, min(num_bytes, _MAX_READ))
        if len(data) == num_bytes or not data:
            return data
        pieces = [data]
        while missing := num_bytes - sum(map(len, pieces)):
            pieces.append(os.read(fd, min(missing, _MAX_READ)))
            if not pieces[-1]:
                break
        return b"".join(pieces)

    def create(self, name: str) -> int:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)
        return os.open(name, _CREATE, 0o600, dir_fd=self._fd)

    def write(self, fd: int, data: bytes) -> None:
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                done += os.write(fd, view[done:])

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def sync_names(self) -> None:
        os.fsync(self._fd)

    def sync_all(self) -> None:
        if _syncfs is None:
            os.sync()
        elif _syncfs(self._fd):
            raise OSError(ctypes.get_errno(), "syncfs")

    def touch(self, name: str, time_s: float) -> None:
        os.utime(name, (time_s, time_s), dir_fd=self._fd, follow_symlinks=False)

    def lock(self, is_shared: bool) -> int:
        fd = os.open(".", _FOLDER, dir_fd=self._fd)  # of its own: a lock belongs to an open file
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    def subfolder(self, name: str) -> "Folder":
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._fd)
        return Folder(os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._fd))

    def leave(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


def open_folder(path: Path) -> Folder:
    """A folder that the operator named, made if it is not there; links are followed.

    Raises StoreError.
    """
    with typed_faults():
        with suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
        return Folder(os.open(path, _FOLDER))


@contextmanager
def typed_faults() -> Iterator[None]:
    """Turns the system's errors of its block into StoreError."""
    try:
        yield
    except OSError as error:
        fault = _FAULTS.get(error.errno or 0, StoreFault.IO)
        raise StoreError(fault) from None


@contextmanager
def writing_faults() -> Iterator[None]:
    """The same where something is written: what is not there then is the folder, which somebody
    removed, and not what was asked for."""
    try:
        with typed_faults():
            yield
    except StoreError as error:
        if error.fault is not StoreFault.NOT_FOUND:
            raise
        raise StoreError(StoreFault.IO) from None


def write_file(
    files: Files, name: str, buffers: Sequence[bytes], *, is_synced: bool = False
) -> None:
    """Write a whole file under a temporary name, then give it its own.

    Raises OSError; then neither name is there, unless removing them failed too.
    """
    temporary = name + TEMPORARY
    try:
        with created(files, temporary) as fd:
            for buffer in buffers:
                files.write(fd, buffer)
            if is_synced:
                files.sync(fd)
        files.rename(temporary, name)
    except OSError:
        remove_if_there(files, temporary)
        remove_if_there(files, name)  # a rename that reports an error may have been done
        raise


@contextmanager
def created(files: Files, name: str) -> Iterator[int]:
    fd = files.create(name)
    try:
        yield fd
    finally:
        files.close(fd)


@contextmanager
def opened(files: Files, name: str) -> Iterator[int]:
    fd = files.open(name)
    try:
        yield fd
    finally:
        files.close(fd)


def remove_if_there(files: Files, name: str) -> None:
    with suppress(FileNotFoundError):
        files.remove(name)
