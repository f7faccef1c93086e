"""What goes to disk, and when: what leaves memory, and in idle moments all that is not there yet.

1. What leaves memory is read out in front of the step whose plan lets it go, and written behind the
   steps by somebody else. What cannot be written soon enough is given up: a miss one day.
2. At most ``MAX_QUEUED_BYTES`` are on their way to the disk, and half of what it may hold.
3. Room on disk is made before something is read out for it; removals are done before the write.
4. What is forgotten while it is being written goes as soon as that is done.
"""

from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from kvtrio.core.batch import Save
from kvtrio.core.blocks import Block, Checkpoint
from kvtrio.core.config import CoreConfig
from kvtrio.core.disk import DiskTier, Entry, Name
from kvtrio.core.heads import Wanted
from kvtrio.core.identity import KeyMaker, TokenTrail
from kvtrio.core.stored import Stored, StoredHead

MAX_QUEUED_BYTES = 64 << 20
LEAST_BYTES = 64 << 10
"""What the smallest block counts where bytes are limited for the time that they take: to decide
about one takes time, too."""
GRAIN = 4096
"""File systems give out space in pieces of so many bytes."""


@frozen
class Write:
    """Put it on disk, and report."""

    stored: Stored


@frozen
class Remove:
    """Take it off the disk."""

    key: bytes
    state_offset: int


@frozen
class Touch:
    """Note that they were used, in this order."""

    names: tuple[Name, ...]


@frozen
class Fetch:
    """Read these, and report."""

    number: int
    heads: tuple[StoredHead, ...]


Order = Write | Remove | Touch | Fetch
"""To whoever reads and writes files."""


