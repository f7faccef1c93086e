"""The disk tier's folder, opened before anything else: its secret is part of every key."""

import secrets
import time
from contextlib import ExitStack

from kvtrio.cli.identity import SECRET_BYTES
from kvtrio.config import ConfigError, StateSettings
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.engine.mover import Disk
from kvtrio.engine.offload import ThreadOffload
from kvtrio.store.disk import DiskStore
from kvtrio.store.scan import KEY_ROOM

MIB = 1 << 20
NUM_THREADS = 2
"""One writes, one reads."""
REASONS = {
    StoreFault.LOCKED: "another server uses it",
    StoreFault.FOREIGN: "it holds files that are not a server's; give it a folder of its own",
    StoreFault.DAMAGED: "its key is damaged; an empty folder gets a new one",
    StoreFault.NOT_FOUND: "no such folder",
    StoreFault.NOT_REGULAR: "this is no folder",
    StoreFault.NO_SPACE: "the disk is full",
}


def open_disk(settings: StateSettings, stack: ExitStack) -> DiskStore | None:
    """``stack`` closes it. Raises ``ConfigError``."""
    folder = settings.cache_disk
    if folder is None:
        return None
    limit = settings.cache_disk_size * MIB
    try:
        store = DiskStore.open(folder.expanduser(), limit, secrets.token_bytes(SECRET_BYTES))
    except StoreError as error:
        reason = REASONS.get(error.fault, "it cannot be used")
        raise ConfigError(f"--cache-disk {folder}: {reason}") from None
    stack.callback(store.close)
    return store


def disk_bytes(store: DiskStore | None) -> int:
    """What entries may take; 0 without a disk tier."""
    return store.limit_bytes - KEY_ROOM if store is not None else 0


def disk_of(store: DiskStore | None) -> Disk | None:
    """As the engine uses it."""
    return None if store is None else Disk(store, ThreadOffload(NUM_THREADS), time.time)
