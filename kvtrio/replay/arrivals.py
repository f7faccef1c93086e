"""When the requests of a scenario come.

Open: at the recorded times, whatever becomes of the others. Closed: the first turn of a session at
its time, every other one as long after the end of the turn before as its user thought. An action
waits until all requests before it have ended, and all after it wait for the action.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from attrs import define, field

from kvtrio.replay.scenario import Action, Request
from kvtrio.replay.scenario_file import Scenario


@define(eq=False)
class Arrivals:
    """take / end; times in seconds."""

    scenario: Scenario
    is_closed: bool
    _next: int = field(init=False, default=0)
    """Requests that came or wait for their session."""
    _actions: list[tuple[int, Action]] = field(init=False)
    """Still to come, the first one last."""
    _due: list[tuple[float, int]] = field(init=False, factory=list)
    """(time, request) of turns whose session is ready."""
    _followers: dict[int, list[int]] = field(init=False, factory=dict)
    """Per session of which a turn has not ended, the turns behind that one."""
    _ended: dict[int, float] = field(init=False, factory=dict)
    """When the last turn of other sessions did."""
    _running: set[int] = field(init=False, factory=set)
    """Requests that came and have not ended, or wait for their session."""
    _ready_s: float = field(init=False, default=0.0)
    """Nothing comes earlier: the time of the last action."""

    def __attrs_post_init__(self) -> None:
        self._actions = list(reversed(self.scenario.actions))

    @property
    def next_s(self) -> float:
        """When something comes, as far as is known: infinity if that depends on an end, or nothing
        comes."""
        self._admit()
        first = self._due[0][0] if self._due else inf
        if not self._running and self._is_at_action:
            first = min(first, max(self._actions[-1][1].at_s, self._ready_s))
        return first

    @property
    def is_done(self) -> bool:
        """Nothing is to come, not even behind a turn that runs."""
        are_known = self._next == len(self.scenario.requests) and not self._actions
        return are_known and not self._due and not any(self._followers.values())

    def take(self, now: float) -> Iterator[tuple[float, Request | Action]]:
        """What is due, with its time, in order."""
        while self.next_s <= now:
            at_s = self.next_s
            if self._due and self._due[0][0] <= at_s:
                _, number = heappop(self._due)
                yield at_s, self.scenario.requests[number]
            else:
                _, action = self._actions.pop()
                self._ready_s = at_s
                yield at_s, action

    def end(self, number: int, now: float) -> None:
        """A request ended, or was refused."""
        self._running.discard(number)
        session = self.scenario.requests[number].session
        if session is None or not self.is_closed:
            return
        if waiting := self._followers[session]:
            following = waiting.pop(0)
            heappush(self._due, (self._thought(following, now), following))
        else:
            del self._followers[session]
            self._ended[session] = now

    def _thought(self, number: int, ended_s: float) -> float:
        """When a turn comes whose session's last one ended at ``ended_s``."""
        return max(ended_s + (self.scenario.requests[number].think_s or 0.0), self._ready_s)

    @property
    def _is_at_action(self) -> bool:
        return bool(self._actions) and self._actions[-1][0] == self._next

    def _admit(self) -> None:
        """Give times to requests whose times are known."""
        requests: Sequence[Request] = self.scenario.requests
        while self._next < len(requests) and not self._is_at_action:
            request = requests[self._next]
            if self._due and self._due[0][0] <= request.at_s and not self.is_closed:
                return  # later ones are later: no need to know them yet
            self._next += 1
            self._running.add(request.id)
            at_s = max(request.at_s, self._ready_s)
            if self.is_closed and request.session is not None:
                if request.session in self._followers:
                    self._followers[request.session].append(request.id)
                    continue
                self._followers[request.session] = []
                if (ended_s := self._ended.get(request.session)) is not None:
                    at_s = self._thought(request.id, ended_s)
            heappush(self._due, (at_s, request.id))
