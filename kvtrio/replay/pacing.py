"""Which requests of a scenario are played, and when."""

from collections.abc import Sequence

from attrs import frozen
from msgspec.structs import replace

from kvtrio.replay.realise import mixed
from kvtrio.replay.results import Pacing
from kvtrio.replay.scenario import Action, Request
from kvtrio.replay.scenario_file import Scenario

ALONE = 1 << 40
"""Added to the number of a request without a session, to draw for it."""
UNIT = 2.0**-64


@frozen(kw_only=True)
class PlaySettings:
    """How a scenario is played. ``speed`` 2 is twice as fast."""

    pacing: Pacing = Pacing.OPEN
    speed: float = 1.0
    sample: float = 1.0
    """Share of the sessions, each with all its requests."""
    seed: int = 0
    max_open: int = 1024
    """Connections at once."""


@frozen
class Schedule:
    """The requests that are played, numbered anew, with times divided by the speed."""

    scenario: Scenario
    numbers: tuple[int, ...]
    """In the whole scenario, by place here."""


def schedule(whole: Scenario, settings: PlaySettings) -> Schedule:
    chosen = [each for each in whole.requests if _is_chosen(each, settings)]
    numbers = tuple(each.id for each in chosen)
    requests = tuple(_scaled(each, place, settings.speed) for place, each in enumerate(chosen))
    actions = tuple(
        (_num_before(numbers, before), replace(action, at_s=action.at_s / settings.speed))
        for before, action in whole.actions
    )
    part = Scenario(
        header=whole.header, adapters=whole.adapters, requests=requests, actions=actions
    )
    return Schedule(part, numbers)


def _is_chosen(request: Request, settings: PlaySettings) -> bool:
    if settings.sample >= 1.0:
        return True
    which = ALONE + request.id if request.session is None else request.session
    return mixed(settings.seed, which) * UNIT < settings.sample


def _scaled(request: Request, place: int, speed: float) -> Request:
    think_s, left_s = request.think_s, request.left_s
    return replace(
        request,
        id=place,
        at_s=request.at_s / speed,
        think_s=None if think_s is None else think_s / speed,
        left_s=None if left_s is None else left_s / speed,
    )


def _num_before(numbers: Sequence[int], before: int) -> int:
    """How many of ``numbers`` are below ``before``."""
    return sum(number < before for number in numbers)


def action_session(action: Action) -> str:
    """Under which name a session is saved."""
    return f"scenario-{action.session or 0}"
