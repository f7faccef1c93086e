"""Where a server keeps saved sessions: the folder of ``--slot-save-path``, opened at start."""

import os
from contextlib import ExitStack
from pathlib import Path

from kvtrio.config import ConfigError
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.store.sessions import SessionStore

REASONS = {
    StoreFault.LOCKED: "another process works on it",
    StoreFault.NOT_FOUND: "no such folder",
    StoreFault.NOT_REGULAR: "this is no folder",
    StoreFault.NO_SPACE: "the disk is full",
}


def open_store(folder: Path, flag: str) -> SessionStore:
    """``flag``: who named the folder. Raises ``ConfigError``."""
    path = folder.expanduser()
    if not path.is_dir():
        raise ConfigError(f"{flag} {folder}: no such folder")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {folder}: this folder cannot be written to")
    try:
        return SessionStore.open(path)
    except StoreError as error:
        reason = REASONS.get(error.fault, "it cannot be used")
        raise ConfigError(f"{flag} {folder}: {reason}") from None


def open_sessions(folder: Path | None, stack: ExitStack) -> SessionStore | None:
    """``stack`` closes it."""
    if folder is None:
        return None
    store = open_store(folder, "--slot-save-path")
    stack.callback(store.close)
    return store
