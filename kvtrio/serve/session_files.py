"""What routes need of saved sessions' files, and what they tell of their faults.

``kvtrio.store`` has the files; the command line hands them in.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvtrio.core.session import Parts, Piece, ServerIdentity, SessionHead, SessionInfo
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.serve import errors
from kvtrio.serve.errors import ApiError, ErrorSpec


class SessionWriter(Protocol):
    """Blocks ascending, states ascending; nothing is there until ``commit``."""

    def add_block(self, parts: Parts) -> Piece: ...
    def add_state(self, parts: Parts) -> Piece: ...
    def reuse_block(self, piece: Piece) -> bool:
        """False: its file has gone or changed; add the block."""
        ...

    def reuse_state(self, piece: Piece) -> bool: ...
    def commit(self) -> SessionInfo: ...


class SessionReader(Protocol):
    """Each part is verified when it is read."""

    @property
    def head(self) -> SessionHead: ...
    @property
    def info(self) -> SessionInfo: ...
    @property
    def pieces_of(self) -> tuple[Sequence[Piece], Sequence[Piece]]:
        """The files of its blocks, and of its states."""
        ...

    def block(self, index: int) -> Parts: ...
    def state(self, index: int) -> Parts: ...


Written = AbstractContextManager[SessionWriter]
Read = AbstractContextManager[SessionReader]


class SessionFiles(Protocol):
    """One call, or one context, at a time, beside the event loop. All raise ``StoreError``; another
    owner's session is not found."""

    def saving(
        self, name: str, head: SessionHead, identity: ServerIdentity, owner: bytes
    ) -> Written: ...
    def restoring(
        self,
        name: str,
        identity: ServerIdentity,
        has_adapter: Callable[[bytes], bool],
        owner: bytes,
    ) -> Read:
        """Verified whole before anything is returned."""
        ...

    def reading(self, name: str, owner: bytes) -> Read:
        """Only what is read is verified."""
        ...

    def exists(self, name: str, owner: bytes) -> bool:
        """Whether something is there that can be restored, or is at fault."""
        ...


FAULTS: Mapping[StoreFault, ErrorSpec] = {
    StoreFault.NOT_FOUND: errors.SESSION_NOT_FOUND,
    StoreFault.NAME: errors.SESSION_NAME,
    StoreFault.TAKEN: errors.SESSION_TAKEN,
    StoreFault.NOT_REGULAR: errors.SESSION_NOT_REGULAR,
    StoreFault.TRUNCATED: errors.SESSION_TRUNCATED,
    StoreFault.DAMAGED: errors.SESSION_DAMAGED,
    StoreFault.NEWER: errors.SESSION_NEWER,
    StoreFault.FOREIGN: errors.SESSION_FOREIGN,
    StoreFault.TEMPORARY: errors.SESSION_FOREIGN,
    StoreFault.MODEL: errors.SESSION_MODEL,
    StoreFault.FORMAT: errors.SESSION_FORMAT,
    StoreFault.ADAPTERS: errors.SESSION_ADAPTERS,
    StoreFault.LIMIT: errors.SESSION_DISK_FULL,
    StoreFault.NO_SPACE: errors.SESSION_DISK_FULL,
    StoreFault.IO: errors.SESSION_DISK,
    StoreFault.LOCKED: errors.SESSION_LOCKED,
}


def session_error(error: StoreError, field: str) -> ApiError:
    """``field``: where the session's name came from."""
    return ApiError(FAULTS[error.fault], field)
