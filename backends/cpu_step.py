"""A batch as the flat arrays of a native step.

The arrays are made once and used again. What a decoding request changes from step to step is one
token and, now and then, one block: its converted block tables are kept, and grow at their end.
"""

import ctypes
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from kvtrio.backends.cpu_model import Limits
from kvtrio.backends.cpu_native import address_of
from kvtrio.backends.cpu_sampling import MAX_CANDIDATES, Candidates, RowPlan
from kvtrio.core.batch import Batch, Chunk, Copy
from kvtrio.core.identity import AdapterUse, effective
from kvtrio.core.types import BlockId, RequestId, Tier
from kvtrio.kernels import cpu_abi as abi

MAX_TABLES = 4096
"""Converted block tables that are kept; when there are more, all are converted again."""

Ids = NDArray[np.int32]
Tables = tuple[tuple[BlockId, ...], ...]


@define(eq=False)
class Rows:
    """Structures of one kind in a row, which grows; the step points at its start."""

    _step: abi.Step
    _name: str
    _kind: Any
    items: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._make(16)

    def reserve(self, count: int) -> Any:
        """At least ``count`` items; what was in them is lost when they move."""
        if count > len(self.items):
            self._make(2 * count)
        return self.items

    def _make(self, count: int) -> None:
        self.items = (self._kind * count)()
        setattr(self._step, self._name, ctypes.addressof(self.items))


@define(eq=False)
class Answers:
    """Where the native side writes what it found, for M sampled rows."""

    # ctypes arrays: with cold caches a look at a few numbers takes numpy ten times as long.
    best: Any
    best_logits: Any
    log_sums: Any
    is_finite: Any
    top_ids: Any
    """Flat: M times the stride."""
    top_logits: Any

    @classmethod
    def make(cls, num_rows: int) -> "Answers":
        return cls(
            best=(ctypes.c_int32 * num_rows)(),
            best_logits=(ctypes.c_float * num_rows)(),
            log_sums=(ctypes.c_double * num_rows)(),
            is_finite=(ctypes.c_int32 * num_rows)(),
            top_ids=(ctypes.c_int32 * (num_rows * MAX_CANDIDATES))(),
            top_logits=(ctypes.c_float * (num_rows * MAX_CANDIDATES))(),
        )

    def candidates(self, step: abi.Step, logits: NDArray[np.float32]) -> Candidates:
        """The last step's. ``logits`` [max_sampled, V]: where it left them."""
        values, ids, stride = self.best_logits, self.best, 1
        if step.top_stride:
            values, ids, stride = self.top_logits, self.top_ids, step.top_stride
        end = step.num_sampled * stride
        starts, values, ids = range(0, end, stride), values[:end], ids[:end]
        return Candidates(
            values=[values[start : start + stride] for start in starts],
            ids=[ids[start : start + stride] for start in starts],
            log_sums=self.log_sums,
            logits=logits,
        )


@frozen(eq=False)
class _Table:
    """A request's blocks in one group, as they came and converted."""

    blocks: tuple[BlockId, ...]
    ids: Ids


