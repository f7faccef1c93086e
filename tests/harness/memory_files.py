"""A folder in memory, for ``kvtrio.store``: with what it has lost after a power cut.

1. A file's bytes are safe once it was synced after its last write; a name, once its folder was.
2. After a power cut, of everything else any part may be there: names changed or not, in any
   combination; contents cut short, replaced by zeros, or whole.
"""

import errno
from itertools import count
from random import Random

from attrs import define, field

from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.store.files import FileStatus


@define(eq=False)
class Inode:
    data: bytes = b""
    safe: bytes | None = b""
    """What is certainly there after a power cut; None: nobody knows."""
    modified_ns: int = 0


@define(eq=False)
class Disk:
    """What all folders share."""

    folders: list["MemoryFiles"] = field(factory=list)
    fds: dict[int, list] = field(factory=dict)
    """Inode and position."""
    numbers: count = field(factory=lambda: count(3))
    peak_bytes: int = 0
    """The most that the first folder's files ever had together."""

    def measure(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.folders[0].total_bytes)


@define(eq=False)
class MemoryFiles:
    """``Files``, made anew by ``MemoryFiles.new()``."""

    disk: Disk
    entries: dict[str, Inode] = field(factory=dict)
    safe: dict[str, Inode] = field(factory=dict)
    subfolders: dict[str, "MemoryFiles"] = field(factory=dict)
    locks: set[int] = field(factory=set)

    @classmethod
    def new(cls) -> "MemoryFiles":
        disk = Disk()
        disk.folders.append(cls(disk))
        return disk.folders[0]

    @property
    def total_bytes(self) -> int:
        return sum(len(inode.data) for inode in self.entries.values())

    def put(self, name: str, data: bytes) -> None:
        """A whole file, safe at once."""
        self.entries[name] = self.safe[name] = Inode(data, data, next(self.disk.numbers))

    def after_stop(self) -> "MemoryFiles":
        """The same files for the next process."""
        self.disk.fds.clear()
        for folder in self.disk.folders:
            folder.locks.clear()
        return self

    def after_power_cut(self, rng: Random) -> "MemoryFiles":
        for folder in self.disk.folders:
            folder._lose_names(rng)
        inodes = {id(i): i for folder in self.disk.folders for i in folder.entries.values()}
        for inode in inodes.values():
            inode.data = inode.safe = _after_cut(inode, rng)
        return self.after_stop()

    def _lose_names(self, rng: Random) -> None:
        for name in sorted(self.entries.keys() | self.safe.keys()):
            new, old = self.entries.get(name), self.safe.get(name)
            kept = rng.choice((new, old))
            self.entries.pop(name, None)
            if kept is not None:
                self.entries[name] = kept
        self.safe = dict(self.entries)

    def names(self) -> list[str]:
        return [*self.entries, *self.subfolders]

    def open(self, name: str) -> int:
        if name in self.subfolders:
            raise StoreError(StoreFault.NOT_REGULAR)
        return self._opened(self._inode(name))

    def status(self, fd: int) -> FileStatus:
        inode, _ = self.disk.fds[fd]
        return FileStatus(len(inode.data), inode.modified_ns)

    def size(self, name: str) -> int:
        return len(self._inode(name).data)

    def read(self, fd: int, num_bytes: int) -> bytes:
        inode, position = self.disk.fds[fd]
        data = inode.data[position : position + num_bytes]
        self.disk.fds[fd][1] += len(data)
        return bytes(data)

    def create(self, name: str) -> int:
        self.entries[name] = Inode(safe=None, modified_ns=next(self.disk.numbers))
        return self._opened(self.entries[name])

    def write(self, fd: int, data: bytes) -> None:
        inode, _ = self.disk.fds[fd]
        inode.data += data
        inode.safe = None
        self.disk.measure()

    def sync(self, fd: int) -> None:
        inode, _ = self.disk.fds[fd]
        inode.safe = inode.data

    def close(self, fd: int) -> None:
        self.disk.fds.pop(fd, None)
        for folder in self.disk.folders:
            folder.locks.discard(fd)

    def rename(self, old: str, new: str) -> None:
        self._inode(old)
        self.entries[new] = self.entries.pop(old)

    def remove(self, name: str) -> None:
        self._inode(name)
        del self.entries[name]

    def sync_names(self) -> None:
        self.safe = dict(self.entries)

    def sync_all(self) -> None:
        for folder in self.disk.folders:
            folder.sync_names()
            for inode in folder.entries.values():
                inode.safe = inode.data

    def touch(self, name: str, time_s: float) -> None:
        self._inode(name).modified_ns = int(time_s * 1e9)

    def lock(self, is_shared: bool) -> int:
        if self.locks and not is_shared:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        fd = next(self.disk.numbers)
        self.locks.add(fd)
        return fd

    def subfolder(self, name: str) -> "MemoryFiles":
        if name not in self.subfolders:
            self.subfolders[name] = MemoryFiles(self.disk)
            self.disk.folders.append(self.subfolders[name])
        return self.subfolders[name]

    def leave(self) -> None:
        pass

    def _inode(self, name: str) -> Inode:
        if name not in self.entries:
            raise FileNotFoundError(errno.ENOENT, "not there")
        return self.entries[name]

    def _opened(self, inode: Inode) -> int:
        fd = next(self.disk.numbers)
        self.disk.fds[fd] = [inode, 0]
        return fd


def _after_cut(inode: Inode, rng: Random) -> bytes:
    if inode.safe is not None:
        return inode.safe
    data = inode.data
    return rng.choice((data, b"", data[: rng.randrange(len(data) + 1)], bytes(len(data))))
