"""One generation's account: tokens, blocks, times. States change only along ``TRANSITIONS``."""

from attrs import define, field

from kvtrio.core.events import Submit
from kvtrio.core.types import BlockId, RequestId, RequestState

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class IllegalTransition(Exception):
    """A bug of ours: a request was moved along an edge that ``TRANSITIONS`` does not have."""


@define(eq=False)
class Request:
    """Changed by ``Core`` alone."""

    submit: Submit
    arrival_s: float
    token_ids: list[int]
    """Prompt, then generated."""
    block_tables: tuple[list[BlockId], ...]
    """Per group; each grows until the request ends."""
    state: RequestState = RequestState.WAITING
    place: int | None = None
    num_computed_tokens: int = 0
    """Tokens whose state is in the blocks."""
    num_cached_tokens: int = 0
    in_flight: bool = False
    """A launched batch names this request's blocks."""
    is_aborted: bool = False
    """To be dropped as soon as it is not in flight."""
    started_s: float | None = None
    first_token_s: float | None = None
    is_announced: bool = field(default=False)
    """``Started`` was sent."""

    @property
    def request_id(self) -> RequestId:
        return self.submit.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submit.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.num_tokens - self.num_computed_tokens

    def move(self, state: RequestState) -> None:
        """Change state, or raise ``IllegalTransition`` and change nothing."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.state.value} -> {state.value}")
        self.state = state
