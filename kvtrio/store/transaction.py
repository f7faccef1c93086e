"""One change of the folder of saved sessions, done whole or not at all.

1. A session is there when its manifest has its name. All that it needs is on the disk before, so it
   is whole or not there, whenever the process or the machine stops.
2. A manifest is replaced by a rename: until then the session before is there.
3. Pieces that no manifest needs are removed; never while there is a manifest of a newer version, or
   one that cannot be read, since it may need them.
"""

from collections.abc import Iterable
from contextlib import suppress

from attrs import define, field

from kvtrio.core.session import Parts, Piece
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.store.files import Files, created, opened, remove_if_there
from kvtrio.store.manifest import Manifest, Read, encode, read_manifest
from kvtrio.store.pieces import PieceFolder

SAVING = ".saving"
"""The next manifest. While it is there, a session is being saved, or its saver died."""
_NEEDS_NOTHING = frozenset(
    {
        StoreFault.NOT_FOUND,
        StoreFault.NOT_REGULAR,
        StoreFault.FOREIGN,
        StoreFault.TRUNCATED,
        StoreFault.DAMAGED,
    }
)


@define(eq=False)
class Change:
    """Writes pieces for a manifest to come, then the manifest. The folder's lock is held as long as
    it lives; at last, ``end`` it. Its methods raise OSError."""

    root: Files
    pieces: PieceFolder
    has_predecessor: bool
    """There is a session of that name, or what is left of one."""
    _new: list[Piece] = field(init=False, factory=list)
    _is_committed: bool = field(init=False, default=False)
    _is_renamed: bool = field(init=False, default=False)
    """Perhaps: a rename that reports an error may have been done."""

    @property
    def num_new_bytes(self) -> int:
        return sum(piece.size for piece in self._new)

    def begin(self) -> None:
        if SAVING in self.root.names():
            sweep(self.root, self.pieces)
        self.root.close(self.root.create(SAVING))

    def write(self, parts: Parts) -> Piece:
        piece, is_new = self.pieces.write(parts)
        if is_new:
            self._new.append(piece)
        return piece

    def reuse(self, piece: Piece) -> bool:
        """Whether it is there, untouched since this process wrote or read it; then nothing needs to
        be written."""
        return self.pieces.is_as_seen(piece)

    def copy_in(self, piece: Piece, read: Read) -> None:
        """Raises StoreError when ``read`` does not give it."""
        if self.pieces.copy_in(piece, read):
            self._new.append(piece)

    def commit(self, name: str, manifest: Manifest) -> None:
        """When it raises, the old manifest is there, or the new one."""
        if self._new:
            self.pieces.files.sync_all()
        with created(self.root, SAVING) as fd:
            self.root.write(fd, encode(manifest))
            self.root.sync(fd)
        self._is_renamed = True
        self.root.rename(SAVING, name)
        self.root.sync_names()
        self._is_committed = True

    def end(self) -> None:
        """Remove what is needed no more; what the system does not let go now goes before the next
        change."""
        with suppress(OSError):
            if not self._is_renamed:
                self.pieces.remove(self._new)
            elif self.has_predecessor or not self._is_committed:
                sweep(self.root, self.pieces)
            remove_if_there(self.root, SAVING)


def manifest_of(root: Files, name: str) -> Manifest:
    """Raises StoreError and OSError."""
    with opened(root, name) as fd:
        manifest = read_manifest(lambda num_bytes: root.read(fd, num_bytes))
        if root.read(fd, 1):
            raise StoreError(StoreFault.DAMAGED)
    return manifest


def sweep(root: Files, pieces: PieceFolder) -> None:
    """Remove what no manifest needs. Raises OSError."""
    needed = _needed(root)
    if needed is not None:
        pieces.keep_only(needed)


def _needed(root: Files) -> Iterable[Piece] | None:
    """None: that cannot be known."""
    needed: set[Piece] = set()
    for name in root.names():
        if name.startswith("."):
            continue
        try:
            needed.update(manifest_of(root, name).pieces())
        except StoreError as error:
            if error.fault not in _NEEDS_NOTHING:
                return None
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return needed
