"""The files that hold saved sessions' state, named by what is in them.

Each is a file of ``entries`` without fields, so its checksum, which is its name, is that of the
parts alone: sessions that begin alike share files, and what is saved again is not written again.

A file that was written, or read and verified, by this process is known by its size and time of
change: as long as these are the same, its bytes are taken for what they were.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

from attrs import define, field
from blake3 import blake3

from kvtrio.core.session import Parts, Piece
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.store.entries import read_entry, read_header, sealed
from kvtrio.store.files import (
    TEMPORARY,
    Files,
    FileStatus,
    created,
    opened,
    remove_if_there,
    write_file,
)
from kvtrio.store.manifest import Read

CHUNK = 1 << 20
_OURS = re.compile(f"[0-9a-f]{{64}}({re.escape(TEMPORARY)})?")


@define(eq=False)
class PieceFolder:
    """Every method may raise OSError. Whoever calls holds the lock that its task needs."""

    files: Files
    _seen: dict[bytes, FileStatus] = field(init=False, factory=dict)
    """By digest, of files that were whole when they were looked at."""

    def write(self, parts: Sequence[bytes]) -> tuple[Piece, bool]:
        """The piece, and whether it is new; a new one is not synced."""
        header = sealed({}, parts)
        raw = header.encoded()
        piece = Piece(header.checksum, len(raw) + header.num_bytes)
        is_new = not self.has(piece)
        if is_new:
            name = piece.digest.hex()
            write_file(self.files, name, (raw, *parts))
            with suppress(OSError), opened(self.files, name) as fd:
                self._seen[piece.digest] = self.files.status(fd)
        return piece, is_new

    def is_as_seen(self, piece: Piece) -> bool:
        """Whether its file is there and has not changed since it was found whole."""
        seen = self._seen.get(piece.digest)
        if seen is None or seen.size != piece.size:
            return False
        try:
            with opened(self.files, piece.digest.hex()) as fd:
                return self.files.status(fd) == seen
        except (StoreError, FileNotFoundError):
            return False

    def read(self, piece: Piece) -> Parts:
        """Verified whole. Raises StoreError."""
        header, parts = read_entry(self.files, piece.digest.hex())
        if header.checksum != piece.digest or header.fields:
            raise StoreError(StoreFault.DAMAGED)
        return parts

    def check(self, piece: Piece, name: str | None = None) -> None:
        """Like ``read``, without holding it in memory. Raises StoreError."""
        with opened(self.files, name or piece.digest.hex()) as fd:
            header, size = read_header(self.files, fd)
            status = self.files.status(fd)
            hasher = blake3(header.unsealed())
            for chunk in chunks(lambda num_bytes: self.files.read(fd, num_bytes), header.num_bytes):
                hasher.update(chunk)
        found = (hasher.digest(), header.checksum, size)
        if found != (piece.digest, piece.digest, piece.size) or header.fields:
            raise StoreError(StoreFault.DAMAGED)
        self._seen[piece.digest] = status

    def has(self, piece: Piece) -> bool:
        """Whether it is there, whole: a damaged one is written again."""
        if self.is_as_seen(piece):
            return True
        try:
            self.check(piece)
        except (StoreError, FileNotFoundError):
            return False
        return True

    def copy_out(self, piece: Piece) -> Iterable[bytes]:
        """Its file in chunks. Raises StoreError when a chunk is missing."""
        with opened(self.files, piece.digest.hex()) as fd:
            yield from chunks(lambda num_bytes: self.files.read(fd, num_bytes), piece.size)

    def copy_in(self, piece: Piece, read: Read) -> bool:
        """Its file, as ``read`` gives it, unsynced; whether it is new. Raises StoreError, and then
        nothing has changed."""
        name = piece.digest.hex()
        is_new = not self.has(piece)
        try:
            with created(self.files, name + TEMPORARY) as fd:
                for chunk in chunks(read, piece.size):
                    self.files.write(fd, chunk)
            self.check(piece, name + TEMPORARY)
            self.files.rename(name + TEMPORARY, name)
        except (OSError, StoreError):
            with suppress(OSError):
                remove_if_there(self.files, name + TEMPORARY)
                if is_new:
                    remove_if_there(self.files, name)
            raise
        return is_new

    def remove(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._seen.pop(piece.digest, None)
            remove_if_there(self.files, piece.digest.hex())

    def keep_only(self, needed: Iterable[Piece]) -> None:
        names = {piece.digest.hex() for piece in needed}
        self._seen = {digest: seen for digest, seen in self._seen.items() if digest.hex() in names}
        for name in self.files.names():
            if _OURS.fullmatch(name) and name not in names:
                self.files.remove(name)


def chunks(read: Read, num_bytes: int) -> Iterable[bytes]:
    """Raises StoreError(TRUNCATED) when fewer bytes come."""
    while num_bytes:
        chunk = read(min(num_bytes, CHUNK))
        if not chunk:
            raise StoreError(StoreFault.TRUNCATED)
        num_bytes -= len(chunk)
        yield chunk
