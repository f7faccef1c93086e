"""A saved session as one file: its manifest, then its pieces, each once, in the manifest's order.

Sizes and digests are in the manifest, so a file is written and read as it goes by.
"""

from typing import Protocol

from attrs import evolve

from kvtrio.core.session import SessionInfo
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.store.files import typed_faults, writing_faults
from kvtrio.store.manifest import Read, encode, read_manifest
from kvtrio.store.pieces import CHUNK
from kvtrio.store.sessions import SessionStore


class Source(Protocol):
    """A file open for reading bytes."""

    def read(self, num_bytes: int, /) -> bytes: ...


class Target(Protocol):
    """A file open for writing bytes."""

    def write(self, data: bytes, /) -> object: ...


def export_session(store: SessionStore, name: str, target: Target) -> SessionInfo:
    """Write a session, all verified, to ``target``, which the caller makes lasting or removes.

    Raises StoreError as ``SessionStore.restoring`` does, and for faults of ``target``.
    """
    with store.reading(name, None) as reader:
        reader.verify()
        with typed_faults():
            target.write(encode(reader.manifest))
            for piece in reader.manifest.pieces():
                for chunk in reader.pieces.copy_out(piece):
                    target.write(chunk)
        return reader.info


def import_session(
    store: SessionStore, name: str, source: Source, owner: bytes | None = None
) -> SessionInfo:
    """Add the session in ``source``. ``owner``: None for who it was.

    Raises StoreError, and then all is as it was: TRUNCATED, DAMAGED, FOREIGN, NEWER for the source,
    and as ``SessionStore.saving`` does.
    """
    read = _reader(source)
    with store.changing(name, None) as change, writing_faults():
        manifest = read_manifest(read)
        if owner is not None:
            manifest = evolve(manifest, owner=owner)
        for piece in manifest.pieces():
            change.copy_in(piece, read)
        if read(1):
            raise StoreError(StoreFault.DAMAGED)
        change.commit(name, manifest)
        return manifest.info(name, change.num_new_bytes)


def _reader(source: Source) -> Read:
    """Asks for little at a time, so that no more is allocated than what comes."""

    def read(num_bytes: int) -> bytes:
        pieces = []
        while num_bytes and (piece := source.read(min(num_bytes, CHUNK))):
            pieces.append(piece)
            num_bytes -= len(piece)
        return b"".join(pieces)

    return read
