"""The disk tier's files.

1. One process at a time: the folder is locked as long as the store is open.
2. The files' sizes, temporary ones included, never exceed the limit: room is booked before a file
   is begun, and given back when it is known to be gone.
3. An entry's own name means that it is whole, as long as the machine runs. Nothing is synced: what
   a power cut leaves is told apart by its checksum.
4. What is returned was verified whole.
5. Only files that are named as this store names its files are ever removed, and a folder that holds
   others and no key is not used: it is somebody's, given by mistake.

``write`` may run on one thread while ``read``, ``remove`` and ``touch`` run on another.
"""

from collections import Counter
from contextlib import suppress
from pathlib import Path
from threading import Lock

from attrs import define, evolve, field

from kvtrio.core.stored import Stored, StoredHead, StoreError, StoreFault
from kvtrio.store.entries import fields_of, head_of, read_entry, sealed
from kvtrio.store.files import (
    TEMPORARY,
    Files,
    open_folder,
    remove_if_there,
    typed_faults,
    write_file,
)
from kvtrio.store.scan import (
    KEY_FILE,
    KEY_ROOM,
    Found,
    check_folder,
    entry_name,
    find_entry,
    in_order,
    is_ours,
    read_secret,
)


@define(eq=False)
class DiskStore:
    """Entries by key and state offset; ``close`` it."""

    secret: bytes
    """For the keys of blocks; made once for each folder."""
    limit_bytes: int
    discarded: Counter[StoreFault]
    """Files that were removed when the store was opened, by reason."""
    used_bytes: int
    """By entries, files being written, and files that could not be removed."""
    _files: Files
    _lock_fd: int
    _heads: dict[str, StoredHead]
    _writing: set[str] = field(factory=set)
    _stale: dict[str, int] = field(factory=dict)
    """Files that could not be removed, with the bytes booked for them."""
    _guard: Lock = field(factory=Lock)

    @classmethod
    def open(cls, directory: Path, limit_bytes: int, new_secret: bytes) -> "DiskStore":
        """Raises StoreError: LOCKED, FOREIGN for a folder with other things in it, DAMAGED when its
        key is, LIMIT when not even the key fits, NO_SPACE, IO.

        ``new_secret``: 32 random bytes, for a folder that has none yet.
        """
        files = open_folder(directory)
        try:
            return cls.open_files(files, limit_bytes, new_secret)
        except BaseException:
            files.leave()
            raise

    @classmethod
    def open_files(cls, files: Files, limit_bytes: int, new_secret: bytes) -> "DiskStore":
        """The same in ``files``, which the store leaves when it is closed."""
        with typed_faults():
            lock_fd = files.lock(is_shared=False)
            try:
                names = files.names()
                check_folder(names)
                store = cls(b"", limit_bytes, Counter(), KEY_ROOM, files, lock_fd, {})
                found = store._scan(names)
                store._fit(in_order(found))
                if limit_bytes < KEY_ROOM:
                    raise StoreError(StoreFault.LIMIT)
                store.secret = read_secret(files, KEY_FILE in names, new_secret)
            except BaseException:
                files.close(lock_fd)
                raise
        return store

    def heads(self) -> tuple[StoredHead, ...]:
        """All entries; those of the start come first, the least recently used at the front."""
        with self._guard:
            return tuple(self._heads.values())

    def write(self, stored: Stored) -> StoredHead:
        """Add an entry, unless it is there; its head with its size.

        Raises StoreError, and then nothing is there: LIMIT when there is no room for it (remove
        something first), NO_SPACE, IO.
        """
        header = sealed(fields_of(stored.head), stored.parts)
        raw = header.encoded()
        head = evolve(stored.head, size=len(raw) + header.num_bytes)
        name = entry_name(head.key, head.state_offset)
        known = self._book(name, head.size)
        if known is not None:
            return known
        try:
            with typed_faults():
                write_file(self._files, name, (raw, *stored.parts))
        except BaseException:
            self._give_up(name, head.size)
            raise
        with self._guard:
            self._writing.remove(name)
            self._heads[name] = head
        return head

    def read(self, key: bytes, state_offset: int) -> Stored:
        """Raises StoreError: NOT_FOUND, NOT_REGULAR, TRUNCATED, DAMAGED, FOREIGN, NEWER, IO; the
        entry stays until it is removed."""
        name = entry_name(key, state_offset)
        known = self._heads.get(name)
        if known is None:
            raise StoreError(StoreFault.NOT_FOUND)
        with typed_faults():
            header, parts = read_entry(self._files, name)
        head = head_of(header, known.size)
        if head != known:
            raise StoreError(StoreFault.DAMAGED)
        return Stored(head, parts)

    def remove(self, key: bytes, state_offset: int) -> None:
        """Does nothing when it is not there. Raises StoreError(IO); then it is still there."""
        name = entry_name(key, state_offset)
        with typed_faults():
            remove_if_there(self._files, name)
        with self._guard:
            head = self._heads.pop(name, None)
            self.used_bytes -= head.size if head else 0

    def touch(self, key: bytes, state_offset: int, time_s: float) -> None:
        """Note that it was used: seconds since 1970. Raises StoreError."""
        with typed_faults():
            self._files.touch(entry_name(key, state_offset), time_s)

    def close(self) -> None:
        """Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            with suppress(OSError):
                self._files.close(fd)
            self._files.leave()

    def _book(self, name: str, size: int) -> StoredHead | None:
        """Room for a new file, or the head of one that is there."""
        with self._guard:
            known = self._heads.get(name)
            if known is not None:
                return known
            self._remove_stale()
            if name in self._writing or name in self._stale:
                raise StoreError(StoreFault.IO)
            if self.used_bytes + size > self.limit_bytes:
                raise StoreError(StoreFault.LIMIT)
            self.used_bytes += size
            self._writing.add(name)
        return None

    def _give_up(self, name: str, size: int) -> None:
        """What of a failed write is still there keeps its room."""
        with self._guard:
            self._writing.remove(name)
            self._stale[name] = size
            self._remove_stale()

    def _remove_stale(self) -> None:
        for name in list(self._stale):
            with suppress(OSError):
                remove_if_there(self._files, name + TEMPORARY)
                remove_if_there(self._files, name)
                self.used_bytes -= self._stale.pop(name)

    def _scan(self, names: list[str]) -> list[Found]:
        """Every entry with a good head; everything else that is ours is removed. Without the key
        that they were named with, entries cannot be found any more."""
        found = []
        for name in filter(is_ours, names):
            try:
                if KEY_FILE not in names:
                    raise StoreError(StoreFault.FOREIGN)
                found.append(find_entry(self._files, name))
            except StoreError as error:
                self._discard(name, error.fault)
        return found

    def _fit(self, found: list[Found]) -> None:
        """Keep what fits, the most recently used ones."""
        total = sum(one.head.size for one in found)
        for one in found:
            head = one.head
            name = entry_name(head.key, head.state_offset)
            if self.used_bytes + total > self.limit_bytes:
                self._discard(name, StoreFault.LIMIT)
            else:
                self.used_bytes += head.size
                self._heads[name] = head
            total -= head.size

    def _discard(self, name: str, fault: StoreFault) -> None:
        self.discarded[fault] += 1
        try:
            remove_if_there(self._files, name)
        except OSError:
            self._stale[name] = size = self._files.size(name)
            self.used_bytes += size
