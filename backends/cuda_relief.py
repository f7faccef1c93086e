"""A step that does not fit into memory is done in parts; what fits not even alone is named.

1. Chunks of one step do not read what another of them writes, so each may be computed alone, and a
   chunk in two parts one after the other.
2. K and V that a failed attempt wrote are written again, with the same values. States of recurrent
   layers are changed in place, so attempts that may fail keep what they will change. A first
   attempt keeps nothing where all chunks are single rows: that would double what such a step
   moves, and it has the smallest values. If one fails all the same, the rows whose state it may
   have spoilt end.
3. The allocator gives back what it keeps unused before each further attempt, which takes long. So
   steps of a size that failed are done in parts at once, for a while.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

import torch
from attrs import define, evolve, field, frozen

from kvtrio.core.batch import Batch, Chunk, Sampled
from kvtrio.core.types import RequestId

REMEMBERED_STEPS = 256
Choices = tuple[Sampled | None, ...]
"""One per chunk."""
Kept = Callable[[], None]
"""Puts states back as they were."""


class Memory(Protocol):
    """What an attempt needs of the devices."""

    def relieve(self) -> None:
        """Give back what allocators keep unused."""
        ...

    @property
    def has_states(self) -> bool:
        """Whether steps change any in place."""
        ...

    def keep(self, chunks: Sequence[Chunk]) -> Kept:
        """States that these chunks will change. Raises torch.OutOfMemoryError."""
        ...


@frozen
class Computed:
    """The answer of a step."""

    sampled: Choices
    unplaced: tuple[RequestId, ...] = ()
    """There was no memory for their chunks, not even alone."""


@define(eq=False)
class Fitter:
    """Computes batches, in parts where they do not fit whole."""

    _compute: Callable[[Batch], Choices]
    """Raises torch.OutOfMemoryError."""
    _memory: Memory
    _least_failed: float = field(init=False, default=inf)
    """Tokens of the smallest step that lately did not fit; ``inf``: there is none."""
    _num_steps: int = field(init=False, default=0)
    """Since then."""

    def run(self, batch: Batch) -> Computed:
        self._forget_in_time()
        spoilt = frozenset[RequestId]()
        if self._is_worth_trying(batch):
            is_guarded = self._memory.has_states and any(len(c.token_ids) > 1 for c in batch.chunks)
            done = self._attempt(batch, is_guarded)
            if done is not None:
                return Computed(done)
            if self._memory.has_states and not is_guarded:
                spoilt = frozenset(chunk.request_id for chunk in batch.chunks if chunk.start)
        found: dict[RequestId, Sampled | None] = {}
        left = tuple(chunk for chunk in batch.chunks if chunk.request_id not in spoilt)
        before = self._least_failed
        if not self._place(evolve(batch, chunks=left), found):
            self._least_failed = before  # not the size failed, but a request
        sampled = tuple(found.get(chunk.request_id) for chunk in batch.chunks)
        ids = (chunk.request_id for chunk in batch.chunks)
        return Computed(sampled, tuple(each for each in ids if each not in found))

    def _place(self, batch: Batch, found: dict[RequestId, Sampled | None]) -> bool:
        """Note in ``found`` what was sampled of each chunk that fits; whether all did."""
        chunks = batch.chunks
        if not chunks:
            return True
        if self._is_worth_trying(batch):
            done = self._attempt(batch, self._memory.has_states)
            if done is not None:
                found.update(zip((chunk.request_id for chunk in chunks), done, strict=True))
                return True
            self._least_failed, self._num_steps = min(self._least_failed, batch.num_tokens), 0
        if len(chunks) > 1:
            first, second = _halves(chunks)
            placed = self._place(evolve(batch, chunks=first), found)
            return self._place(evolve(batch, chunks=second), found) and placed
        if len(chunks[0].token_ids) == 1:
            return False
        return all(
            self._place(evolve(batch, chunks=(part,)), found) for part in _parts(chunks[0])
        ) or _without(chunks[0], found)

    def _is_worth_trying(self, batch: Batch) -> bool:
        return batch.num_tokens < self._least_failed or batch.num_tokens == 1

    def _forget_in_time(self) -> None:
        self._num_steps += 1
        if self._num_steps > REMEMBERED_STEPS:
            self._least_failed = inf

    def _attempt(self, batch: Batch, is_guarded: bool) -> Choices | None:
        """None: it does not fit, and is as if it had not begun, if it is guarded."""
        put_back: Kept | None = None
        try:
            put_back = self._memory.keep(batch.chunks) if is_guarded else None
            return self._compute(batch)
        except torch.OutOfMemoryError:
            pass  # left at once: its traceback holds the attempt's values
        self._memory.relieve()
        if put_back is not None:
            put_back()
        return None


def _halves(chunks: tuple[Chunk, ...]) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """In order, with as equal numbers of tokens as whole chunks allow."""
    half = sum(len(chunk.token_ids) for chunk in chunks) / 2
    at, num_tokens = 1, len(chunks[0].token_ids)
    while at < len(chunks) - 1 and num_tokens + len(chunks[at].token_ids) <= half:
        num_tokens += len(chunks[at].token_ids)
        at += 1
    return chunks[:at], chunks[at:]


def _parts(chunk: Chunk) -> tuple[Chunk, Chunk]:
    """One behind the other; only the second samples."""
    middle = len(chunk.token_ids) // 2
    return (
        evolve(chunk, token_ids=chunk.token_ids[:middle], sample=None),
        evolve(chunk, start=chunk.start + middle, token_ids=chunk.token_ids[middle:]),
    )


def _without(chunk: Chunk, found: dict[RequestId, Sampled | None]) -> bool:
    """Its first part may have been placed."""
    found.pop(chunk.request_id, None)
    return False
