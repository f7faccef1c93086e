"""One block's bytes, or one state's, as a file: a safetensors file with one tensor per part.

Format: https://github.com/huggingface/safetensors#format, with ``part0``, ``part1``... of type U8
and the entry's fields in ``__metadata__``.

1. Equal entries are equal bytes: the header is written in one way, and one that is not written in
   that way is damaged. So nothing can stand in a header that was not understood.
2. The checksum is taken over the whole file, with zeros in its own place.
3. A file's size is a multiple of what file systems give out, so that a limit on sizes is one on the
   disk's space too.
4. Nothing is allocated for a size that the file does not have.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
from attrs import evolve, frozen
from blake3 import blake3

from kvtrio.core.stored import RunOfContext, StoredHead, StoreError, StoreFault
from kvtrio.store.files import Files, opened

VERSION = 1
FORMAT = "kvtrio-state"
DIGEST_BYTES = 32
MAX_ENTRY_BYTES = 1 << 30
_MAX_HEADER = 1 << 20
_MAX_PARTS = 1 << 12
_GRAIN = 4096
_LENGTH_BYTES = 8
_NO_CHECKSUM = bytes(DIGEST_BYTES)


@frozen
class Header:
    """What stands in front of the parts."""

    fields: Mapping[str, str]
    """Of the entry, the checksum not among them."""
    sizes: tuple[int, ...]
    """Of the parts, in bytes."""
    checksum: bytes

    @property
    def num_bytes(self) -> int:
        """Of the parts together."""
        return sum(self.sizes)

    def encoded(self) -> bytes:
        """With its length in front, and padded, as it stands in the file."""
        metadata = {"format": FORMAT, "version": str(VERSION), **self.fields}
        tree: dict[str, object] = {"__metadata__": metadata | {"checksum": self.checksum.hex()}}
        end = 0
        for i, size in enumerate(self.sizes):
            offsets = [end, end := end + size]
            tree[f"part{i}"] = {"dtype": "U8", "shape": [size], "data_offsets": offsets}
        text = msgspec.json.encode(tree)
        text += b" " * (-(_LENGTH_BYTES + len(text) + end) % _GRAIN)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    def unsealed(self) -> bytes:
        """As it enters the checksum."""
        return evolve(self, checksum=_NO_CHECKSUM).encoded()

    def checksum_with(self, parts: Sequence[bytes]) -> bytes:
        hasher = blake3(self.unsealed())
        for part in parts:
            hasher.update(part)
        return hasher.digest()


def sealed(fields: Mapping[str, str], parts: Sequence[bytes]) -> Header:
    """The header for these parts; encoded, and followed by them, it is the file."""
    header = Header(fields, tuple(map(len, parts)), _NO_CHECKSUM)
    return evolve(header, checksum=header.checksum_with(parts))


def read_header(files: Files, fd: int) -> tuple[Header, int]:
    """The header of an open file, and the file's size, which fits to it; the checksum is not
    compared. Raises StoreError and OSError."""
    size = files.status(fd).size
    if size > MAX_ENTRY_BYTES:
        raise StoreError(StoreFault.DAMAGED)
    prefix = files.read(fd, _LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
        raise StoreError(StoreFault.TRUNCATED)
    if length > _MAX_HEADER:
        raise StoreError(StoreFault.DAMAGED)
    raw = prefix + files.read(fd, length)
    header = _parse(raw[_LENGTH_BYTES:])
    missing = len(raw) + header.num_bytes - size
    if missing:
        raise StoreError(StoreFault.TRUNCATED if missing > 0 else StoreFault.DAMAGED)
    if header.encoded() != raw:
        raise StoreError(StoreFault.DAMAGED)
    return header, size


def read_entry(files: Files, name: str) -> tuple[Header, tuple[bytes, ...]]:
    """A whole file, whose checksum fits. Raises StoreError and OSError."""
    with opened(files, name) as fd:
        header, _ = read_header(files, fd)
        parts = tuple([files.read(fd, size) for size in header.sizes])
    if header.checksum_with(parts) != header.checksum:
        raise StoreError(StoreFault.DAMAGED)
    return header, parts


def _parse(raw: bytes) -> Header:
    """Whatever is wrong beyond what is looked at here shows when the header is encoded again."""
    try:
        tree = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise StoreError(StoreFault.DAMAGED) from None
    metadata = tree.pop("__metadata__", None) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not isinstance(metadata, dict) or len(tree) > _MAX_PARTS:
        raise StoreError(StoreFault.DAMAGED)
    fields = {name: text for name, text in metadata.items() if isinstance(text, str)}
    if fields.pop("format", None) != FORMAT:
        raise StoreError(StoreFault.FOREIGN)
    _check_version(fields.pop("version", ""))
    sizes = tuple([_size(tree.get(f"part{i}")) for i in range(len(tree))])
    return Header(fields, sizes, digest_of(fields.pop("checksum", "")))


def _check_version(text: str) -> None:
    if text == str(VERSION):
        return
    is_newer = text.isascii() and text.isdigit() and len(text) < 10 and int(text) > VERSION
    raise StoreError(StoreFault.NEWER if is_newer else StoreFault.DAMAGED)


def _size(tensor: object) -> int:
    shape = tensor.get("shape") if isinstance(tensor, dict) else None
    if not isinstance(shape, list) or len(shape) != 1:
        raise StoreError(StoreFault.DAMAGED)
    (size,) = shape
    if type(size) is not int or not 0 <= size <= MAX_ENTRY_BYTES:
        raise StoreError(StoreFault.DAMAGED)
    return size


def digest_of(text: str) -> bytes:
    """32 bytes from lower-case hex. Raises StoreError."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != DIGEST_BYTES or digest.hex() != text:
        raise StoreError(StoreFault.DAMAGED)
    return digest


def fields_of(head: StoredHead) -> dict[str, str]:
    """A head as it stands in a header; its size follows from the file."""
    return {
        "key": head.key.hex(),
        "parent": head.parent.hex(),
        "start": str(head.start),
        "tokens": " ".join(map(str, head.token_ids)),
        "runs": " ".join(f"{run.offset}:{run.digest.hex()}" for run in head.runs),
        "state_offset": str(head.state_offset),
    }


def head_of(header: Header, size: int) -> StoredHead:
    """Raises StoreError."""
    fields = dict(header.fields)
    try:
        head = StoredHead(
            key=digest_of(fields["key"]),
            parent=digest_of(fields["parent"]),
            start=int(fields["start"]),
            token_ids=tuple(map(int, fields["tokens"].split())),
            runs=tuple(map(_run, fields["runs"].split())),
            state_offset=int(fields["state_offset"]),
            size=size,
        )
    except (KeyError, ValueError):
        raise StoreError(StoreFault.DAMAGED) from None
    if fields_of(head) != fields or not _is_possible(head):
        raise StoreError(StoreFault.DAMAGED)
    return head


def _run(text: str) -> RunOfContext:
    offset, _, digest = text.partition(":")
    return RunOfContext(int(offset), digest_of(digest))


def _is_possible(head: StoredHead) -> bool:
    offsets = [run.offset for run in head.runs]
    return (
        head.start >= 0
        and len(head.token_ids) > 0
        and 0 <= head.state_offset <= len(head.token_ids)
        and all(0 <= token < 1 << 32 for token in head.token_ids)
        and offsets[:1] == [0]
        and all(a < b < len(head.token_ids) for a, b in pairwise(offsets))
    )
