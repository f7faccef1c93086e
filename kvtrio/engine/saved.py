"""Conversations as they leave for files and come back: a place saved, a session restored.

Both go on while others are served: state is read and written in front of steps, a few megabytes at
a time, and the lock that steps need is held for moments.
"""

from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from kvtrio.core.contents import Held, held_in, held_of, num_resumable, require_sizes
from kvtrio.core.events import Bring, Conversation, Erase, Hold, Lost, Read
from kvtrio.core.heads import Wanted
from kvtrio.core.identity import TokenTrail
from kvtrio.core.lying import Lying, is_whole
from kvtrio.core.machine import Core
from kvtrio.core.session import Parts, SessionHead, StateName
from kvtrio.core.stored import Incoming, Stored, StoredHead, StoreFault
from kvtrio.engine.hub import Hub
from kvtrio.engine.mover import Disk, read_all


class StateGone(Exception):
    """Some of what was to be read is not there any more: save again, what is left."""


@frozen(eq=False)
class SavedPlace:
    """What a place, or memory and disk, had when it was asked. Nothing is held for the caller."""

    _held: Held
    _hub: Hub
    _disk: Disk | None

    @property
    def head(self) -> SessionHead:
        return self._held.head

    @property
    def block_names(self) -> tuple[StateName, ...]:
        """Whoever has a file of that name need not read the block."""
        return self._held.block_names

    @property
    def state_names(self) -> tuple[StateName, ...]:
        """In the order of ``head.state_positions``."""
        return self._held.state_names

    def name_of(self, name: StateName, parts: Parts) -> StateName:
        """The name of what was read under ``name``: less may have been left."""
        is_state = name.state_offset > 0
        return evolve(name, is_whole=is_state or is_whole(self._hub.config, parts))

    async def read_blocks(self, start: int, end: int) -> tuple[Parts, ...]:
        """Blocks ``start`` to ``end - 1``, one part per group. Raises ``StateGone``."""
        return await self._read(self._held.blocks[start:end])

    async def read_states(self, start: int, end: int) -> tuple[Parts, ...]:
        """Those at ``head.state_positions[start:end]``. Raises ``StateGone``."""
        return await self._read(self._held.states[start:end])

    async def _read(self, lying: tuple[Lying, ...]) -> tuple[Parts, ...]:
        wanted = tuple(each for each in lying if isinstance(each, Wanted))
        heads = tuple(each for each in lying if isinstance(each, StoredHead))
        here, there = iter(await self._from_memory(wanted)), iter(await self._from_disk(heads))
        return tuple(next(here if isinstance(each, Wanted) else there) for each in lying)

    async def _from_memory(self, wanted: tuple[Wanted, ...]) -> list[Parts]:
        if not wanted:
            return []
        answer = await self._hub.ask(lambda number: Read(number, wanted))
        found = [stored.parts for stored in answer.stored if stored is not None]
        if len(found) < len(wanted):
            raise StateGone
        return found

    async def _from_disk(self, heads: tuple[StoredHead, ...]) -> list[Parts]:
        """Beside the steps: it need not come into memory for this."""
        if not heads:
            return []
        assert self._disk is not None
        found = await self._disk.beside.run(read_all, self._disk, heads)
        lost = [
            Lost(head.key, head.state_offset, stored)
            for head, stored in zip(heads, found, strict=True)
            if isinstance(stored, StoreFault)
        ]
        if lost:
            self._hub.report(lost)
            raise StateGone
        return [stored.parts for stored in found if isinstance(stored, Stored)]


@define(eq=False)
class Restoring:
    """A session on its way into memory: ``put`` its parts in order, then ``commit``. What was put
    serves whoever has the same beginning, committed or not; the place changes by ``commit``."""

    _place: int | None
    _trail: TokenTrail
    _hub: Hub
    _num_tokens: int = 0
    _are_whole: list[bool] = field(init=False, factory=list)
    """Of each block."""
    _positions: list[int] = field(init=False, factory=list)
    """Of the states."""

    def names(self) -> tuple[list[StateName], list[StateName]]:
        """What ``SavedPlace`` calls the blocks, and the states, that were put."""
        return self._hub.look(lambda core: self._names())

    def _names(self) -> tuple[list[StateName], list[StateName]]:
        size, num_tokens = self._trail.block_size, self._num_tokens
        blocks = [
            StateName(self._trail.key_of(i, min(size, num_tokens - i * size)), 0, is_whole)
            for i, is_whole in enumerate(self._are_whole)
        ]
        places = [divmod(position - 1, size) for position in self._positions]
        states = [StateName(self._trail.key_of(i, at + 1), at + 1) for i, at in places]
        return blocks, states

    @property
    def num_known(self) -> int:
        """How many of the session's first tokens a request can find now."""
        return self._hub.look(lambda core: num_resumable(core, self._trail))

    async def put(self, blocks: Sequence[Parts], states: Sequence[tuple[int, Parts]] = ()) -> None:
        """The next blocks, and states (position, parts) within all blocks so far.

        Returns when coming steps can read them. Raises StoreError (FORMAT), with none of them put,
        where they are not of the sizes that state has here.
        """
        size, tokens = self._trail.block_size, len(self._trail.tags)
        pieces = list[Incoming]()
        for parts in blocks:
            num_here = min(size, tokens - self._num_tokens)
            pieces.append(Incoming(self._num_tokens, num_here, parts))
            self._num_tokens += num_here
            self._are_whole.append(is_whole(self._hub.config, parts))
        for position, parts in states:
            self._positions.append(position)
            start = (position - 1) // size * size
            pieces.append(Incoming(start, position - start, parts, is_state=True))
        require_sizes(self._hub.config, pieces)
        ordered = tuple(sorted(pieces, key=lambda piece: (piece.start, piece.is_state)))
        await self._hub.ask(lambda number: Bring(number, self._trail, ordered))

    async def commit(self) -> int:
        """The place, if one was named, stands for the session as soon as nobody runs there. Returns
        how many of its first tokens a request can find now."""
        place = self._place
        if place is None:
            return self.num_known

        def hold(core: Core, now: float) -> int:
            core.handle(Hold(place, self._trail), now)
            return num_resumable(core, self._trail)

        return await self._hub.when_idle(place, hold)


async def save_place(hub: Hub, disk: Disk | None, place: int, namespace: bytes) -> SavedPlace:
    """What a place holds of a namespace, as soon as nobody runs there."""
    held = await hub.when_idle(place, lambda core, now: held_in(core, place, namespace))
    return SavedPlace(held, hub, disk)


def save(hub: Hub, disk: Disk | None, conversation: Conversation) -> SavedPlace:
    """What there is of a conversation, wherever it ran."""
    trail = hub.look(lambda core: core.trail(conversation))
    held = hub.look(lambda core: held_of(core, trail))
    return SavedPlace(held, hub, disk)


async def erase_place(hub: Hub, place: int, namespace: bytes) -> int:
    """Forget what a place holds of a namespace, as soon as nobody runs there. Returns the number of
    tokens."""

    def erase(core: Core, now: float) -> int:
        num_tokens = len(held_in(core, place, namespace).head.token_ids)
        core.handle(Erase(place, namespace), now)
        return num_tokens

    return await hub.when_idle(place, erase)
