"""State as it is kept outside the server's memory: blocks and states, with all they depend on.

1. A key is made of everything that the state depends on (see ``identity``); ``parent`` and the
   tokens with their contexts are kept beside it, and compared on every hit.
2. The state behind the first tokens of a block is a thing of its own, whose key is that of these
   tokens: the block may grow, and is then another.
"""

from enum import Enum

from attrs import frozen


@frozen
class RunOfContext:
    """Under what the tokens from ``offset`` (within the block) on were computed."""

    offset: int
    digest: bytes
    """``Identity.digest``, 32 bytes: namespace, and adapters by content and scale."""


@frozen
class StoredHead:
    """What a stored block or state is, without its bytes."""

    key: bytes
    """32 bytes."""
    parent: bytes
    """Key of the block before, or the root key."""
    start: int
    """Position of the first token."""
    token_ids: tuple[int, ...]
    runs: tuple[RunOfContext, ...]
    """Ascending, the first at offset 0."""
    state_offset: int = 0
    """0: K and V of the tokens. Else the state of recurrent layers behind them: so many they are.
    Both may be there under one key."""
    size: int = 0
    """Bytes of its file; 0 while it has none."""

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.token_ids)


@frozen
class Stored:
    """A block or a state."""

    head: StoredHead
    parts: tuple[bytes, ...]
    """Raw bytes as the backend gave them, one per group with K and V (or, of a state, per group of
    recurrent layers); an empty one where a group had nothing any more."""


class DiscardReason(Enum):
    """Why something stored is of no use, or could not be written."""

    MISSING = "missing"
    DAMAGED = "damaged"
    """Its checksum, its form or its size is wrong."""
    FOREIGN = "foreign"
    """Of another format, or not a file of ours."""
    UNREADABLE = "unreadable"
    """The system reports an error."""
    FULL = "full"
    """No room on the disk, or under the limit."""


class StoreError(Exception):
    """Reading or writing failed; ``reason`` says why."""

    def __init__(self, reason: DiscardReason) -> None:
        super().__init__(reason.value)
        self.reason = reason