@define(eq=False)
class Keeper:
    """block_comes / block_goes / plan / book; see the module's rules."""

    config: CoreConfig
    keys: KeyMaker
    disk: DiskTier
    is_settled: Callable[[Save], bool] = field(init=False)
    """Whether something can be read out where it lies; ``Storage`` knows."""
    orders: list[Order] = field(init=False, factory=list)
    """To be taken."""
    leaving: list[tuple[Save, Entry]] = field(init=False, factory=list)
    """To be read out in front of the step being planned."""
    num_queued_bytes: int = field(init=False, default=0)
    """Being read out or written."""
    num_given_up: int = field(init=False, default=0)
    """What was not written, for whatever reason."""
    fresh_blocks: dict[int, Block] = field(init=False, factory=dict)
    """Published, and not on disk as far as is known, or without its part; in that order."""
    fresh_states: dict[int, Checkpoint] = field(init=False, factory=dict)

    replaced: dict[Name, Entry] = field(init=False, factory=dict)
    """Files without parts that are there until what takes their place was read out: it is bigger,
    and counted instead."""
    unwanted: list[Entry] = field(init=False, factory=list)
    """Forgotten, but being written or before what is; the deepest of a sequence first."""

    # --- what the cache tells ---

    def block_comes(self, block: Block) -> None:
        """It was published, or got its part again."""
        assert block.key is not None
        self.fresh_blocks[id(block)] = block

    def state_comes(self, checkpoint: Checkpoint) -> None:
        self.fresh_states[id(checkpoint)] = checkpoint

    def forget_block(self, block: Block) -> None:
        """It leaves the index; nobody has a use for it."""
        self.fresh_blocks.pop(id(block), None)

    def forget_state(self, checkpoint: Checkpoint) -> None:
        self.fresh_states.pop(id(checkpoint), None)

    def block_goes(self, block: Block) -> None:
        """It is about to lose its place, and is still published."""
        if self.fresh_blocks.pop(id(block), None) is not None:
            self._keep(Wanted(block, len(block.tags), key=block.key))

    def state_goes(self, checkpoint: Checkpoint) -> None:
        if self.fresh_states.pop(id(checkpoint), None) is not None:
            self._keep(Wanted(checkpoint.block, checkpoint.offset, checkpoint))

    def forget(self, trail: TokenTrail, num_kept: int) -> None:
        """Lose what is on disk of a sequence behind its first tokens, as far as no other one goes
        on from there."""
        entries = self.disk.along(trail)
        self.unwanted += [each for each in reversed(entries) if each.head.end > num_kept]
        self._lose_unwanted()

    def is_whole(self, entry: Entry) -> bool:
        """Whether a block on disk has its part: a file without is smaller."""
        config = self.config
        sizes = (config.groups[i].part_bytes(config.block_size) for i in config.kept_groups)
        return entry.size >= sum(sizes)

    # --- idle moments ---

    @property
    def is_done(self) -> bool:
        """All that is in memory is on disk, or was given up, and nothing is to be ordered."""
        is_fresh = bool(self.fresh_blocks or self.fresh_states)
        return not (is_fresh or self.num_queued_bytes or self.orders)

    @property
    def has_fresh(self) -> bool:
        """There is something to save, and room for it on the way to the disk: half of that is for
        what leaves memory."""
        is_fresh = bool(self.fresh_blocks or self.fresh_states)
        return is_fresh and self.num_queued_bytes < self._max_queued_bytes // 2

    @property
    def _max_queued_bytes(self) -> int:
        """What is being written cannot make room for others."""
        return min(MAX_QUEUED_BYTES, self.disk.limit // 2)

    def save_fresh(self, num_bytes: int) -> None:
        """Have what came first read out, about so many bytes."""
        num_left = num_bytes
        while self.has_fresh and num_left > 0:
            before = self.num_queued_bytes
            if self.fresh_blocks:
                self.block_goes(next(iter(self.fresh_blocks.values())))
            else:
                self.state_goes(next(iter(self.fresh_states.values())))
            num_left -= max(self.num_queued_bytes - before, LEAST_BYTES)

    # --- reading out and writing ---

    def take_leaving(self) -> list[tuple[Save, Entry]]:
        leaving, self.leaving = self.leaving, []
        return leaving

    def take_orders(self) -> list[Order]:
        orders, self.orders = self.orders, []
        return orders

    def write(self, stored: Stored) -> None:
        """It was read out."""
        name = (stored.head.key, stored.head.state_offset)
        if self.replaced.pop(name, None) is not None:
            self.orders.append(Remove(*name))
        self.orders.append(Write(stored))

    def give_up(self, entry: Entry) -> None:
        """It was not read out, or not written."""
        assert not entry.is_there
        self.num_queued_bytes -= entry.size
        self.num_given_up += 1
        self.disk.drop(entry)
        if (known := self.replaced.pop(entry.name, None)) is not None:
            self.disk.add(known.head, known.size, is_there=True)
        self._lose_unwanted()

    def written(self, name: Name, size: int | None) -> None:
        """A write ended; None: it failed."""
        entry = self.disk.entries[name]
        assert not entry.is_there
        if size is None:
            self.give_up(entry)
            return
        self.num_queued_bytes -= entry.size
        self.disk.note_written(entry, size)
        self._lose_unwanted()

    def lose(self, entry: Entry) -> None:
        """Take it off the disk."""
        self.disk.drop(entry)
        self.orders.append(Remove(*entry.name))

    def _lose_unwanted(self) -> None:
        left = list[Entry]()
        for entry in self.unwanted:
            if entry.is_there and entry.used and not self.disk.has_others_behind(entry):
                self.lose(entry)
            elif entry.used and (left or not entry.is_there):
                left.append(entry)
        self.unwanted = left

    def _keep(self, wanted: Wanted) -> None:
        head = wanted.head(self.keys)
        known = self.disk.entries.get((head.key, head.state_offset))
        if known is not None:
            self.disk.use([known])
            self.unwanted = [each for each in self.unwanted if each is not known]
            if not self._is_completed(known, wanted):
                return
        save = wanted.save(head, self.config)
        size = self._file_bytes(head)
        is_possible = (
            self.is_settled(save) and self.num_queued_bytes + size <= self._max_queued_bytes
        )
        if not is_possible or not self._make_room(head, size):
            self.num_given_up += 1
            return
        if known is not None and known.used:
            self.disk.drop(known)
            self.replaced[known.name] = known
        self.num_queued_bytes += size
        entry = self.disk.add(head, size, is_there=False)
        self.leaving.append((save, entry))

    def _is_completed(self, known: Entry, wanted: Wanted) -> bool:
        """Whether a block was written without its part, which somebody may go on from now."""
        part = wanted.block.part if wanted.checkpoint is None else None
        return part is not None and part.is_wanted and known.is_there and not self.is_whole(known)

    def _make_room(self, head: StoredHead, size: int) -> bool:
        if not head.state_offset and (shorter := self.disk.shorter(head)) is not None:
            self.lose(shorter)
        while not self.disk.has_room(size):
            victim = self.disk.lowest(head.parent)
            if victim is None or size > self.disk.limit:
                return False
            self.lose(victim)
        return True

    def _file_bytes(self, head: StoredHead) -> int:
        """At most so many: parts, and a header that says all of the head."""
        config = self.config
        groups: Sequence[int] = config.point_groups if head.state_offset else config.kept_groups
        parts = [config.groups[group].part_bytes(config.block_size) for group in groups]
        header = 1024 + 12 * len(head.token_ids) + 160 * len(head.runs) + 160 * len(parts)
        return -(-(sum(parts) + header) // GRAIN) * GRAIN
