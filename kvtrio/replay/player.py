"""Plays a scenario to a server and writes down what comes back.

1. A request is sent when its time has come and the answers that its prompt contains are there, not
   earlier; ``planned_s`` and ``sent_s`` tell the two apart.
2. Every request that was sent gets a result, also one that is cut short by the end of the replay.
3. Nobody but the cancel scope around ``play`` ends it early.
"""

from collections.abc import Callable

import numpy as np
import trio
from attrs import define, field

from kvtrio.replay.actions import Operator
from kvtrio.replay.arrivals import Arrivals
from kvtrio.replay.asking import PATHS, Ask
from kvtrio.replay.leaving import Stay, stay
from kvtrio.replay.listening import Answer, Enough, with_gaps
from kvtrio.replay.pacing import PlaySettings, Schedule
from kvtrio.replay.realise import Realiser
from kvtrio.replay.results import Api, Outcome, Pacing, Result
from kvtrio.replay.scenario import Action, Request
from kvtrio.replay.scenario_file import Scenario
from kvtrio.replay.target import OK, Http, ReplayError, Target
from kvtrio.replay.words import WordTable

REFUSED = (429, 503)


@define(eq=False)
class Player:
    """One replay. ``tell`` gets each result, with the atoms of its answer."""

    whole: Scenario
    schedule: Schedule
    settings: PlaySettings
    target: Target
    http: Http
    operator: Operator
    tell: Callable[[Result, list[int]], None]
    _realiser: Realiser = field(init=False)
    _words: WordTable = field(init=False, factory=WordTable)
    _start_s: float = field(init=False, default=0.0)
    _ended: dict[int, trio.Event] = field(init=False, factory=dict)
    """By number in the whole scenario, of those that are played."""
    _changed: trio.Event = field(init=False, factory=trio.Event)
    """Something ended."""
    _slots: trio.CapacityLimiter = field(init=False)

    def __attrs_post_init__(self) -> None:
        seed, vocabulary = self.settings.seed, self.target.vocabulary
        self._realiser = Realiser(self.whole.requests, vocabulary, seed)
        self._slots = trio.CapacityLimiter(self.settings.max_open)
        self._ended = {number: trio.Event() for number in self.schedule.numbers}

    async def play(self) -> None:
        """To the end. Raises ``ReplayError`` if an action fails."""
        self._start_s = trio.current_time()
        is_serial = self.settings.pacing is Pacing.SERIAL
        await (self._play_serially() if is_serial else self._play_in_time())

    @property
    def _now(self) -> float:
        return trio.current_time() - self._start_s

    async def _play_serially(self) -> None:
        actions = list(self.schedule.scenario.actions)
        for place, request in enumerate(self.schedule.scenario.requests):
            while actions and actions[0][0] <= place:
                await self.operator.do(actions.pop(0)[1])
            await self._play(request, self._now)
        for _, action in actions:
            await self.operator.do(action)

    async def _play_in_time(self) -> None:
        arrivals = Arrivals(self.schedule.scenario, self.settings.pacing is Pacing.CLOSED)
        async with trio.open_nursery() as nursery:
            while not arrivals.is_done:
                self._changed = trio.Event()
                for at_s, what in arrivals.take(self._now):
                    if isinstance(what, Action):
                        await self.operator.do(what)
                    else:
                        nursery.start_soon(self._play_and_say, what, at_s, arrivals)
                with trio.move_on_at(self._start_s + arrivals.next_s):
                    await self._changed.wait()

    async def _play_and_say(self, request: Request, at_s: float, arrivals: Arrivals) -> None:
        await self._play(request, at_s)
        arrivals.end(request.id, self._now)
        self._changed.set()

    async def _play(self, request: Request, planned_s: float) -> None:
        number = self.schedule.numbers[request.id]
        for other in sorted(self._realiser.needs(number)):
            if other in self._ended:
                await self._ended[other].wait()
        async with self._slots:
            await self._ask(request, number, planned_s)
        self._ended[number].set()

    async def _ask(self, request: Request, number: int, planned_s: float) -> None:
        how = stay(request, self.settings.pacing, self.target.kind)
        atoms = self._realiser.prompt(number)[: how.num_prompt].tolist()
        prompt = atoms if self.target.api is Api.TOKENS else self._words.join(atoms)
        seed = self._realiser.sampling_seed(number)
        ask = Ask(request, prompt, seed, self.whole.header.purposes, how.num_wanted)
        answer = Answer(self.target.api, how.num_enough)
        sent_s = self._now
        outcome = Outcome.CUT
        try:
            outcome = await self._exchange(ask, answer, how) if how.is_sent else Outcome.LEFT
        finally:
            told = [self._atom(each) for each in answer.atoms]
            self._realiser.answered(number, np.array(told, dtype=np.int64))
            self.operator.note(request, answer.final)
            self.tell(self._result(request, answer, outcome, (planned_s, sent_s)), told)

    def _atom(self, told: int | str) -> int:
        return told if isinstance(told, int) else self._words.number(told)

    async def _exchange(self, ask: Ask, answer: Answer, how: Stay) -> Outcome:
        request, path = ask.request, PATHS[self.target.api]
        with trio.move_on_after(how.after_s) as scope:
            try:
                await self.http.stream(path, ask.body(self.target), answer.take)
            except Enough:
                return Outcome.LEFT
            except (OSError, ReplayError):
                return Outcome.FAILED
        if answer.status in REFUSED:
            return Outcome.REFUSED
        if scope.cancelled_caught or (request.left_s is not None and answer.is_whole):
            return Outcome.LEFT
        return Outcome.DONE if answer.status == OK and answer.is_whole else Outcome.FAILED

    def _result(
        self, request: Request, answer: Answer, outcome: Outcome, times_s: tuple[float, float]
    ) -> Result:
        (planned_s, sent_s), times = times_s, answer.times_s
        first_s = times[0] - self._start_s - sent_s if times else None
        result = Result(
            id=self.schedule.numbers[request.id],
            session=request.session,
            scenario_turn=request.turn,
            purpose=request.purpose,
            retain=request.retain,
            tenant=request.tenant,
            adapters=request.adapters,
            planned_s=round(planned_s, 6),
            sent_s=round(sent_s, 6),
            first_token_s=None if first_s is None else round(first_s, 6),
            total_s=round(self._now - sent_s, 6),
            outcome=outcome,
            status=answer.status,
            **answer.told(),
        )
        return with_gaps(result, answer.gaps_s())