@define(eq=False)
class StepWriter:
    """Writes batches into one ``kvt_step``, over and over."""

    _host_offsets: tuple[int, ...]
    """Per group, where the blocks or slots in RAM start in an arena; 0: their ids say so."""
    limits: Limits
    step: abi.Step = field(init=False, factory=abi.Step)
    answers: Answers = field(init=False)
    reached: int = field(init=False, default=0)
    """Blocks up to the last one that a step had so far."""
    _token_ids: Ids = field(init=False)
    _blocks: Ids = field(init=False)
    _chunks: Rows = field(init=False)
    _tables: Rows = field(init=False)
    _copies: Rows = field(init=False)
    _uses: Rows = field(init=False)
    _segments: Rows = field(init=False)
    _samples: Rows = field(init=False)
    _known: dict[tuple[RequestId, int], _Table] = field(init=False, factory=dict)
    _last_tables: list[Tables] = field(init=False, factory=list)
    """Of each chunk, as the last step had them: while no request gets a block they are the same
    objects, and all is written already."""

    def __attrs_post_init__(self) -> None:
        self._token_ids = np.zeros(self.limits.max_rows, np.int32)
        self.step.token_ids = address_of(self._token_ids)
        self._make_blocks(1024)
        self.answers = Answers.make(self.limits.max_sampled)
        for name in ("best", "best_logits", "log_sums", "is_finite", "top_ids", "top_logits"):
            setattr(self.step, name, ctypes.addressof(getattr(self.answers, name)))
        self._chunks = Rows(self.step, "chunks", abi.Chunk)
        self._tables = Rows(self.step, "tables", ctypes.c_int64)
        self._copies = Rows(self.step, "copies", abi.Copy)
        self._uses = Rows(self.step, "uses", abi.Use)
        self._segments = Rows(self.step, "segments", abi.Segment)
        self._samples = Rows(self.step, "samples", abi.Sample)

    def write(
        self, batch: Batch, plans: Sequence[RowPlan], adapters: Mapping[int, int]
    ) -> abi.Step:
        """The step; it holds until the next one is written.

        ``adapters``: addresses by handle. Raises KeyError for a handle that is not loaded,
        ValueError for more rows than a step may have.
        """
        self._write_chunks(batch.chunks)
        self._write_tables(batch.chunks)
        self._write_copies(batch.copies)
        self._write_uses(batch.chunks, adapters)
        self._write_samples(plans)
        return self.step

    def _write_chunks(self, chunks: Sequence[Chunk]) -> None:
        items = self._chunks.reserve(len(chunks))
        row = num_sampled = 0
        for item, chunk in zip(items, chunks, strict=False):
            tokens = chunk.token_ids
            count = len(tokens)
            if row + count > len(self._token_ids):
                raise ValueError("the batch has more tokens than a step may have")
            if count == 1:
                self._token_ids[row] = tokens[0]
            else:
                self._token_ids[row : row + count] = tokens
            row += count
            item.start = chunk.start
            item.num_rows = count
            item.is_sampled = is_sampled = chunk.sample is not None
            num_sampled += is_sampled
        if num_sampled > self.limits.max_sampled:
            raise ValueError("the batch samples more requests than a step may")
        self.step.num_chunks = len(chunks)
        self.step.num_rows = row
        self.step.num_sampled = num_sampled

    def _write_tables(self, chunks: Sequence[Chunk]) -> None:
        tables, last = [chunk.block_tables for chunk in chunks], self._last_tables
        if len(tables) == len(last) and all(map(is_, tables, last)):
            return
        found = [
            self._table((chunk.request_id, group), chunk.block_tables[group])
            for group in range(len(self._host_offsets))
            for chunk in chunks
        ]
        borders = self._tables.reserve(len(found) + 1)
        total = 0
        for i, ids in enumerate(found):
            borders[i] = total
            total += len(ids)
        borders[len(found)] = total
        if total > len(self._blocks):
            self._make_blocks(2 * total)
        if found:
            np.concatenate(found, out=self._blocks[:total])
        self.step.num_blocks = total
        self._last_tables = tables

    def _table(self, key: tuple[RequestId, int], blocks: tuple[BlockId, ...]) -> Ids:
        known = self._known.get(key)
        if known is not None:
            if known.blocks == blocks:
                return known.ids
            count = len(known.blocks)
            if blocks[:count] == known.blocks:
                self.reached = max(self.reached, 1 + max(blocks[count:], default=-1))
                ids = np.concatenate((known.ids, np.array(blocks[count:], np.int32)))
                self._known[key] = _Table(blocks, ids)
                return ids
        elif len(self._known) >= MAX_TABLES:
            self._known.clear()
        self.reached = max(self.reached, 1 + max(blocks, default=-1))
        ids = np.array(blocks, np.int32)
        self._known[key] = _Table(blocks, ids)
        return ids

    def _make_blocks(self, count: int) -> None:
        self._blocks = np.zeros(count, np.int32)
        self.step.blocks = address_of(self._blocks)

    def _write_copies(self, copies: Sequence[Copy]) -> None:
        items = self._copies.reserve(len(copies))
        for item, copy in zip(items, copies, strict=False):
            item.group = copy.group
            item.source = self.place(copy.group, copy.source, copy.source_tier)
            item.target = self.place(copy.group, copy.target, copy.target_tier)
            item.num_tokens = copy.num_tokens
        self.step.num_copies = len(copies)

    def place(self, group: int, block: BlockId, tier: Tier) -> int:
        """Where a block, or a slot, of a tier is in the arena."""
        return block if tier is Tier.DEVICE else self._host_offsets[group] + block

    def _write_uses(self, chunks: Sequence[Chunk], adapters: Mapping[int, int]) -> None:
        self.step.num_uses = self.step.num_segments = 0
        if not any(chunk.adapters for chunk in chunks):
            return
        runs = _runs(chunks)
        uses = self._uses.reserve(len(runs))
        segments = self._segments.reserve(sum(map(len, runs.values())))
        first = 0
        for item, (use, own) in zip(uses, runs.items(), strict=False):
            item.adapter = adapters[use.adapter_id]
            item.scale = use.scale
            item.first_segment, item.num_segments = first, len(own)
            for segment, (start, count) in zip(segments[first:], own, strict=False):
                segment.first_chunk, segment.num_chunks = start, count
            first += len(own)
        self.step.num_uses, self.step.num_segments = len(runs), first

    def _write_samples(self, plans: Sequence[RowPlan]) -> None:
        items = self._samples.reserve(len(plans))
        stride = max((plan.num_candidates for plan in plans), default=0)
        for item, plan in zip(items, plans, strict=False):
            # One candidate is the best token, which is found anyway.
            item.num_top = plan.num_candidates if stride > 1 else 0
            item.wants = abi.WANT_LOG_SUM if plan.needs_log_sum else 0
        self.step.top_stride = stride if stride > 1 else 0


def _runs(chunks: Sequence[Chunk]) -> dict[AdapterUse, list[tuple[int, int]]]:
    """Chunks of each use as (first, count), in the canonical order of uses."""
    uses = effective(dict.fromkeys(use for chunk in chunks for use in chunk.adapters))
    places: dict[AdapterUse, list[tuple[int, int]]] = {use: [] for use in uses}
    for i, chunk in enumerate(chunks):
        for use in effective(chunk.adapters):
            own = places[use]
            if own and sum(own[-1]) == i:
                own[-1] = (own[-1][0], own[-1][1] + 1)
            else:
                own.append((i, 1))
    return places
