"""State that leaves memory and comes into it: read out and written in front of steps, a bounded
amount at a time.

1. What is to be read out is asked for as ``Wanted``; what has gone by its turn is answered with
   None. Nothing is held for it.
2. What comes in is entered block by block as if a request had computed and left it: published when
   its load is planned, since the loads of a step run before all that could read them.
3. Blocks come in only where there is room for them beside all that runs.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from attrs import define, field, frozen

from kvtrio.core.arrival import LEAST_BYTES, Arrival, Entrance
from kvtrio.core.batch import NOWHERE, Batch, Copy, Load, Move, Save, StepResult
from kvtrio.core.heads import Wanted
from kvtrio.core.identity import KeyMaker
from kvtrio.core.request import Request
from kvtrio.core.stored import Stored
from kvtrio.core.tiers import TieredCache
from kvtrio.core.types import BlockId, Tier

MOVED_BYTES = 8 << 20
"""Read out, and written in, in front of one step: two or three milliseconds."""


@frozen
class Answer:
    """To what was asked under a number."""

    number: int
    stored: tuple[Stored | None, ...] = ()
    """What was to be read."""
    num_tokens: int = 0
    """Of what was to come in, so many from the start are there."""


@define(eq=False)
class _Reading:
    """Things asked for together."""

    number: int
    wanted: Sequence[Wanted]
    found: list[Stored | None] = field(factory=list)
    """Of those whose turn has come; None as long as they are being read, too."""
    num_open: int = 0
    """Of these, how many are being read."""


@define(eq=False)
class Exchange:
    """ask / bring / plan / book; see the module's rules."""

    cache: TieredCache
    keys: KeyMaker
    readings: deque[_Reading] = field(init=False, factory=deque)
    arrivals: deque[Arrival] = field(init=False, factory=deque)
    answers: list[Answer] = field(init=False, factory=list)
    """To be taken."""
    entrance: Entrance = field(init=False)
    _takers: list[tuple[_Reading, int]] = field(init=False, factory=list)
    """Whose the saves of the planned step are, in order."""

    def __attrs_post_init__(self) -> None:
        self.entrance = Entrance(self.cache)

    @property
    def has_work(self) -> bool:
        return bool(self.readings or self.arrivals)

    def ask(self, number: int, wanted: Sequence[Wanted]) -> None:
        """Read these out; the answer comes under ``number``."""
        self.readings.append(_Reading(number, wanted))

    def bring(self, arrival: Arrival) -> None:
        """Take these in; the answer comes under the arrival's number."""
        self.arrivals.append(arrival)

    def plan_loads(self, running: Iterable[Request], now: float) -> None:
        """What comes in with the next step; first of all that is planned for it."""
        num_left = MOVED_BYTES
        num_held = sum(len(request.blocks) + 1 for request in running)
        while self.arrivals and num_left > 0:
            arrival = self.arrivals[0]
            num_left -= self.entrance.enter(arrival, num_left, num_held, now)
            if arrival.pieces:
                return
            self.arrivals.popleft()
            self.answers.append(Answer(arrival.number, num_tokens=arrival.num_tokens))

    def plan_saves(self, moves: Sequence[Move]) -> tuple[Save, ...]:
        """What the next step reads out; last of all that is planned for it. What it moves gets
        where it is to be only after the saves."""
        saves, num_left = list[Save](), MOVED_BYTES
        targets = self._targets(moves)
        for reading in self.readings:
            while len(reading.found) < len(reading.wanted) and num_left > 0:
                wanted = reading.wanted[len(reading.found)]
                save = wanted.save(self.keys, self.cache.config) if wanted.is_there else None
                if save is not None and not targets.isdisjoint(self._places(save)):
                    break
                reading.found.append(None)
                if save is not None:
                    saves.append(save)
                    self._takers.append((reading, len(reading.found) - 1))
                    reading.num_open += 1
                    num_left -= self._num_bytes(save)
        self._answer()
        return tuple(saves)

    def book(self, batch: Batch, result: StepResult) -> None:
        """The step has run."""
        takers, self._takers = self._takers, []
        for save, parts, (reading, at) in zip(batch.saves, result.saved, takers, strict=True):
            reading.found[at] = Stored(save.head, parts)
            reading.num_open -= 1
        self._answer()

    def _answer(self) -> None:
        while self.readings:
            first = self.readings[0]
            if first.num_open or len(first.found) < len(first.wanted):
                return
            self.readings.popleft()
            self.answers.append(Answer(first.number, tuple(first.found)))

    def take_answers(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        return answers

    def _targets(self, moves: Iterable[Move]) -> set[tuple[Tier, int, BlockId]]:
        found: set[tuple[Tier, int, BlockId]] = set()
        for move in moves:
            if isinstance(move, Copy):
                found.add((self._memory(move.target_tier), move.group, move.target))
            else:
                found.update(self._places(move))
        return found

    def _places(self, move: Save | Load) -> list[tuple[Tier, int, BlockId]]:
        places = [(group, place) for group, place in move.places if place != NOWHERE]
        if isinstance(move, Load):
            return [(self._memory(move.tier), group, place) for group, place in places]
        return [(self._memory(move.tier_of(group)), group, place) for group, place in places]

    def _memory(self, tier: Tier) -> Tier:
        return Tier.DEVICE if self.cache.config.is_unified else tier

    def _num_bytes(self, save: Save) -> int:
        config = self.cache.config
        kept = (group for group, place in save.places if place != NOWHERE)
        sizes = (config.groups[group].part_bytes(config.block_size) for group in kept)
        return sum(sizes, LEAST_BYTES)
