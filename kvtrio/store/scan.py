"""What is in the disk tier's folder when a server starts."""

import re
from collections.abc import Iterable

from attrs import frozen

from kvtrio.core.stored import StoredHead, StoreError, StoreFault
from kvtrio.store.entries import head_of, read_header
from kvtrio.store.files import TEMPORARY, Files, opened, typed_faults, write_file

SECRET_BYTES = 32
KEY_FILE = "key"
KEY_ROOM = 4096
"""Bytes that the key takes of the limit: what a file system gives to a small file."""
_ENTRY = re.compile(r"[0-9a-f]{64}(\.block|-[1-9][0-9]{0,8}\.state)")
_IN_EMPTY_FOLDERS = frozenset({KEY_FILE + TEMPORARY, "lost+found"})


@frozen
class Found:
    """An entry whose head is good; its parts were not read."""

    head: StoredHead
    modified_ns: int


def entry_name(key: bytes, state_offset: int) -> str:
    return f"{key.hex()}-{state_offset}.state" if state_offset else f"{key.hex()}.block"


def is_ours(name: str) -> bool:
    """Whether this store may have written it as an entry, or as a file on its way to one."""
    whole = name.removesuffix(TEMPORARY)
    return whole != name if whole == KEY_FILE else bool(_ENTRY.fullmatch(whole))


def check_folder(names: Iterable[str]) -> None:
    """A folder that holds other things and no key is somebody's, given by mistake.

    Raises StoreError(FOREIGN).
    """
    others = [name for name in names if not is_ours(name) and name not in _IN_EMPTY_FOLDERS]
    if others and KEY_FILE not in others:
        raise StoreError(StoreFault.FOREIGN)


def find_entry(files: Files, name: str) -> Found:
    """Raises StoreError."""
    if name.endswith(TEMPORARY):
        raise StoreError(StoreFault.TEMPORARY)
    with typed_faults(), opened(files, name) as fd:
        header, size = read_header(files, fd)
        found = Found(head_of(header, size), files.status(fd).modified_ns)
    if entry_name(found.head.key, found.head.state_offset) != name:
        raise StoreError(StoreFault.DAMAGED)
    return found


def in_order(found: Iterable[Found]) -> list[Found]:
    """The least recently used first. Who used a block used those before it, too, so that what is
    taken away from the front never leaves a block without its parent."""
    by_depth = sorted(found, key=lambda one: (-one.head.start, not one.head.state_offset))
    used_ns: dict[bytes, int] = {}
    for one in by_depth:
        head = one.head
        used_ns[head.key] = max(used_ns.get(head.key, 0), one.modified_ns)
        used_ns[head.parent] = max(used_ns.get(head.parent, 0), used_ns[head.key])
    return sorted(by_depth, key=lambda one: used_ns[one.head.key])


def read_secret(files: Files, is_there: bool, new_secret: bytes) -> bytes:
    """The folder's, made now if it has none. Raises StoreError and OSError."""
    if not is_there:
        write_file(files, KEY_FILE, [new_secret], is_synced=True)
        files.sync_names()
        return new_secret
    with opened(files, KEY_FILE) as fd:
        secret = files.read(fd, SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise StoreError(StoreFault.DAMAGED)
    return secret
