"""A backend without a model: it remembers what was written where, and answers by hash.

Each token place of each group, and each slot of recurrent layers, keeps the token, its position and
a digest of the whole history up to it. After the writes of a step, every place that a chunk may
read must hold exactly what this history put there; so a wrong block table, a missing copy, an
overwritten block or a skipped position is an error at the step that reads it. Tokens are chosen
from the digest *read back*, so a wrong history that is consistent in itself gives another answer
than the right one.

The digest of position p is that of p - 1 plus mix(token, p), modulo 2^64: a sum, so that numpy can
do a chunk at once; order counts, since the position is inside.
"""

import struct
from collections.abc import Callable
from typing import Self
from zlib import crc32

import numpy as np
from attrs import define, evolve, frozen

from kvtrio.backends.base import BackendInfo, BackendSettings
from kvtrio.backends.groups import (
    core_groups,
    device_parts,
    device_slots,
    host_sizes,
    layer_groups,
    pool_bytes,
    ram_budget,
)
from kvtrio.backends.moves import run_moves
from kvtrio.backends.sim_hash import mixed, scrambled
from kvtrio.backends.sim_pools import (
    BYTES_PER_PLACE,
    BYTES_PER_SLOT,
    AnyPool,
    BlockPool,
    SimMismatch,
    SlotPool,
)
from kvtrio.core.batch import Batch, Chunk, Copy, Sampled, SampleRow, StepResult
from kvtrio.core.config import Group
from kvtrio.core.identity import AdapterUse
from kvtrio.core.sampling import MASK
from kvtrio.core.types import BlockId, RequestId, StateClass, Tier
from kvtrio.model.model_file import ModelFile
from kvtrio.model.spec import ModelSpec

BYTES_PER_VALUE = 2
"""Of the model's KV cache, where its size in RAM is asked for."""
MAX_TRACKS = 1024
"""Requests whose progress is remembered; far more than run at once. Forgetting one only skips the
check that its chunks join up."""


@frozen
class Moment:
    """What a token is chosen from."""

    request_id: RequestId
    index: int
    """Tokens chosen for this request before."""
    num_tokens: int
    digest: int
    """Of all ``num_tokens`` tokens so far, as read back from the blocks."""
    row: SampleRow


TokenFunction = Callable[[Moment], int | None]
"""None stands for logits that are not finite; a MemoryError for rows that do not fit."""


@frozen
class HashTokens:
    """Deterministic tokens below ``vocab_size``, by history and, unless greedy, by seed."""

    vocab_size: int
    avoid: frozenset[int] = frozenset()
    """Never chosen; nor is what the request bans by a bias of minus infinity."""

    def __call__(self, moment: Moment) -> int:
        params = moment.row.params
        banned = {token for token, bias in params.logit_bias if bias == -np.inf} | self.avoid
        number = scrambled(moment.digest ^ (params.seed & MASK if params.temperature > 0 else 0))
        tried = 0
        while number % self.vocab_size in banned and tried < self.vocab_size:
            number, tried = number + 1, tried + 1
        return number % self.vocab_size


@frozen(kw_only=True)
class StepCost:
    """Seconds that a step takes: affine in tokens and in chunks."""

    base_s: float = 0.005
    per_token_s: float = 0.0002
    per_row_s: float = 0.0005

    def __call__(self, batch: Batch) -> float:
        return (
            self.base_s + self.per_token_s * batch.num_tokens + self.per_row_s * len(batch.chunks)
        )


