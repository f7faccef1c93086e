"""What a batch moves before it computes: state read out, state written in, copies before those."""

from typing import Protocol

from kvtrio.core.batch import NOWHERE, Batch, Copy, GiveBack
from kvtrio.core.types import BlockId, Tier


class Places(Protocol):
    """A backend's memory, a block or a slot of one group at a time."""

    def copy(self, copy: Copy) -> None: ...

    def read(self, group: int, place: BlockId, tier: Tier, num_tokens: int) -> bytes:
        """All bytes of a place, of ``Group.part_bytes``. Of a block only the first ``num_tokens``
        tokens are read, and what is behind them is zero: it may be somebody else's."""
        ...

    def write(self, group: int, place: BlockId, tier: Tier, part: bytes) -> None:
        """Fill a place with what ``read`` gave."""
        ...

    def give_back(self, group: int, place: BlockId, tier: Tier) -> None:
        """Forget what a place holds: it takes no memory until it is written again."""
        ...


def run_moves(memory: Places, batch: Batch) -> tuple[tuple[bytes, ...], ...]:
    """Do all of ``batch`` that comes before its ``copies``; returns what was read."""
    if not (batch.saves or batch.loads):
        return ()
    saved = tuple(
        tuple(
            memory.read(group, place, save.tier_of(group), len(save.head.token_ids))
            if place != NOWHERE
            else b""
            for group, place in save.places
        )
        for save in batch.saves
    )
    for move in batch.loads:
        if isinstance(move, Copy):
            memory.copy(move)
            continue
        if isinstance(move, GiveBack):
            memory.give_back(move.group, move.place, move.tier)
            continue
        for (group, place), part in zip(move.places, move.parts, strict=True):
            memory.write(group, place, move.tier, part)
    return saved
