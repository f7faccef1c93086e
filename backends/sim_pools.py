"""Memory of the simulated backend: what was written where, instead of K, V and states."""

import struct

import numpy as np
from attrs import define, field

from kvtrio.backends.sim_hash import Digests, Numbers, mixed
from kvtrio.core.batch import Chunk, Copy
from kvtrio.core.config import Group
from kvtrio.core.types import BlockId

BYTES_PER_PLACE = 24
BYTES_PER_SLOT = 16

Table = tuple[BlockId, ...]


class SimMismatch(RuntimeError):
    """A chunk would read what its history did not write: a bug in core or policy."""


@define(eq=False)
class BlockPool:
    """One group's token places, ``block_size`` per block."""

    group: Group
    num_blocks: int
    block_size: int
    tokens: Numbers = field(init=False)
    positions: Numbers = field(init=False)
    digests: Digests = field(init=False)

    def __attrs_post_init__(self) -> None:
        num_places = self.num_blocks * self.block_size
        self.tokens = np.zeros(num_places, np.int64)
        self.positions = np.full(num_places, -1, np.int64)
        self.digests = np.zeros(num_places, np.uint64)

    def places(self, table: Table, start: int, end: int) -> Numbers:
        """Indices of the places that hold positions start .. end - 1."""
        first, last = start // self.block_size, -(-end // self.block_size)
        blocks = np.array(table[first:last], np.int64)
        if len(table) < last or (blocks < 0).any() or (blocks >= self.num_blocks).any():
            raise SimMismatch(f"block table does not cover positions {start} to {end - 1}")
        places = blocks[:, None] * self.block_size + np.arange(self.block_size)
        return places.ravel()[start - first * self.block_size :][: end - start]

    def digest_at(self, table: Table, position: int) -> int:
        return int(self.digests[self.places(table, position, position + 1)[0]])

    def write(self, table: Table, tokens: Numbers, positions: Numbers, digests: Digests) -> None:
        """What a chunk at ``positions`` leaves."""
        places = self.places(table, int(positions[0]), int(positions[-1]) + 1)
        self.tokens[places] = tokens
        self.positions[places] = positions
        self.digests[places] = digests

    def copy(self, copy: Copy, other: "AnyPool") -> None:
        """Take places over from ``other``, which may be this pool."""
        assert isinstance(other, BlockPool)
        source, target = copy.source * self.block_size, copy.target * self.block_size
        pairs = ((getattr(self, n), getattr(other, n)) for n in ("tokens", "positions", "digests"))
        for mine, theirs in pairs:
            mine[target : target + copy.num_tokens] = theirs[source : source + copy.num_tokens]

    def read(self, block: BlockId, num_tokens: int) -> bytes:
        """The first tokens' places of a block, and nothing in the others."""
        first, end = block * self.block_size, block * self.block_size + num_tokens
        rest = self.block_size - num_tokens
        parts = (
            np.pad(self.tokens[first:end], (0, rest)),
            np.pad(self.positions[first:end], (0, rest), constant_values=-1),
            np.pad(self.digests[first:end], (0, rest)),
        )
        return b"".join(part.tobytes() for part in parts)

    def fill(self, block: BlockId, part: bytes) -> None:
        """With what ``read`` gave."""
        numbers = np.frombuffer(part, np.int64).reshape(3, self.block_size)
        places = slice(block * self.block_size, (block + 1) * self.block_size)
        self.tokens[places], self.positions[places] = numbers[0], numbers[1]
        self.digests[places] = numbers[2].view(np.uint64)

    def give_back(self, block: BlockId) -> None:
        """Whoever reads it finds no history."""
        self.positions[block * self.block_size : (block + 1) * self.block_size] = -1
        self.digests[block * self.block_size : (block + 1) * self.block_size] = 0

    def verify(self, where: str, table: Table, chunk: Chunk) -> None:
        """Each place that the chunk's queries see must continue the one before it."""
        window = self.group.window
        first = 0 if window is None else max(0, chunk.start - window + 1)
        places = self.places(table, first, chunk.end)
        positions = np.arange(first, chunk.end)
        added = mixed(self.tokens[places], positions)
        digests = self.digests[places]
        before = np.concatenate((digests[:1] - added[:1] if first else added[:1] * 0, digests[:-1]))
        is_wrong = (self.positions[places] != positions) | (digests - before != added)
        if is_wrong.any():
            raise SimMismatch(f"{where}: position {first + int(is_wrong.argmax())} is not there")


@define(eq=False)
class SlotPool:
    """The slots of one group of recurrent layers: the state behind one position each."""

    num_slots: int
    positions: Numbers = field(init=False)
    """Of the last token."""
    digests: Digests = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.positions = np.full(self.num_slots, -1, np.int64)
        self.digests = np.zeros(self.num_slots, np.uint64)

    def digest_at(self, table: Table, position: int) -> int:
        """Raises SimMismatch where the state is that of another position."""
        slot = self._slot(table)
        if self.positions[slot] != position:
            raise SimMismatch(f"the state is that behind position {self.positions[slot]}")
        return int(self.digests[slot])

    def write(self, table: Table, tokens: Numbers, positions: Numbers, digests: Digests) -> None:
        slot = self._slot(table)
        self.positions[slot], self.digests[slot] = positions[-1], digests[-1]

    def copy(self, copy: Copy, other: "AnyPool") -> None:
        """Take a state over from ``other``, which may be this pool."""
        assert isinstance(other, SlotPool)
        self.positions[copy.target] = other.positions[copy.source]
        self.digests[copy.target] = other.digests[copy.source]

    def read(self, slot: BlockId, num_tokens: int) -> bytes:
        """A whole state."""
        return struct.pack("<qQ", self.positions[slot], self.digests[slot])

    def fill(self, slot: BlockId, part: bytes) -> None:
        """With what ``read`` gave."""
        self.positions[slot], self.digests[slot] = struct.unpack("<qQ", part)

    def give_back(self, slot: BlockId) -> None:
        """Whoever reads it finds no state."""
        self.positions[slot], self.digests[slot] = -1, 0

    def verify(self, where: str, table: Table, chunk: Chunk) -> None:
        """What the chunk left is there, and nothing else."""
        if self.positions[self._slot(table)] != chunk.end - 1:
            raise SimMismatch(f"{where}: overwritten in the same step")

    def _slot(self, table: Table) -> int:
        if len(table) != 1 or not 0 <= table[0] < self.num_slots:
            raise SimMismatch("a request has one slot")
        return table[0]


AnyPool = BlockPool | SlotPool
