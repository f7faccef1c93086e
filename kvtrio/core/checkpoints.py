"""Which states of recurrent layers are kept as checkpoints.

1. Running requests have their slots first; what is left, and RAM, is for checkpoints.
2. A checkpoint goes where it costs least to compute what only it saves, on a clock that rises with
   each loss, as for blocks (see ``eviction``): from the one before it on its path to its position.
3. One with another behind it is where an old turn ended. It counts an eighth: next turns resume
   from the last one.
"""

from heapq import heapify, heappop, heappush, heapreplace

from attrs import define, field

from kvtrio.core.blocks import Block, Checkpoint, Slot
from kvtrio.core.eviction import FAR_TOKENS, LAST, USUAL, Candidates
from kvtrio.core.index import Match
from kvtrio.core.keeping import Keeper
from kvtrio.core.room import Offer, Room
from kvtrio.core.slots import Slots
from kvtrio.core.types import Tier

PASSED_SHARE = 1 / 8
LEAST_TOKENS = 64
"""What the last one on a path counts at least."""

Entry = tuple[float, int, Checkpoint]
"""(value, entry's number, checkpoint): alive while the checkpoint has that number."""


@define(eq=False)
class Checkpoints(Slots):
    """take / restore / keep / hand_over / move / drop; see the module's rules."""

    blocks: dict[Tier, Candidates]
    """Blocks behind which no checkpoint is left are worth nothing."""
    keeper: Keeper | None = None
    """None: there is no disk tier."""
    heaps: dict[Tier, list[Entry]] = field(init=False)
    room: Room = field(init=False)
    """In RAM; its clock is that of the device's, too."""
    item_bytes: int = field(init=False, default=1)
    _scale: float = field(init=False, default=1.0)
    """What a token's cost is worth on that clock."""
    _num_entries: int = field(init=False, default=0)
    _wanted: Checkpoint | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.heaps = {tier: [] for tier in Tier}
        if self.ram is None:
            self.room = Room(self.limits[Tier.HOST])
        else:
            budget, self.room = self.ram.budget, self.ram.room
            self.item_bytes = budget.state_bytes
            self._scale = budget.block_bytes / budget.state_bytes / self.config.block_size
        self.room.enter(self)

    # --- what requests do ---

    def take(self, now: float, wanted: Checkpoint | None = None) -> Slot:
        """A running request's, on the device; what it resumes from is the last to go for it."""
        self._wanted = wanted
        self._make_room(now)
        self._wanted = None
        return self._new(Tier.DEVICE)

    def restore(self, checkpoint: Checkpoint, slot: Slot) -> None:
        """Before the next step, copy the checkpoint's state into a running request's slot."""
        # It may have lost its room to this very slot: then the state is there already.
        source = checkpoint.slot
        is_one_memory = self.config.is_unified or source.tier is slot.tier
        if source.places != slot.places or not is_one_memory:
            self._plan(source, slot)
        if checkpoint.entry:
            self._enter(checkpoint)

    def keep(self, block: Block, offset: int, running: Slot, now: float) -> Checkpoint | None:
        """Copy a running state before the next step, to keep it behind the first ``offset`` tokens
        of a published block; None where that is there already, or there is no room."""
        if any(known.offset == offset for known in block.checkpoints):
            return None
        slot = self.spare(now)
        if slot is None:
            return None
        self._plan(running, slot)
        return self.hand_over(block, offset, slot)

    def hand_over(self, block: Block, offset: int, slot: Slot) -> Checkpoint | None:
        """The slot becomes a checkpoint, unless there is one at that place."""
        if any(known.offset == offset for known in block.checkpoints):
            self.free(slot)
            return None
        checkpoint = Checkpoint(slot, block, offset)
        both = (*block.checkpoints, checkpoint)
        block.checkpoints = tuple(sorted(both, key=lambda each: each.offset))
        _count(block)
        if self.keeper is not None:
            self.keeper.state_comes(checkpoint)
        self._enter(checkpoint)
        if earlier := _before(checkpoint):
            self._push(earlier)
        return checkpoint

    # --- what the cache does ---

    def move(self, source: Block, target: Block) -> None:
        """``target``, new, begins with all of its sibling ``source``."""
        for checkpoint in source.checkpoints:
            checkpoint.block = target
        target.checkpoints, source.checkpoints = source.checkpoints, ()
        target.num_states, source.num_states = source.num_states, 0

    def drop_all(self, block: Block, now: float) -> None:
        """The block goes, and has no children."""
        for checkpoint in block.checkpoints:
            self.drop(checkpoint, now)

    def drop(self, checkpoint: Checkpoint, now: float) -> None:
        if self.keeper is not None:
            self.keeper.forget_state(checkpoint)
        checkpoint.entry = 0
        block: Block | None = checkpoint.block
        assert block is not None
        block.checkpoints = tuple(each for each in block.checkpoints if each is not checkpoint)
        self.free(checkpoint.slot)
        while block is not None:
            block.num_states -= 1
            if not block.num_states:
                self.blocks[block.tier].devalue(block, now)
            block = block.parent

    # --- room ---

    def _make_room(self, now: float) -> None:
        """For one slot on the device."""
        while self.num_used[Tier.DEVICE] >= self.limits[Tier.DEVICE]:
            victim = self._lowest(Tier.DEVICE, now)
            assert victim is not None, "the device has a slot for every place"
            self._demote(victim, now)

    def spare(self, now: float) -> Slot | None:
        """Room for a checkpoint: on the device if not all slots there are running."""
        if self.num_used[Tier.DEVICE] < self.limits[Tier.DEVICE]:
            return self._new(Tier.DEVICE)
        victim = self._lowest(Tier.DEVICE, now)
        if victim is not None:
            self._demote(victim, now)
            return self._new(Tier.DEVICE)
        return self._new(Tier.HOST) if self.room.make(self, 0.0, now, is_must=True) else None

    def _demote(self, victim: Checkpoint, now: float) -> None:
        """Off the device: to RAM, unless it is worth less than all there."""
        value = self.value(victim)
        has_room = self.room.make(self, value, now)
        if not victim.entry:
            return  # it went with its block, for which there was no room
        if has_room:
            self._transfer(victim.slot, Tier.HOST)
            self._push(victim)
        else:
            self.room.rise(value)
            self.lose(victim, now)

    def num_in_ram(self, num_more: int = 0) -> int:
        """See ``room.Kind``."""
        return self.num_used[Tier.HOST] + num_more

    def offer(self, now: float) -> Offer | None:
        """See ``room.Kind``."""
        lowest = self._lowest(Tier.HOST, now)
        if lowest is None:
            return None
        rank = LAST if lowest.block.pinned_until_s > now else USUAL
        return Offer(rank, self.value(lowest), lowest)

    def lose(self, item: Checkpoint, now: float) -> None:
        """It goes, unless the disk takes it."""
        if self.keeper is not None:
            self.keeper.state_goes(item)
        self.drop(item, now)

    # --- order ---

    def value(self, checkpoint: Checkpoint) -> float:
        """The clock at its last use, and what it costs to compute again what it saves."""
        earlier = _before(checkpoint)
        start = earlier.position if earlier else 0
        num_tokens = checkpoint.position - start
        num_here = checkpoint.block.checkpoints.index(checkpoint) + 1
        if checkpoint.block.num_states == num_here:
            cost = float(max(num_tokens, LEAST_TOKENS))
        else:
            cost = num_tokens * PASSED_SHARE
        return checkpoint.level + cost * (1 + start / FAR_TOKENS) * self._scale

    def _enter(self, checkpoint: Checkpoint) -> None:
        """It was used, now."""
        checkpoint.level = self.room.level
        self._push(checkpoint)

    def _push(self, checkpoint: Checkpoint) -> None:
        heap, self._num_entries = self.heaps[checkpoint.slot.tier], self._num_entries + 1
        checkpoint.entry = self._num_entries
        heappush(heap, (self.value(checkpoint), checkpoint.entry, checkpoint))
        if len(heap) > 2 * self.limits[checkpoint.slot.tier] + 16:
            heap[:] = [entry for entry in heap if entry[2].entry == entry[1]]
            heapify(heap)

    def _lowest(self, tier: Tier, now: float) -> Checkpoint | None:
        """The one to lose next: a pinned one only if there is no other. The one that is to be
        copied from may give its room to the copy, on the device, and to nobody else."""
        heap, pinned = self.heaps[tier], list[Entry]()
        found: Checkpoint | None = None
        while heap and found is None:
            value, number, checkpoint = heap[0]
            if checkpoint.entry != number:
                heappop(heap)
            elif (current := self.value(checkpoint)) > value:
                # The one before it went, so that more depends on it than when it was entered.
                heapreplace(heap, (current, number, checkpoint))
            elif checkpoint is self._wanted or checkpoint.block.pinned_until_s > now:
                pinned.append(heappop(heap))
            else:
                found = checkpoint
        for entry in pinned:
            heappush(heap, entry)
        rest = [entry[2] for entry in pinned if entry[2] is not self._wanted]
        if not rest and pinned and tier is Tier.DEVICE:
            return found or self._wanted
        return found or next(iter(rest), None)


