"""Conversations to files and back, while others are served.

1. Files are touched beside the event loop, and by one task at a time.
2. State is read and written in front of steps, a few megabytes at a time: nobody's answer pauses
   for longer than that takes.
3. A session is read after it was verified whole. Where anything fails, the place is as before.
4. Of what was saved or restored here the file is remembered: it is neither read out of memory nor
   hashed nor written again, as long as that file is as it was.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from typing import TypeVar

import trio
from attrs import define, evolve, field, frozen

from kvtrio.core.events import Conversation
from kvtrio.core.identity import AdapterUse, Segment
from kvtrio.core.session import Parts, Piece, ServerIdentity, SessionHead, SessionInfo, StateName
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.engine import Engine
from kvtrio.engine.offload import Offload
from kvtrio.engine.saved import Restoring, SavedPlace, StateGone
from kvtrio.obs.events import SessionChange
from kvtrio.obs.identity import Sealer
from kvtrio.obs.schema import Digest
from kvtrio.obs.words import SessionEvent
from kvtrio.serve.adapters import Adapters
from kvtrio.serve.job import Owner
from kvtrio.serve.outline import num_shared
from kvtrio.serve.session_files import SessionFiles, SessionReader, SessionWriter

AT_ONCE_BYTES = 8 << 20
"""Of state, between memory and files; about what one step moves. Twice as much is in memory for it,
and in a process that has just begun new memory takes longer than what is put there."""
AT_ONCE = 1024
"""Blocks; those of a model without attention have no bytes."""
MAX_REMEMBERED = 1 << 16
"""Files: conversations of a million tokens together, in some 30 MB."""

T = TypeVar("T")


class NothingThere(Exception):
    """There is no state to save."""


@frozen(eq=False)
class _Kind:
    """Blocks, or states, on their way from memory to files."""

    names: tuple[StateName, ...]
    read: Callable[[int, int], Awaitable[tuple[Parts, ...]]]
    add: Callable[[Parts], Piece]
    reuse: Callable[[Piece], bool]


@define
class _Note:
    """Of what is to be logged."""

    info: SessionInfo | None = None
    fault: StoreFault | None = None


@frozen(eq=False, kw_only=True)
class Sessions:
    """All methods raise ``StoreError``, and ``EngineStopped`` after the engine's end."""

    engine: Engine
    files: SessionFiles
    identity: ServerIdentity
    adapters: Adapters
    """Those that are loaded."""
    beside: Offload
    """One thread, for files."""
    emit: Callable[[SessionChange], None]
    sealer: Sealer
    _turn: trio.Lock = field(factory=trio.Lock, init=False)
    _files_of: dict[StateName, Piece] = field(factory=dict, init=False)
    """The first one has been known for longest."""

    async def save_place(self, name: str, place: int, owner: Owner) -> SessionInfo:
        """What the place holds, as soon as nobody runs there. Raises ``NothingThere``."""
        with self._noted(SessionEvent.SAVED, name, owner) as note:
            while note.info is None:
                saved = await self.engine.save_place(place, owner.namespace)
                # Where some of it has gone meanwhile, what is left is a beginning: save that.
                with suppress(StateGone):
                    note.info = await self._save(name, saved, owner)
            return note.info

    async def save(self, name: str, conversation: Conversation, owner: Owner) -> SessionInfo:
        """What memory has of a conversation. Raises ``NothingThere``."""
        with self._noted(SessionEvent.SAVED, name, owner) as note:
            while note.info is None:
                saved = self.engine.save(conversation)
                with suppress(StateGone):
                    note.info = await self._save(name, saved, owner)
            return note.info

    async def restore_place(self, name: str, place: int, owner: Owner) -> tuple[int, SessionInfo]:
        """Into memory, for a place as soon as nobody runs there: what is asked of the place before
        is done before, and what was brought need not be kept meanwhile. Returns how many tokens can
        be found there now."""
        with self._noted(SessionEvent.RESTORED, name, owner) as note:
            await self.engine.wait_for_place(place)
            restoring, info = await self._restore(name, place, owner)
            num_tokens = await restoring.commit()
            note.info = info
            return num_tokens, info

    async def recall(self, name: str, prompt: tuple[int, ...], owner: Owner, few: int) -> int:
        """Bring a session into memory, if there is one and memory has ``few`` tokens less of it
        than the prompt could use. Returns how many of its tokens can be found then; 0: it was not
        read."""
        async with self._turn:
            if not await self.beside.run(self.files.exists, name, owner.tag):
                return 0
            async with self._open(self.files.reading(name, owner.tag)) as reader:
                head = reader.head
        num_known = self.engine.restore(None, _conversation(head, owner)).num_known
        if num_known + few >= num_shared(head.token_ids, prompt):
            return 0
        with self._noted(SessionEvent.RESTORED, name, owner) as note:
            restoring, note.info = await self._restore(name, None, owner)
            return await restoring.commit()

    # --- one at a time ---

    async def _save(self, name: str, saved: SavedPlace, owner: Owner) -> SessionInfo:
        head = saved.head
        if not head.token_ids:
            raise NothingThere
        opened = self.files.saving(name, head, self.identity, owner.tag)
        async with self._turn, self._open(opened) as writer:
            await self._write(saved, writer)
            return await self.beside.run(writer.commit)

    async def _write(self, saved: SavedPlace, writer: SessionWriter) -> None:
        blocks = _Kind(saved.block_names, saved.read_blocks, writer.add_block, writer.reuse_block)
        states = _Kind(saved.state_names, saved.read_states, writer.add_state, writer.reuse_state)
        for kind in (blocks, states):
            start, number = 0, 1
            while start < len(kind.names):
                coming = kind.names[start : start + AT_ONCE]
                known = [self._file_of(name) for name in coming]
                num_reused = await self.beside.run(_reuse, kind.reuse, known)
                start += num_reused
                if num_reused == len(coming):
                    continue
                num_new = _num_unknown(known[num_reused:])
                parts = await kind.read(start, start + min(number, num_new))
                pieces = await self.beside.run(_add, kind.add, parts)
                names = kind.names[start : start + len(parts)]
                self._remember(map(saved.name_of, names, parts), pieces)
                start, number = start + len(parts), _at_once(parts)

    def _file_of(self, name: StateName) -> Piece | None:
        """One that has all of it, if there is one; else one that has what is left."""
        found = self._files_of.get(evolve(name, is_whole=True))
        return found if found or name.is_whole else self._files_of.get(name)

    def _remember(self, names: Iterable[StateName], pieces: Iterable[Piece]) -> None:
        for name, piece in zip(names, pieces, strict=True):
            self._files_of.pop(name, None)
            self._files_of[name] = piece
        while len(self._files_of) > MAX_REMEMBERED:
            del self._files_of[next(iter(self._files_of))]

    async def _restore(
        self, name: str, place: int | None, owner: Owner
    ) -> tuple[Restoring, SessionInfo]:
        loaded = {each.info.digest for each in self.adapters.all}
        opened = self.files.restoring(name, self.identity, loaded.__contains__, owner.tag)
        async with self._turn, self._open(opened) as reader:
            restoring = self.engine.restore(place, _conversation(reader.head, owner))
            await self._bring(reader, restoring)
            for names, pieces in zip(restoring.names(), reader.pieces_of, strict=True):
                self._remember(names, pieces)
            return restoring, reader.info

    async def _bring(self, reader: SessionReader, restoring: Restoring) -> None:
        head, size = reader.head, self.identity.block_size
        num_blocks, positions = head.num_blocks(size), head.state_positions
        start, number, at = 0, 1, 0
        while start < num_blocks:
            end = min(start + number, num_blocks)
            blocks = await self.beside.run(_read, reader.block, range(start, end))
            await restoring.put(blocks)
            while at < len(positions) and positions[at] <= end * size:
                state = await self.beside.run(reader.state, at)
                await restoring.put((), [(positions[at], state)])
                at += 1
            start, number = end, _at_once(blocks)

    @contextmanager
    def _noted(self, what: SessionEvent, name: str, owner: Owner) -> Iterator[_Note]:
        """Log what is done in this block, or why it is not."""
        note, begun_s = _Note(), trio.current_time()
        try:
            yield note
        except StoreError as error:
            note.fault, note.info = error.fault, None
            raise
        finally:
            if note.info or note.fault:
                # As ``request.done`` has it of a request that names the session.
                digest = Digest(int.from_bytes(self.sealer.session(owner.namespace, name)))
                self.emit(_change(what, digest, note, trio.current_time() - begun_s))

    @asynccontextmanager
    async def _open(self, context: AbstractContextManager[T]) -> AsyncIterator[T]:
        """Enter and leave beside the event loop; what was entered is left, come what may."""
        with trio.CancelScope(shield=True):
            value = await self.beside.run(context.__enter__)
        try:
            yield value
        except BaseException:
            await self._leave(context)
            raise
        await self._leave(context)

    async def _leave(self, context: AbstractContextManager[T]) -> None:
        with trio.CancelScope(shield=True):
            await self.beside.run(context.__exit__, None, None, None)


