"""Saved sessions: manifests in the operator's folder, their state in ``.blocks`` below it.

1. What is in the folder is changed by ``transaction.Change`` only, and never half.
2. Nothing is returned before all of a session was verified, and what is returned is verified again
   when it is read: sessions are larger than memory should be asked to hold twice.
3. A file that is no session is never replaced or removed.
4. Who changes the folder holds its lock, who reads state shares it; nobody waits for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import define, field

from kvtrio.core.session import Parts, Piece, ServerIdentity, SessionHead, SessionInfo
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.store.files import Files, open_folder, remove_if_there, typed_faults, writing_faults
from kvtrio.store.manifest import Manifest, check_name
from kvtrio.store.pieces import PieceFolder
from kvtrio.store.transaction import SAVING, Change, manifest_of, sweep

PIECES = ".blocks"
_NO_SESSION = frozenset(
    {StoreFault.NAME, StoreFault.NOT_FOUND, StoreFault.NOT_REGULAR, StoreFault.FOREIGN}
)
_BROKEN = frozenset({StoreFault.TRUNCATED, StoreFault.DAMAGED})


@define(eq=False)
class SessionWriter:
    """A session on its way: add all its blocks and states, each kind in order, and commit."""

    _change: Change
    _name: str
    _identity: ServerIdentity
    _head: SessionHead
    _owner: bytes
    _blocks: list[Piece] = field(init=False, factory=list)
    _states: list[Piece] = field(init=False, factory=list)

    def add_block(self, parts: Parts) -> Piece:
        """Raises StoreError: NO_SPACE, IO."""
        return self._add(parts, self._blocks)

    def add_state(self, parts: Parts) -> Piece:
        return self._add(parts, self._states)

    def reuse_block(self, piece: Piece) -> bool:
        """The next block is this one, if its file is still as it was; else False, and the block is
        to be added. Raises StoreError(IO)."""
        return self._reuse(piece, self._blocks)

    def reuse_state(self, piece: Piece) -> bool:
        return self._reuse(piece, self._states)

    def _add(self, parts: Parts, pieces: list[Piece]) -> Piece:
        with writing_faults():
            pieces.append(self._change.write(parts))
        return pieces[-1]

    def _reuse(self, piece: Piece, pieces: list[Piece]) -> bool:
        with writing_faults():
            is_there = self._change.reuse(piece)
        if is_there:
            pieces.append(piece)
        return is_there

    def commit(self) -> SessionInfo:
        """Afterwards it survives a power cut. Raises StoreError: NO_SPACE, IO."""
        manifest = Manifest(
            identity=self._identity,
            head=self._head,
            owner=self._owner,
            blocks=tuple(self._blocks),
            states=tuple(self._states),
        )
        assert manifest.is_complete
        with writing_faults():
            self._change.commit(self._name, manifest)
        return manifest.info(self._name, self._change.num_new_bytes)


@define(eq=False)
class SessionReader:
    """A session whose manifest is good."""

    name: str
    manifest: Manifest
    pieces: PieceFolder

    @property
    def head(self) -> SessionHead:
        return self.manifest.head

    @property
    def info(self) -> SessionInfo:
        return self.manifest.info(self.name)

    @property
    def pieces_of(self) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """The files of its blocks, and of its states."""
        return self.manifest.blocks, self.manifest.states

    def block(self, index: int) -> Parts:
        """Raises StoreError when it was damaged since."""
        return self._read(self.manifest.blocks[index])

    def state(self, index: int) -> Parts:
        """The one at ``head.state_positions[index]``. Raises StoreError as ``block`` does."""
        return self._read(self.manifest.states[index])

    def check_fits(self, identity: ServerIdentity, has_adapter: Callable[[bytes], bool]) -> None:
        """Raises StoreError: MODEL, FORMAT, ADAPTERS."""
        ours = self.manifest.identity
        adapters = [one for context in self.head.contexts for one in context.adapters]
        if ours.model != identity.model:
            raise StoreError(StoreFault.MODEL)
        if ours != identity:
            raise StoreError(StoreFault.FORMAT)
        if not all(has_adapter(adapter.digest) for adapter in adapters):
            raise StoreError(StoreFault.ADAPTERS)

    def verify(self) -> None:
        """Read everything once. Raises StoreError."""
        with _of_a_session():
            for piece in self.manifest.pieces():
                self.pieces.check(piece)

    def _read(self, piece: Piece) -> Parts:
        with _of_a_session():
            return self.pieces.read(piece)


@contextmanager
def _of_a_session() -> Iterator[None]:
    """Where a piece is missing, the session is there, but not all of it."""
    try:
        with typed_faults():
            yield
    except StoreError as error:
        if error.fault is not StoreFault.NOT_FOUND:
            raise
        raise StoreError(StoreFault.DAMAGED) from None


@define(eq=False)
class SessionStore:
    """All sessions of a folder. One call, or one context, at a time; ``close`` it."""

    _root: Files
    _pieces: PieceFolder

    @classmethod
    def open(cls, directory: Path) -> "SessionStore":
        """Raises StoreError."""
        root = open_folder(directory)
        try:
            return cls.open_files(root)
        except BaseException:
            root.leave()
            raise

    @classmethod
    def open_files(cls, root: Files) -> "SessionStore":
        """The same in ``root``, which the store leaves when it is closed. What a dead saver left is
        removed, unless somebody is at work in the folder."""
        with typed_faults():
            store = cls(root, PieceFolder(root.subfolder(PIECES)))
        with suppress(OSError, StoreError), store._locked(is_shared=False):
            sweep(root, store._pieces)
            remove_if_there(root, SAVING)
        return store

    def names(self) -> list[str]:
        """Of all sessions, damaged ones too. Raises StoreError."""
        with typed_faults():
            return sorted(filter(self._is_session, self._root.names()))

    def info(self, name: str, owner: bytes | None) -> SessionInfo:
        """``owner``: None for whoever it may be. Raises StoreError."""
        return self._manifest(name, owner).info(name)

    def head(self, name: str, owner: bytes | None) -> SessionHead:
        """Raises StoreError."""
        return self._manifest(name, owner).head

    def exists(self, name: str, owner: bytes | None) -> bool:
        """Whether there is something that can be restored, or is at fault. Raises StoreError."""
        try:
            self._manifest(name, owner)
        except StoreError as error:
            return error.fault is not StoreFault.NOT_FOUND
        return True

    @contextmanager
    def saving(
        self, name: str, head: SessionHead, identity: ServerIdentity, owner: bytes
    ) -> Iterator[SessionWriter]:
        """A session to be written; without a ``commit`` all stays as it was.

        Raises StoreError: NAME, TAKEN, FOREIGN, NOT_REGULAR or NEWER for a file that must not be
        replaced, LOCKED, NO_SPACE, IO.
        """
        with self.changing(name, owner) as change:
            yield SessionWriter(change, name, identity, head, owner)

    @contextmanager
    def changing(self, name: str, owner: bytes | None) -> Iterator[Change]:
        """``saving`` for pieces that are files already."""
        check_name(name)
        with self._locked(is_shared=False):
            with typed_faults():
                change = Change(self._root, self._pieces, self._may_replace(name, owner))
            try:
                with writing_faults():
                    change.begin()
                yield change
            finally:
                change.end()

    @contextmanager
    def restoring(
        self,
        name: str,
        identity: ServerIdentity,
        has_adapter: Callable[[bytes], bool],
        owner: bytes | None,
    ) -> Iterator[SessionReader]:
        """A session whose every byte was verified, for a server of this identity.

        Raises StoreError: NAME, NOT_FOUND, also for another owner's, NOT_REGULAR, FOREIGN, NEWER,
        TRUNCATED, DAMAGED, also when state is missing, MODEL, FORMAT, ADAPTERS, LOCKED, IO.
        """
        with self.reading(name, owner) as reader:
            reader.check_fits(identity, has_adapter)
            reader.verify()
            yield reader

    @contextmanager
    def reading(self, name: str, owner: bytes | None) -> Iterator[SessionReader]:
        """A session for any server; only what is read is verified."""
        with self._locked(is_shared=True):
            yield SessionReader(name, self._manifest(name, owner), self._pieces)

    def erase(self, name: str, owner: bytes | None) -> None:
        """Remove a session, or what is left of one. Raises StoreError."""
        with self._locked(is_shared=False), typed_faults():
            try:
                self._manifest(name, owner)
            except StoreError as error:
                if error.fault not in _BROKEN:
                    raise
            self._root.remove(name)
            self._root.sync_names()
            sweep(self._root, self._pieces)

    def close(self) -> None:
        """Idempotent."""
        self._pieces.files.leave()
        self._root.leave()

    @contextmanager
    def _locked(self, *, is_shared: bool) -> Iterator[None]:
        with typed_faults():
            fd = self._root.lock(is_shared)
        try:
            yield
        finally:
            with typed_faults():
                self._root.close(fd)

    def _is_session(self, name: str) -> bool:
        try:
            self._manifest(name, None)
        except StoreError as error:
            return error.fault not in _NO_SESSION
        return True

    def _manifest(self, name: str, owner: bytes | None) -> Manifest:
        check_name(name)
        with typed_faults():
            manifest = manifest_of(self._root, name)
        if owner is not None and manifest.owner != owner:
            raise StoreError(StoreFault.NOT_FOUND)
        return manifest

    def _may_replace(self, name: str, owner: bytes | None) -> bool:
        """Whether there is something to replace; raises StoreError for what must stay."""
        try:
            manifest = manifest_of(self._root, name)
        except FileNotFoundError:
            return False
        except StoreError as error:
            if error.fault in _BROKEN:
                return True
            raise
        if owner is not None and manifest.owner != owner:
            raise StoreError(StoreFault.TAKEN)
        return True
