"""A saved session's manifest: what the session is and which files hold its state.

One line of fixed length (magic, version, checksum, length) and JSON of so many bytes.

1. The version is looked at first: nothing else is claimed about another version's file.
2. What has a right checksum can still have been made by anybody: all that others rely on is
   checked.
"""

import math
from collections.abc import Callable, Iterator

import msgspec
from attrs import frozen
from blake3 import blake3

from kvtrio.core.session import Piece, ServerIdentity, SessionHead, SessionInfo
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.store.entries import DIGEST_BYTES, MAX_ENTRY_BYTES, digest_of

MAX_MANIFEST_BYTES = 1 << 26
MAX_OWNER_BYTES = 32
MAX_NAME_BYTES = 255
_MAGIC = b"kvtrio session "
_VERSION = b"001"
_LINE = len(_MAGIC) + len(b"001 ") + 2 * DIGEST_BYTES + len(b" 00000000\n")
# What file systems or readers of file names take for something else; as in llama-server.
_FORBIDDEN = frozenset('/\\:*?"<>|\uff0e\u2215\u2216\ufffd\ufeff')

Read = Callable[[int], bytes]
"""So many bytes, or fewer at the end."""


@frozen(kw_only=True)
class Manifest:
    """``blocks`` in the order of their tokens, ``states`` in that of ``head.state_positions``."""

    identity: ServerIdentity
    head: SessionHead
    owner: bytes
    blocks: tuple[Piece, ...]
    states: tuple[Piece, ...]

    @property
    def is_complete(self) -> bool:
        return len(self.blocks) == self.head.num_blocks(self.identity.block_size) and len(
            self.states
        ) == len(self.head.state_positions)

    def pieces(self) -> Iterator[Piece]:
        """Each file once, in an order that depends on nothing else."""
        yield from dict.fromkeys((*self.blocks, *self.states))

    def info(self, name: str, num_new_bytes: int = 0) -> SessionInfo:
        return SessionInfo(
            name=name,
            identity=self.identity,
            num_tokens=len(self.head.token_ids),
            num_states=len(self.states),
            num_bytes=len(encode(self)) + sum(piece.size for piece in self.pieces()),
            num_new_bytes=num_new_bytes,
        )


def encode(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest)
    checksum = blake3(body).hexdigest().encode()
    return b"%s%s %s %08d\n%s" % (_MAGIC, _VERSION, checksum, len(body), body)


def read_manifest(read: Read) -> Manifest:
    """What ``read`` gives next. Raises StoreError: FOREIGN, NEWER, TRUNCATED, DAMAGED."""
    line = read(_LINE)
    if not (line[: len(_MAGIC)] == _MAGIC or _MAGIC.startswith(line)):
        raise StoreError(StoreFault.FOREIGN)
    version = line[len(_MAGIC) : len(_MAGIC) + len(_VERSION)]
    if version.isdigit() and version > _VERSION:
        raise StoreError(StoreFault.NEWER)
    if len(line) < _LINE:
        raise StoreError(StoreFault.TRUNCATED)
    checksum, length = _fields(line)
    if not length.isdigit() or int(length) > MAX_MANIFEST_BYTES:
        raise StoreError(StoreFault.DAMAGED)
    body = read(int(length))
    if len(body) < int(length):
        raise StoreError(StoreFault.TRUNCATED)
    if blake3(body).digest() != digest_of(checksum.decode("ascii", "replace")):
        raise StoreError(StoreFault.DAMAGED)
    return _decoded(body)


def _fields(line: bytes) -> tuple[bytes, bytes]:
    parts = line[len(_MAGIC) : -1].split(b" ")
    if len(parts) != 3 or parts[0] != _VERSION or line[-1:] != b"\n":
        raise StoreError(StoreFault.DAMAGED)
    return parts[1], parts[2]


def _decoded(body: bytes) -> Manifest:
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise StoreError(StoreFault.DAMAGED) from None
    if not (_is_identity(manifest.identity) and _is_head(manifest.head) and _fits(manifest)):
        raise StoreError(StoreFault.DAMAGED)
    return manifest


def _is_identity(identity: ServerIdentity) -> bool:
    digests = (identity.model, identity.format)
    return all(len(digest) == DIGEST_BYTES for digest in digests) and identity.block_size > 0


def _is_head(head: SessionHead) -> bool:
    num_tokens = len(head.token_ids)
    starts = [context.start for context in head.contexts]
    adapters = [adapter for context in head.contexts for adapter in context.adapters]
    return (
        num_tokens > 0
        and all(0 <= token < 1 << 32 for token in head.token_ids)
        and starts[:1] == [0]
        and _ascends(starts, num_tokens - 1)
        and _ascends([0, *head.state_positions], num_tokens)
        and all(len(one.digest) == DIGEST_BYTES and math.isfinite(one.scale) for one in adapters)
    )


def _ascends(numbers: list[int], last: int) -> bool:
    """Each is greater than the one before and none is greater than ``last``."""
    return all(a < b for a, b in zip(numbers, [*numbers[1:], last + 1], strict=True))


def _fits(manifest: Manifest) -> bool:
    pieces = (*manifest.blocks, *manifest.states)
    return (
        manifest.is_complete
        and len(manifest.owner) <= MAX_OWNER_BYTES
        and all(len(piece.digest) == DIGEST_BYTES for piece in pieces)
        and all(0 < piece.size <= MAX_ENTRY_BYTES for piece in pieces)
    )


def check_name(name: str) -> None:
    """llama-server's rule for one part of a path, and no leading dot: those names are ours.

    Raises StoreError(NAME).
    """
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        raise StoreError(StoreFault.NAME) from None
    is_good = (
        1 <= len(raw) <= MAX_NAME_BYTES
        and not _FORBIDDEN & set(name)
        and all(ch >= " " and not "\x7f" <= ch <= "\x9f" for ch in name)
        and name.strip(" ") == name
        and not name.startswith(".")
        and not name.endswith(".")
        and ".." not in name
    )
    if not is_good:
        raise StoreError(StoreFault.NAME)
