"""State outside memory: what a file of the disk tier holds, and what can be wrong with one.

A block's K and V and the state of recurrent layers at a position are separate entries with the same
key, so that either can be there without the other.
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
    """An entry without its bytes: all that the index needs to find it again."""

    key: bytes
    """32 bytes: the block's key."""
    parent: bytes
    """Key of the block before, or the root key."""
    start: int
    token_ids: tuple[int, ...]
    runs: tuple[RunOfContext, ...]
    state_offset: int = 0
    """0: K and V of the block; else the state of recurrent layers behind so many of its tokens:
    all of ``token_ids``, for a block grows and its states stay what they are."""
    size: int = 0
    """Bytes of its file."""

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.token_ids)


@frozen
class Stored:
    """An entry with its bytes."""

    head: StoredHead
    parts: tuple[bytes, ...]
    """Raw bytes of the block, or slot, as the backend gave them: one part per group with K and V,
    or of recurrent layers. An empty one where a group had nothing any more."""


@frozen
class Incoming:
    """A block, or a state of recurrent layers, on its way into a sequence; verified."""

    start: int
    """Of the block in the sequence."""
    num_tokens: int
    """So many of the block's, or those that the state is behind."""
    parts: tuple[bytes, ...]
    is_state: bool = False
    is_kept: bool = False
    """The disk tier has it."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class StoreFault(Enum):
    """What is wrong with a stored file, or keeps one from being stored."""

    NOT_FOUND = "not_found"
    NAME = "name"
    """Not one path component that can name a session."""
    TAKEN = "taken"
    """Another owner's session has this name."""
    NOT_REGULAR = "not_regular"
    """A link, a folder, a pipe."""
    TRUNCATED = "truncated"
    DAMAGED = "damaged"
    """Its checksum or its form is wrong."""
    NEWER = "newer"
    """Of a format version that this program does not know."""
    FOREIGN = "foreign"
    """Not written by this program."""
    TEMPORARY = "temporary"
    """Left behind by a process that died while it wrote."""
    LIMIT = "limit"
    """It does not fit into the store's size limit."""
    NO_SPACE = "no_space"
    """The disk is full, or a quota is."""
    IO = "io"
    """The system could not read or write."""
    LOCKED = "locked"
    """Another process uses the store."""
    MODEL = "model"
    """State of another model."""
    FORMAT = "format"
    """State of this model in another KV format or arithmetic."""
    ADAPTERS = "adapters"
    """State of adapters that are not loaded."""


class StoreError(Exception):
    """The only error of ``kvtrio.store``. Its text is the fault's name and nothing else."""

    def __init__(self, fault: StoreFault) -> None:
        super().__init__(fault.value)
        self.fault = fault
