"""One step's decision and its answer: plain data that backends read and never change."""

from attrs import frozen

from kvtrio.core.identity import AdapterUse
from kvtrio.core.messages import message
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.stored import StoredHead
from kvtrio.core.types import BlockId, RequestId, Tier


@message
class SampleRow:
    """Choose a token after a chunk's last position."""

    params: SamplingParams
    draw: float
    """Uniform number in [0, 1) that decides this token."""
    recent: tuple[int, ...]
    """Tokens under penalty, oldest first; empty when the request has no penalties."""


@message
class Chunk:
    """One request's share of a step: ``token_ids`` at positions ``start``, ``start + 1``, ..."""

    request_id: RequestId
    start: int
    token_ids: tuple[int, ...]
    block_tables: tuple[tuple[BlockId, ...], ...]
    """Per group of layers, the blocks that hold positions 0 .. start + len(token_ids) - 1; of
    recurrent layers the one slot that holds the request's running state."""
    sample: SampleRow | None = None
    adapters: tuple[AdapterUse, ...] = ()
    """Under which all its tokens are computed; their deltas are added in this order."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@frozen
class Copy:
    """Copy the first ``num_tokens`` places of one block to another, before the step runs.

    In a group of recurrent layers a whole state instead, from slot to slot.
    Copies run in order: a later one may read what an earlier one wrote. The two tiers differ only
    where device and host are separate memories.
    """

    group: int
    source: BlockId
    target: BlockId
    num_tokens: int
    source_tier: Tier = Tier.DEVICE
    target_tier: Tier = Tier.DEVICE


NOWHERE = BlockId(-1)
"""No place."""


@frozen
class Save:
    """Read a block or a slot, as it was before the batch."""

    head: StoredHead
    """What it is: of a block, only the places of its tokens matter."""
    places: tuple[tuple[int, BlockId], ...]
    """(group, place); of a block ``NOWHERE`` for groups with a sliding window that lost theirs."""
    tier: Tier = Tier.DEVICE
    elsewhere: tuple[int, ...] = ()
    """Groups whose places lie in the other memory."""

    def tier_of(self, group: int) -> Tier:
        if group not in self.elsewhere:
            return self.tier
        return Tier.HOST if self.tier is Tier.DEVICE else Tier.DEVICE


@frozen
class Load:
    """Write a block or a slot with what was once read from one of the same group."""

    places: tuple[tuple[int, BlockId], ...]
    """(group, place)."""
    parts: tuple[bytes, ...]
    """One per place."""
    tier: Tier = Tier.DEVICE


@frozen
class GiveBack:
    """Nobody needs what lies in a place any more: its memory is another's now. Until it is written
    again it takes none."""

    group: int
    place: BlockId
    tier: Tier = Tier.DEVICE


Move = Load | Copy | GiveBack


@message
class Batch:
    """What one step computes. Chunks of decode (one token) and prefill (many) mix freely; without
    any it only moves state. Saves come first, then ``loads`` in order, then ``copies``."""

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...] = ()
    saves: tuple[Save, ...] = ()
    loads: tuple[Move, ...] = ()
    """And places given back, with the copies that have to come before one of them."""
    predicted_s: float = 0.0
    """What the cost model expects, with its margin."""
    limit_s: float = 0.0
    """What the step may take; exceeded only where one block of progress did not fit."""

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@message
class Sampled:
    """A chosen token; log-probabilities only where the request asked for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), best first."""


@message
class StepResult:
    """Answer to a ``Batch``: one entry per chunk, None where nothing was sampled.

    Where the chunk asks for a token and there is none, its logits were not finite: its request has
    no next token, and ends."""

    sampled: tuple[Sampled | None, ...]
    saved: tuple[tuple[bytes, ...], ...] = ()
    """One entry per save: one part per place."""
    unplaced: tuple[RequestId, ...] = ()
    """For the rows of these there was no memory, not even alone: nothing counts of their chunks,
    and they end. What blocks and slots of theirs hold from the chunk on is unknown."""
