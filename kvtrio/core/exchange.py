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

from kvtrio.core.arrival import Arrival, Entrance
from kvtrio.core.batch import NOWHERE, Batch, Save, StepResult
from kvtrio.core.heads import Wanted
from kvtrio.core.identity import KeyMaker
from kvtrio.core.keeping import LEAST_BYTES
from kvtrio.core.request import Request
from kvtrio.core.stored import Stored
from kvtrio.core.tiers import TieredCache

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
    entered: list[Arrival] = field(init=False, factory=list)
    """Those from the disk tier that are in memory, to be taken."""
    entrance: Entrance = field(init=False)
    _takers: list[tuple[_Reading, int] | None] = field(init=False, factory=list)
    """Whose the saves of the planned step are, in order; None: the keeper's."""

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
            if arrival.is_fetched:
                self.entered.append(arrival)
            else:
                self.answers.append(Answer(arrival.number, num_tokens=arrival.num_tokens))

    def plan_saves(self, num_bytes: int) -> tuple[Save, ...]:
        """What the next step reads out, about so many bytes; last of all that is planned for it,
        but while its moves are still to be taken."""
        saves = self._leaving(num_bytes)
        num_left = num_bytes - sum(map(self._num_bytes, saves))
        for reading in self.readings:
            while len(reading.found) < len(reading.wanted) and num_left > 0:
                wanted = reading.wanted[len(reading.found)]
                if wanted.is_there:
                    save = wanted.save(wanted.head(self.keys), self.cache.config)
                    if not self.cache.is_settled(save):
                        break
                    saves.append(save)
                    self._takers.append((reading, len(reading.found)))
                    reading.num_open += 1
                    num_left -= self._num_bytes(save)
                reading.found.append(None)
        self._answer()
        return tuple(saves)

    def _leaving(self, num_bytes: int) -> list[Save]:
        """What goes to disk, and as much of it as may be read out now."""
        saves = list[Save]()
        keeper, num_left = self.cache.keeper, num_bytes
        for save, entry in keeper.take_leaving() if keeper else ():
            if num_left > 0:
                saves.append(save)
                self._takers.append(None)
                num_left -= self._num_bytes(save)
            else:
                assert keeper is not None
                keeper.give_up(entry)
        return saves

    def book(self, batch: Batch, result: StepResult) -> None:
        """The step has run."""
        takers, self._takers = self._takers, []
        for save, parts, taker in zip(batch.saves, result.saved, takers, strict=True):
            if taker is None:
                assert self.cache.keeper is not None
                self.cache.keeper.write(Stored(save.head, parts))
                continue
            reading, at = taker
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

    def take_entered(self) -> list[Arrival]:
        entered, self.entered = self.entered, []
        return entered

    def _num_bytes(self, save: Save) -> int:
        config = self.cache.config
        kept = (group for group, place in save.places if place != NOWHERE)
        sizes = (config.groups[group].part_bytes(config.block_size) for group in kept)
        return max(sum(sizes), LEAST_BYTES)
