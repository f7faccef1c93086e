"""A memory that knows what was written where, to catch every wrong reuse."""

import struct

from attrs import define, field

from kvtrio.backends.moves import run_moves
from kvtrio.core.batch import Batch, Copy
from kvtrio.core.config import CoreConfig
from kvtrio.core.types import BlockId, Tier

Trace = tuple[object, ...]


@define
class Memory:
    """Each place of each block holds a digest of all it was computed from: the whole history. So
    does each slot of a group of recurrent layers."""

    block_size: int
    is_unified: bool
    point_groups: tuple[int, ...] = ()
    windows: dict[int, int] = field(factory=dict)
    """By group that has one: positions that a query sees, its own included."""
    places: dict[tuple[Tier, int, int, int], int] = field(factory=dict)
    """(tier, group, block, place): digest."""

    @classmethod
    def of(cls, config: CoreConfig) -> "Memory":
        windows = {group: config.groups[group].window or 0 for group in config.window_groups}
        return cls(config.block_size, config.is_unified, config.point_groups, windows)

    def run(
        self, batch: Batch, histories: dict[int, list[object]]
    ) -> tuple[tuple[bytes, ...], ...]:
        """Perform the moves and the step of ``batch``; returns what it was to read.

        ``histories``: per request, what each of its positions is computed from, in order.
        """
        saved = run_moves(self, batch)
        for copy in batch.copies:
            self.copy(copy)
        written: set[tuple[Tier, int, int, int]] = set()
        for chunk in batch.chunks:
            digests = _digests(histories[chunk.request_id][: chunk.end])
            for group, table in enumerate(chunk.block_tables):
                if group in self.point_groups:
                    at = self._at(Tier.DEVICE, group, *table, 0)
                    if chunk.start:
                        assert self.places[at] == digests[chunk.start - 1], "another state"
                    assert at not in written, "two chunks write one slot"
                    written.add(at)
                    self.places[at] = digests[-1]
                    continue
                window = self.windows.get(group, chunk.end)
                seen = max(0, chunk.start - window + 1)
                for position, digest in list(enumerate(digests))[seen:]:
                    block, place = divmod(position, self.block_size)
                    at = self._at(Tier.DEVICE, group, table[block], place)
                    if position < chunk.start:
                        assert self.places[at] == digest, "state of another history was reused"
                    else:
                        assert at not in written, "two chunks write one place"
                        written.add(at)
                        self.places[at] = digest

        return saved

    def copy(self, copy: Copy) -> None:
        for place in range(1 if copy.group in self.point_groups else copy.num_tokens):
            source = self._at(copy.source_tier, copy.group, copy.source, place)
            target = self._at(copy.target_tier, copy.group, copy.target, place)
            self.places[target] = self.places[source]

    def read(self, group: int, place: BlockId, tier: Tier, num_tokens: int) -> bytes:
        """Eight bytes per token; a state has as many as in the tests' sizes."""
        if group in self.point_groups:
            digest = self.places[self._at(tier, group, place, 0)]
            return struct.pack("<q56x", digest)
        digests = [self.places[self._at(tier, group, place, i)] for i in range(num_tokens)]
        digests += [0] * (self.block_size - num_tokens)
        return struct.pack(f"<{self.block_size}q", *digests)

    def write(self, group: int, place: BlockId, tier: Tier, part: bytes) -> None:
        if group in self.point_groups:
            digests = struct.unpack("<q56x", part)
        else:
            digests = struct.unpack(f"<{self.block_size}q", part)
        for i, digest in enumerate(digests):
            self.places[self._at(tier, group, place, i)] = digest

    def give_back(self, group: int, place: BlockId, tier: Tier) -> None:
        """Whoever reads it after this reads nothing that was written."""
        at = (Tier.DEVICE if self.is_unified else tier, group, place)
        for known in [each for each in self.places if each[:3] == at]:
            del self.places[known]

    def _at(self, tier: Tier, group: int, block: int, place: int) -> tuple[Tier, int, int, int]:
        return Tier.DEVICE if self.is_unified else tier, group, block, place


def _digests(history: list[object]) -> list[int]:
    digests, digest = [], 0
    for item in history:
        digest = hash((digest, item))
        digests.append(digest)
    return digests
