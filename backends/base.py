"""The one interface between the engine and a model: synchronous, thread-agnostic, no trio."""

from typing import Protocol

from attrs import frozen

from kvtrio.core.batch import Batch, StepResult
from kvtrio.core.config import Group


@frozen(kw_only=True)
class BackendInfo:
    """Facts that the core and the API need; fixed after loading."""

    name: str
    groups: tuple[Group, ...]
    block_size: int
    num_blocks: int
    """Per group."""
    vocab_size: int
    max_context: int
    """Longest request, in tokens."""
    pool_bytes: int
    weight_bytes: int


class Backend(Protocol):
    """Owns weights and KV memory. All calls come from one thread."""

    @property
    def info(self) -> BackendInfo: ...

    def step(self, batch: Batch) -> StepResult:
        """Write K and V of every token of ``batch`` and sample where asked.

        Blocks named by a chunk are written at its positions and read at lower ones. An exception
        is a bug or a dead device: the engine ends the process.
        """
        ...

    def close(self) -> None: ...
