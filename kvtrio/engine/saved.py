"""Conversations as they leave memory and come back: a place saved, a session restored.

Both go on while others are served: state is read and written in front of steps, a few megabytes at
a time, and the lock that steps need is held for moments.
"""

from collections.abc import Sequence

from attrs import define, frozen

from kvtrio.core.contents import Held, held_in, held_of, num_resumable, require_sizes
from kvtrio.core.events import Bring, Conversation, Erase, Hold, Read
from kvtrio.core.heads import Wanted
from kvtrio.core.identity import TokenTrail
from kvtrio.core.machine import Core
from kvtrio.core.session import Parts, SessionHead
from kvtrio.core.stored import Incoming
from kvtrio.engine.hub import Hub


class StateGone(Exception):
    """Some of what was to be read has left memory since: save again, what is left."""


@frozen(eq=False)
class SavedPlace:
    """What a place or memory held when it was asked. Nothing of it is held for the caller."""

    head: SessionHead
    _held: Held
    _hub: Hub

    async def read_blocks(self, start: int, end: int) -> tuple[Parts, ...]:
        """Blocks ``start`` to ``end - 1``, one part per group. Raises ``StateGone``."""
        return await self._read(self._held.blocks[start:end])

    async def read_states(self, start: int, end: int) -> tuple[Parts, ...]:
        """Those at ``head.state_positions[start:end]``. Raises ``StateGone``."""
        return await self._read(self._held.states[start:end])

    async def _read(self, wanted: tuple[Wanted, ...]) -> tuple[Parts, ...]:
        answer = await self._hub.ask(lambda number: Read(number, wanted))
        found = tuple(stored.parts for stored in answer.stored if stored is not None)
        if len(found) < len(wanted):
            raise StateGone
        return found


@define(eq=False)
class Restoring:
    """A session on its way into memory: ``put`` its parts in order, then ``commit``. What was put
    serves whoever has the same beginning, committed or not; the place changes by ``commit``."""

    _place: int | None
    _trail: TokenTrail
    _hub: Hub
    _num_tokens: int = 0

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
        for position, parts in states:
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


async def save_place(hub: Hub, place: int, namespace: bytes) -> SavedPlace:
    """What a place holds of a namespace, as soon as nobody runs there."""
    held = await hub.when_idle(place, lambda core, now: held_in(core, place, namespace))
    return SavedPlace(held.head, held, hub)


def save(hub: Hub, conversation: Conversation) -> SavedPlace:
    """What memory has of a conversation, wherever it ran."""
    trail = hub.look(lambda core: core.trail(conversation))
    held = hub.look(lambda core: held_of(core, trail))
    return SavedPlace(held.head, held, hub)


async def erase_place(hub: Hub, place: int, namespace: bytes) -> int:
    """Forget what a place holds of a namespace, as soon as nobody runs there. Returns the number of
    tokens."""

    def erase(core: Core, now: float) -> int:
        num_tokens = len(held_in(core, place, namespace).head.token_ids)
        core.handle(Erase(place, namespace), now)
        return num_tokens

    return await hub.when_idle(place, erase)