class SimBackend:
    """Implements ``Backend``; see the module. ``step`` raises ``SimMismatch``."""

    def __init__(self, info: BackendInfo, token_function: TokenFunction) -> None:
        self.info = info
        self._token_function = token_function
        self._arenas = _make_arenas(info)
        self._pools = self._arenas[Tier.DEVICE]
        self._tracks: dict[RequestId, _Track] = {}
        self._num_adapters = 0

    @classmethod
    def load(cls, file: ModelFile, spec: ModelSpec, settings: BackendSettings) -> Self:
        """A stand-in for the model of ``file``: its groups and vocabulary, none of its weights."""
        # As many as the model itself would have: a token's state is kilobytes there, not 24 bytes.
        real_groups = core_groups(layer_groups(spec), BYTES_PER_VALUE, settings.max_context)
        groups = tuple(map(_sim_group, real_groups))
        host = host_sizes(real_groups, settings, ram_budget(real_groups, settings))
        info = BackendInfo(
            name="sim",
            groups=groups,
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            num_host_blocks=host.num_blocks,
            num_window_blocks=device_parts(real_groups, settings),
            num_host_window_blocks=host.num_parts,
            num_state_slots=device_slots(real_groups, settings),
            num_host_state_slots=host.num_slots,
            ram=host.ram,
            is_unified=settings.is_unified is not False,
            vocab_size=spec.vocab_size,
            max_context=settings.max_context,
            pool_bytes=0,
            weight_bytes=0,
        )
        return cls(evolve(info, pool_bytes=pool_bytes(info)), HashTokens(spec.vocab_size))

    def step(self, batch: Batch) -> StepResult:
        saved = run_moves(self, batch)
        for copy in batch.copies:
            self.copy(copy)
        # All writes before all checks: one chunk's write into another's blocks must show.
        digests = [self._write(chunk) for chunk in batch.chunks]
        for chunk, digest in zip(batch.chunks, digests, strict=True):
            self._verify(chunk, digest)
        sampled, unplaced = list[Sampled | None](), list[RequestId]()
        for chunk in batch.chunks:
            try:
                sampled.append(self._sample(chunk))
            except MemoryError:
                sampled.append(None)
                unplaced.append(chunk.request_id)
        return StepResult(tuple(sampled), saved, tuple(unplaced))

    def copy(self, copy: Copy) -> None:
        """See ``moves.Places``."""
        source = self._arenas[copy.source_tier][copy.group]
        self._arenas[copy.target_tier][copy.group].copy(copy, source)

    def read(self, group: int, place: BlockId, tier: Tier, num_tokens: int) -> bytes:
        """See ``moves.Places``."""
        return self._arenas[tier][group].read(place, num_tokens)

    def write(self, group: int, place: BlockId, tier: Tier, part: bytes) -> None:
        """See ``moves.Places``."""
        self._arenas[tier][group].fill(place, part)

    def give_back(self, group: int, place: BlockId, tier: Tier) -> None:
        """See ``moves.Places``."""
        self._arenas[tier][group].give_back(place)

    def load_adapter(self, data: object) -> int:
        """Adapters have no weights here: only their digests count, and those come with chunks."""
        self._num_adapters += 1
        return self._num_adapters

    def unload_adapter(self, adapter_id: int) -> None:
        pass

    def close(self) -> None:
        self._tracks.clear()

    def _write(self, chunk: Chunk) -> int:
        before = self._digest_before(chunk)
        # State computed under other adapters is other state.
        tokens = np.array(chunk.token_ids, np.int64) + (_salt(chunk.adapters) << 32)
        positions = np.arange(chunk.start, chunk.end)
        digests = np.cumsum(mixed(tokens, positions), dtype=np.uint64) + np.uint64(before)
        for pool, table in zip(self._pools, chunk.block_tables, strict=True):
            pool.write(table, tokens, positions, digests)
        return int(digests[-1])

    def _digest_before(self, chunk: Chunk) -> int:
        """The history's digest as the groups hold it, which must be this request's."""
        if chunk.start == 0:
            return 0
        found = {
            pool.digest_at(table, chunk.start - 1)
            for pool, table in zip(self._pools, chunk.block_tables, strict=True)
        }
        track = self._tracks.get(chunk.request_id)
        if track is not None and track.num_tokens == chunk.start:
            found.add(track.digest)
        if len(found) != 1:
            raise SimMismatch(f"request {chunk.request_id}: another history before {chunk.start}")
        return found.pop()

    def _verify(self, chunk: Chunk, digest: int) -> None:
        for group, (pool, table) in enumerate(zip(self._pools, chunk.block_tables, strict=True)):
            where = f"request {chunk.request_id}, group {group}"
            pool.verify(where, table, chunk)
            if pool.digest_at(table, chunk.end - 1) != digest:
                raise SimMismatch(f"{where}: overwritten in the same step")

    def _sample(self, chunk: Chunk) -> Sampled | None:
        digest = self._pools[0].digest_at(chunk.block_tables[0], chunk.end - 1)
        track = self._track(chunk.request_id)
        track.num_tokens, track.digest = chunk.end, digest
        if chunk.sample is None:
            return None
        token_id = self._token_function(
            Moment(chunk.request_id, track.num_sampled, chunk.end, digest, chunk.sample)
        )
        track.num_sampled += 1
        if token_id is None:
            return None
        return _reported(token_id, chunk.sample.params.num_logprobs, self.info.vocab_size)

    def _track(self, request_id: RequestId) -> "_Track":
        """The request's track, moved to the end of the dict: the first one is forgotten."""
        track = self._tracks.pop(request_id, None) or _Track()
        self._tracks[request_id] = track
        if len(self._tracks) > MAX_TRACKS:
            del self._tracks[next(iter(self._tracks))]
        return track


@define(eq=False)
class _Track:
    """How far a request has come, from what its chunks said."""

    num_tokens: int = 0
    digest: int = 0
    num_sampled: int = 0


def _sim_group(group: Group) -> Group:
    """With the sizes of what is kept here."""
    is_point = group.state_class is StateClass.POINT
    sizes = (0, BYTES_PER_SLOT) if is_point else (BYTES_PER_PLACE, 0)
    return Group(group.state_class, group.window, *sizes)


def _make_arenas(info: BackendInfo) -> dict[Tier, tuple[AnyPool, ...]]:
    def pools(tiers: tuple[int, ...]) -> tuple[AnyPool, ...]:
        """With the places that a group has in these, 0 for the device and 1 for RAM."""
        counts = [sum(info.places(i)[tier] for tier in tiers) for i in range(len(info.groups))]
        return tuple(
            SlotPool(count)
            if group.state_class is StateClass.POINT
            else BlockPool(group, count, info.block_size)
            for group, count in zip(info.groups, counts, strict=True)
        )

    if info.is_unified:
        return dict.fromkeys(Tier, pools((0, 1)))
    return {Tier.DEVICE: pools((0,)), Tier.HOST: pools((1,))}


def _salt(adapters: tuple[AdapterUse, ...]) -> int:
    """30 bits that tell adapter sets apart; 0 for none."""
    parts = b"".join(use.digest + struct.pack("<d", use.scale) for use in adapters)
    return crc32(parts) & 0x3FFFFFFF


def _reported(token_id: int, num_logprobs: int | None, vocab_size: int) -> Sampled:
    """Made-up but well-formed log-probabilities: the chosen token's is the best."""
    if num_logprobs is None:
        return Sampled(token_id)
    ranks = range(min(num_logprobs, vocab_size))
    top = tuple(((token_id + rank) % vocab_size, -0.5 - rank) for rank in ranks)
    return Sampled(token_id, -0.5, top)
