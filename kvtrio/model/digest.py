"""Digests of file contents: what a file is, whatever it is called."""

from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from kvtrio.model.errors import ModelFileError


def content_digest(paths: Iterable[Path]) -> bytes:
    """BLAKE3 over the files' digests in order, 32 bytes; reads every byte once.

    Raises ``ModelFileError`` if a file cannot be read.
    """
    whole = blake3()
    for path in paths:
        try:
            one = blake3(max_threads=blake3.AUTO).update_mmap(path)
        except OSError:
            raise ModelFileError("the model file cannot be read") from None
        whole.update(one.digest())
    return whole.digest()
