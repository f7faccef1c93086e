"""What ``kvtrio session`` does with files."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kvtrio.cli import exits
from kvtrio.cli.saved_sessions import open_store
from kvtrio.config import ConfigError
from kvtrio.core.session import SessionInfo, owner_tag
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.store.archive import export_session, import_session
from kvtrio.store.sessions import SessionStore

FLAG = "--slot-save-path"
TEXTS = {
    StoreFault.NOT_FOUND: "no such session",
    StoreFault.NAME: "no session can have this name",
    StoreFault.TAKEN: "another key's session has this name",
    StoreFault.NOT_REGULAR: "this is no regular file",
    StoreFault.TRUNCATED: "a part is missing",
    StoreFault.DAMAGED: "it is damaged",
    StoreFault.NEWER: "a newer version of kvtrio wrote it",
    StoreFault.FOREIGN: "this is no session of kvtrio's",
    StoreFault.NO_SPACE: "the disk is full",
    StoreFault.LOCKED: "the server, or another process, works on the sessions; try again",
}


def print_sessions(folder: Path) -> int:
    def show(store: SessionStore) -> None:
        for name in store.names():
            try:
                print(_line(store.info(name, None)))
            except StoreError as error:
                print(f"{_shown(name)}: {_text(error)}")

    return _with_store(folder, show)


def export_file(name: str, file: Path, folder: Path) -> int:
    def export(store: SessionStore) -> None:
        with _new_file(file) as target:
            print(_line(export_session(store, name, target)))

    return _with_store(folder, export)


def import_file(file: Path, name: str, folder: Path, api_key: str | None) -> int:
    owner = None
    if api_key is not None:
        owner = owner_tag(api_key.encode(), "") if api_key else b""

    def bring(store: SessionStore) -> None:
        with file.expanduser().open("rb") as source:
            print(_line(import_session(store, name, source, owner)))

    return _with_store(folder, bring)


def erase_session(name: str, folder: Path) -> int:
    return _with_store(folder, lambda store: store.erase(name, None))


def _with_store(folder: Path, act: Callable[[SessionStore], None]) -> int:
    """Exit code; what stands in the way is told in one line."""
    try:
        with closing(open_store(folder, FLAG)) as store:
            act(store)
    except ConfigError as error:
        exits.complain(error)
    except StoreError as error:
        exits.complain(_text(error))
    except OSError as error:
        exits.complain(f"{error.filename or 'the file'}: {os.strerror(error.errno or 5)}")
    else:
        return exits.OK
    return exits.USAGE


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is there, whole and lasting, after the block, or not at all; 0600."""
    path = path.expanduser()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _line(info: SessionInfo) -> str:
    return (
        f"{_shown(info.name)}: {info.num_tokens} tokens, {info.num_states} checkpoints,"
        f" {info.num_bytes} bytes"
    )


def _shown(name: str) -> str:
    """Whoever may use the server chooses names: a terminal must not turn or break the line."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in name)


def _text(error: StoreError) -> str:
    return TEXTS.get(error.fault, "the disk failed")
