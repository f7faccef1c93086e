"""Requests whose state is on disk: they wait until it is in memory, or known to be lost.

1. A request is fetched for when it comes; what is to be read is decided then, and once more each
   time that something proved lost: there may be a state before it.
2. It is read in pieces, a few at a time over all requests, each entered before the next is read for
   the same request. Who needs what another one has read already just waits for that.
3. What cannot be read, or is not what its head said, is taken off the disk, and its request goes on
   with what is there: a miss, and never more than that.
4. While it is fetched for, a request is shown to no policy.
"""

from collections import deque

from attrs import define, field

from kvtrio.core.arrival import Arrival, has_sizes
from kvtrio.core.checkpoints import resumable
from kvtrio.core.disk import Entry, Name, is_under, tokens_of
from kvtrio.core.events import Fetched
from kvtrio.core.exchange import Exchange
from kvtrio.core.identity import TokenTrail
from kvtrio.core.index import Match, common_prefix
from kvtrio.core.keeping import LEAST_BYTES, Fetch, Keeper, Touch
from kvtrio.core.request import Request
from kvtrio.core.stored import Incoming, Stored, StoreFault
from kvtrio.core.types import RequestId
from kvtrio.core.windows import RequestWindows

PIECE_BYTES = 16 << 20
MAX_PIECES = 2
"""Read, and on their way into memory, at once."""


@define(eq=False)
class _Piece:
    """What is being read or entered."""

    entries: tuple[Entry, ...]
    trail: TokenTrail
    """Of the request that it is read for."""
    is_read: bool = False
    """It is on its way into memory."""


@define(eq=False)
class _Job:
    """What one request waits for."""

    request: Request
    todo: deque[Entry]
    """Not asked for yet."""
    numbers: list[int] = field(factory=list)
    """Of the pieces that it waits for; the next one is read while one enters."""
    has_lost: bool = False
    """Something that was to be read for it."""