def resumable(match: Match, done: int) -> Match:
    """A match of tokens, cut where recurrent layers can resume: at the last checkpoint on its path,
    if one lies beyond ``done`` tokens; else nothing of it."""
    blocks, found = match.blocks, None
    if match.partial is not None:
        found = _last(match.partial, match.num_partial)
    num_whole = len(blocks)
    while found is None and num_whole and blocks[num_whole - 1].end > done:
        num_whole -= 1
        found = _last(blocks[num_whole], len(blocks[num_whole].tags))
    if found is None:
        return Match((), None, 0, 0, whole=match)
    if found.offset == len(found.block.tags) and num_whole < len(blocks):
        return Match(blocks[: num_whole + 1], None, 0, found.position, found, match)
    return Match(blocks[:num_whole], found.block, found.offset, found.position, found, match)


def _last(block: Block, limit: int) -> Checkpoint | None:
    for checkpoint in reversed(block.checkpoints):
        if checkpoint.offset <= limit:
            return checkpoint
    return None


def _before(checkpoint: Checkpoint) -> Checkpoint | None:
    """The one before it on its path."""
    block: Block | None = checkpoint.block
    earlier = _last(checkpoint.block, checkpoint.offset - 1)
    while earlier is None and block is not None and block.parent is not None:
        block = block.parent
        earlier = _last(block, len(block.tags))
    return earlier


def _count(block: Block) -> None:
    """One more there."""
    each: Block | None = block
    while each is not None:
        each.num_states += 1
        each = each.parent
