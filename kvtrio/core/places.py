"""Places: the lanes in which requests run, and what each last held. The API calls them slots."""

from collections.abc import Set

from attrs import define, field, frozen

from kvtrio.core.identity import TokenTrail
from kvtrio.core.request import Request
from kvtrio.core.types import RequestId


@frozen(kw_only=True)
class PlaceView:
    """Counts of the request in a place, or of the last one that was."""

    place: int
    request_id: RequestId | None
    is_processing: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    max_new_tokens: int | None
    num_restored_tokens: int = 0
    """Of the session that the place stands for since; then there is no request."""


@define(eq=False)
class Places:
    """Who runs where."""

    num_places: int
    running: list[Request | None] = field(init=False)
    last: list[Request | None] = field(init=False)
    contents: list[TokenTrail | None] = field(init=False)
    """The sequence of the last request, or what was restored since."""
    free: set[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.running = [None] * self.num_places
        self.last = [None] * self.num_places
        self.contents = [None] * self.num_places
        self.free = set(range(self.num_places))

    @property
    def num_free(self) -> int:
        return len(self.free)

    def find(self, wanted: int | None, claimed: Set[int]) -> int | None:
        """A free place for a request: the one it asks for, else one that nobody waits for."""
        if wanted is not None:
            return wanted if wanted in self.free else None
        return min(self.free - claimed or self.free, default=None)

    def enter(self, place: int, request: Request) -> None:
        assert self.running[place] is None
        self.running[place] = self.last[place] = request
        self.contents[place] = request.trail
        self.free.remove(place)
        request.place = place

    def leave(self, request: Request) -> None:
        assert request.place is not None
        assert self.running[request.place] is request
        self.running[request.place] = None
        self.free.add(request.place)

    def replace(self, place: int, contents: TokenTrail | None) -> None:
        """What a place holds in which nobody runs."""
        assert self.running[place] is None
        self.contents[place], self.last[place] = contents, None

    def views(self) -> tuple[PlaceView, ...]:
        return tuple(
            _view(place, request, self.running[place] is not None, self._num_restored(place))
            for place, request in enumerate(self.last)
        )

    def _num_restored(self, place: int) -> int:
        contents = self.contents[place]
        return len(contents.tags) if contents and self.last[place] is None else 0


def _view(place: int, request: Request | None, is_processing: bool, num_restored: int) -> PlaceView:
    return PlaceView(
        place=place,
        request_id=request.request_id if request else None,
        is_processing=is_processing,
        num_prompt_tokens=request.num_prompt_tokens if request else 0,
        num_cached_tokens=request.num_cached_tokens if request else 0,
        num_computed_tokens=request.num_computed_tokens if request else 0,
        num_generated_tokens=request.num_generated_tokens if request else 0,
        max_new_tokens=request.submit.max_new_tokens if request else None,
        num_restored_tokens=num_restored,
    )