@define(eq=False)
class Fetches:
    """begin / take / go_on / forget; see the module's rules."""

    keeper: Keeper
    exchange: Exchange
    jobs: dict[RequestId, _Job] = field(init=False, factory=dict)
    pieces: dict[int, _Piece] = field(init=False, factory=dict)
    lost: list[StoreFault] = field(init=False, factory=list)
    """Why things had to be taken off the disk; to be told."""
    _last_number: int = field(init=False, default=0)

    def begin(self, request: Request) -> None:
        """It came, and waits."""
        todo = self._missing(request)
        if todo:
            self.keeper.disk.use(todo)
            self.keeper.orders.append(Touch(tuple(entry.name for entry in reversed(todo))))
            self.jobs[request.request_id] = _Job(request, deque(todo))
            request.is_fetching = True
            self._advance()

    def forget(self, request: Request) -> None:
        """It waits no longer. What is being read comes into memory all the same."""
        if request.is_fetching:
            request.is_fetching = False
            del self.jobs[request.request_id]
            self._advance()

    def take(self, fetched: Fetched) -> None:
        """Something was read."""
        piece, self.lost = self.pieces[fetched.number], [*self.lost, *fetched.faults]
        piece.is_read = True
        arriving = deque[Incoming]()
        for entry, stored in zip(piece.entries, fetched.stored, strict=True):
            if stored is not None and (incoming := self._incoming(stored, piece.trail)):
                arriving.append(incoming)
            else:
                self._lose(entry, fetched.number)
        arrival = Arrival(fetched.number, piece.trail, arriving, is_fetched=True)
        self.exchange.bring(arrival)
        self._advance()

    def lose(self, name: Name, fault: StoreFault) -> None:
        """Something proved lost when it was read for another purpose."""
        entry = self.keeper.disk.entries.get(name)
        if entry is not None and entry.is_there:
            self.lost.append(fault)
            self.keeper.lose(entry)

    def _lose(self, entry: Entry, number: int) -> None:
        if entry.used:
            self.keeper.lose(entry)
        for job in self.jobs.values():
            job.has_lost |= number in job.numbers

    def take_lost(self) -> list[StoreFault]:
        lost, self.lost = self.lost, []
        return lost

    def go_on(self) -> None:
        """Look what has come into memory."""
        if not self.exchange.entered:
            return
        for arrival in self.exchange.take_entered():
            last = self.pieces.pop(arrival.number).entries[-1].head
            for job in self.jobs.values():
                if arrival.number in job.numbers:
                    job.numbers.remove(arrival.number)
                    if arrival.num_tokens <= last.start:
                        job.todo.clear()  # something before was lost
        self._advance()

    # --- what is to be read ---

    def _missing(self, request: Request) -> list[Entry]:
        """What would let the request go on behind what it finds in memory."""
        disk, cache, trail = self.keeper.disk, self.exchange.cache, request.trail
        limit = request.num_tokens - 1
        if not request.submit.reuse or not disk.entries or limit < 1:
            return []
        match = cache.match(trail, limit, request.known)
        found = disk.follow(trail, len(match.blocks), limit)
        if cache.states is not None:
            return self._up_to_state(found, request, match)
        blocks = [entry for entry in found if not entry.head.state_offset]
        if cache.parts is not None:
            return self._up_to_window(blocks, request, match)
        end = max((_end(entry, trail, limit) for entry in blocks), default=0)
        return blocks if end - match.num_tokens >= trail.block_size else []

    def _up_to_window(self, found: list[Entry], request: Request, match: Match) -> list[Entry]:
        """With windows: the blocks before the last position that sees none whose part is lost, and
        parts of blocks that are in memory without."""
        trail, limit, parts = request.trail, request.num_tokens - 1, self.exchange.cache.parts
        assert parts is not None
        windows, num_here = RequestWindows(parts), len(match.blocks)
        on_disk = [self.keeper.disk.entries.get((block.key or b"", 0)) for block in match.blocks]
        there = [block.part is not None for block in match.blocks]
        whole = [has or self._is_whole(each) for has, each in zip(there, on_disk, strict=True)]
        whole += map(self._is_whole, found)
        end = _end(found[-1], trail, limit) if found else num_here * trail.block_size
        end = windows.last_covered(lambda index: whole[index], end)
        if end - windows.covered(match) < trail.block_size:
            return []
        first = windows.first_seen(end)
        seen = zip(on_disk[first:], there[first:], strict=True)
        lost = [each for each, has in seen if not has and each is not None and each.is_there]
        return [entry for entry in (*lost, *found) if entry.head.start < end]

    def _is_whole(self, entry: Entry | None) -> bool:
        """Whether a block is on disk with its part."""
        return entry is not None and entry.is_there and self.keeper.is_whole(entry)

    def _up_to_state(self, found: list[Entry], request: Request, match: Match) -> list[Entry]:
        """With recurrent layers: the last state whose block is there, well beyond those in memory,
        and the blocks before it."""
        trail, limit = request.trail, request.num_tokens - 1
        known = resumable(match, 0).num_tokens
        blocks = [entry for entry in found if not entry.head.state_offset]
        end = max(match.num_tokens, *(_end(entry, trail, limit) for entry in blocks), 0)
        states = [entry for entry in found if entry.head.state_offset and entry.head.end <= end]
        first = known // trail.block_size
        for index in range(len(request.known) - 1, first - 1, -1):
            # On blocks that are in memory.
            states = states or self.keeper.disk.states_at(trail, index, limit)
        if not states or states[-1].head.end - known < trail.block_size:
            return []
        last = states[-1]
        return [*(each for each in blocks if each.head.start < last.head.end), last]

    def _incoming(self, stored: Stored, trail: TokenTrail) -> Incoming | None:
        """What was read, as far as the sequence has it; None if that is nothing."""
        head, config = stored.head, self.keeper.config
        num = common_prefix(head.token_ids, tokens_of(trail, head.start, head.end))
        is_whole = num == len(head.token_ids)
        is_state = head.state_offset > 0
        if num == 0 or not is_under(head, trail, num) or (is_state and not is_whole):
            return None
        incoming = Incoming(head.start, num, stored.parts, is_state, is_whole)
        return incoming if has_sizes(config, incoming) else None

    # --- pieces ---

    def _advance(self) -> None:
        """Let requests go that have what there was, and read on for the others."""
        for job in list(self.jobs.values()):
            if job.has_lost and not job.todo and not job.numbers:
                job.todo, job.has_lost = deque(self._missing(job.request)), False
            if job.todo and all(self.pieces[number].is_read for number in job.numbers):
                self._ask(job)
            if not job.todo and not job.numbers:
                job.request.is_fetching = False
                del self.jobs[job.request.request_id]

    def _ask(self, job: _Job) -> None:
        """The next piece for a request, or another's that has what it needs."""
        if self._join(job) or len(self.pieces) >= MAX_PIECES:
            return
        chosen, num_bytes = list[Entry](), 0
        while job.todo and num_bytes < PIECE_BYTES:
            entry = job.todo.popleft()
            if entry.used:
                chosen.append(entry)
                num_bytes += max(entry.size, LEAST_BYTES)
        if chosen:
            self._last_number += 1
            job.numbers.append(self._last_number)
            self.pieces[self._last_number] = _Piece(tuple(chosen), job.request.trail)
            heads = tuple(entry.head for entry in chosen)
            self.keeper.orders.append(Fetch(self._last_number, heads))

    def _join(self, job: _Job) -> bool:
        for number, piece in self.pieces.items():
            if job.todo[0] in piece.entries:
                while job.todo and job.todo[0] in piece.entries:
                    job.todo.popleft()
                if number not in job.numbers:
                    job.numbers.append(number)
                return True
        return False


def _end(entry: Entry, trail: TokenTrail, limit: int) -> int:
    """Position behind the tokens of a block that are the sequence's."""
    head = entry.head
    wanted = tokens_of(trail, head.start, min(head.end, limit))
    return head.start + common_prefix(head.token_ids, wanted)
