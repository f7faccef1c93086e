"""Quantised models that were made before, in the user's cache folder.

1. An entry's name says what it holds: the digest of the source's bytes, of the type asked for, and
   of the versions of what made it. It is looked up by that alone.
2. A file under its final name was complete, synced and 0600 when it got there, by rename. Its last
   tensor is a checksum over all bytes before, and is verified before anything is used: an entry
   that was cut, changed or made for other tensors counts as none, and is made anew.
3. One process makes entries at a time; whoever holds the lock may delete what others left behind.
4. Nothing here is needed: whatever the disk does, the model runs, quantised anew at each start.

An entry is a safetensors file with the bytes of each tensor as U8.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO

from attrs import frozen
from blake3 import blake3
from tqdm import tqdm

from kvtrio.model.errors import ModelFileError
from kvtrio.model.gguf_file import map_file
from kvtrio.model.quantise import QuantisedFile
from kvtrio.model.safetensors_file import SafetensorsFile, read_safetensors

FOLDER, ENDING, UNFINISHED = "quantised", ".safetensors", ".part"
CHECKSUM, CHECKSUM_BYTES = "checksum", 32
SPARE_BYTES = 64 << 20
"""Left free on the disk."""


@frozen
class Kept:
    """A quantised model, and why it is not in the cache if it is not."""

    file: QuantisedFile
    problem: str | None = None


def kept_or_made(file: QuantisedFile, digest: bytes, cache_dir: Path, version: str) -> Kept:
    """``file`` over the bytes in the cache, which are made if they are not there or not right.

    ``digest``: what the quantised model is known by; ``version``: of this program, whose rules of
    arrangement could change. Shows a bar on stderr if that is a terminal.
    """
    made_by = f" kvtrio {version}, gguf {metadata.version('gguf')}"
    name = blake3(digest + made_by.encode()).hexdigest() + ENDING
    path = cache_dir / FOLDER / name
    try:
        found = _opened(path, file)
        if found is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            found = _made(path, file)
    except OSError as error:
        return Kept(file, _reason(error))
    if found is None:
        return Kept(file, "what was written does not come back from the disk")
    return Kept(file.with_kept({name: found.raw(name) for name in file.changed}))


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk is full"
    return os.strerror(error.errno or errno.EIO)


def _opened(path: Path, file: QuantisedFile) -> SafetensorsFile | None:
    """The entry if it is right: the very tensors, and the checksum."""
    try:
        data = map_file(path)
        entry = read_safetensors(data)
    except ModelFileError:
        return None
    sizes = {name: tensor.end - tensor.start for name, tensor in entry.tensors.items()}
    if sizes != _sizes(file):
        return None
    with memoryview(data) as view, view[:-CHECKSUM_BYTES] as body:
        found = blake3(body, max_threads=blake3.AUTO).digest()
    return entry if found == entry.raw(CHECKSUM).tobytes() else None


def _sizes(file: QuantisedFile) -> dict[str, int]:
    """Of an entry's tensors in their order."""
    own = {name: file.tensors[name].num_bytes for name in file.changed}
    return {**own, CHECKSUM: CHECKSUM_BYTES}


# --- making ---


def _made(path: Path, file: QuantisedFile) -> SafetensorsFile | None:
    """Write the entry and open it. Raises OSError, and leaves nothing unfinished then."""
    with _lock(path.parent):
        for left in path.parent.glob(f"*{UNFINISHED}"):
            left.unlink(missing_ok=True)
        # Another process may have made it while we waited.
        if (found := _opened(path, file)) is not None:
            return found
        _check_space(path.parent, sum(_sizes(file).values()))
        unfinished = path.with_suffix(UNFINISHED)
        try:
            with open(unfinished, "xb", opener=_private) as out:
                _write(out, file)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        _sync_folder(path.parent)
        return _opened(path, file)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder; the system lets go of it when a process dies."""
    with open(folder / "lock", "ab", opener=_private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_space(folder: Path, num_bytes: int) -> None:
    if shutil.disk_usage(folder).free < num_bytes + SPARE_BYTES:
        raise OSError(errno.ENOSPC, "too little space")


def _private(path: str, flags: int) -> int:
    # Opening a named pipe would wait for a reader.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _write(out: IO[bytes], file: QuantisedFile) -> None:
    digest, total = blake3(), sum(_sizes(file).values())
    header = _header(file)
    digest.update(header)
    out.write(header)
    with tqdm(total=total, desc="quantising", unit="B", unit_scale=True, disable=None) as bar:
        for name in file.changed:
            for piece in file.pieces(name):
                digest.update(piece.data)
                out.write(piece.data)
                bar.update(piece.size)
    out.write(digest.digest())
    out.flush()
    os.fsync(out.fileno())


def _header(file: QuantisedFile) -> bytes:
    entries, start = {}, 0
    for name, size in _sizes(file).items():
        places = [start, start + size]
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": places}
        start += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sync_folder(folder: Path) -> None:
    """So that the new name outlives a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