def _change(what: SessionEvent, name: Digest, note: _Note, duration_s: float) -> SessionChange:
    info = note.info
    return SessionChange(
        what=what,
        name=name,
        fault=note.fault,
        num_tokens=info.num_tokens if info else 0,
        num_states=info.num_states if info else 0,
        num_bytes=info.num_bytes if info else 0,
        num_new_bytes=info.num_new_bytes if info else 0,
        duration_s=duration_s,
    )


def _conversation(head: SessionHead, owner: Owner) -> Conversation:
    """As its owner's own. Adapters are known by content: no handle is needed to find state."""
    segments = tuple(
        Segment(
            context.start,
            tuple(AdapterUse(0, each.digest, each.scale) for each in context.adapters),
        )
        for context in head.contexts
    )
    return Conversation(token_ids=head.token_ids, namespace=owner.namespace, segments=segments)


def _at_once(parts: tuple[Parts, ...]) -> int:
    """How many more of the kind to handle at a time."""
    num_bytes = sum(map(len, parts[0]))
    return max(1, min(AT_ONCE, AT_ONCE_BYTES // max(num_bytes, 1)))


def _add(add: Callable[[Parts], Piece], parts: tuple[Parts, ...]) -> list[Piece]:
    return [add(each) for each in parts]


def _reuse(reuse: Callable[[Piece], bool], known: Sequence[Piece | None]) -> int:
    """How many of the first ones are there already."""
    num_reused = 0
    for piece in known:
        if piece is None or not reuse(piece):
            break
        num_reused += 1
    return num_reused


def _num_unknown(known: Sequence[Piece | None]) -> int:
    """How many from the first one on are to be written; the file of the first one has gone, if it
    was known."""
    following = enumerate(known[1:], 1)
    return next((i for i, piece in following if piece is not None), len(known))


def _read(read: Callable[[int], Parts], indexes: range) -> tuple[Parts, ...]:
    return tuple(map(read, indexes))
