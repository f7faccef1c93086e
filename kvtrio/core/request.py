"""One generation's account: tokens, blocks, times. States change only along ``TRANSITIONS``."""

from attrs import define, field

from kvtrio.core.blocks import Block
from kvtrio.core.events import Gap, Submit
from kvtrio.core.explain import CacheReport
from kvtrio.core.identity import TokenTrail
from kvtrio.core.types import BlockId, RequestId, RequestState

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
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
    trail: TokenTrail
    """The same tokens, with what they are computed under."""
    blocks: list[Block] = field(factory=list)
    """Grows until the request ends; a block may be replaced by an equal published one."""
    tables: tuple[list[BlockId], ...] = ()
    """Per group, the places of ``blocks``."""
    num_published: int = 0
    """Leading blocks that are in the index."""
    source: Block | None = None
    """Held because the launched step copies from it."""
    state: RequestState = RequestState.WAITING
    place: int | None = None
    num_computed_tokens: int = 0
    """Tokens whose state is in the blocks, computed here or found."""
    num_accounted_tokens: int = 0
    """Prompt tokens that are accounted for, as computed or as reused."""
    num_computed_here: int = 0
    """Prompt tokens computed for this request, once each."""
    num_recomputed_tokens: int = 0
    """Tokens computed again, since a preemption lost them."""
    num_reached_tokens: int = 0
    """The most tokens that were ever computed."""
    num_preemptions: int = 0
    known: list[Block] = field(factory=list)
    """Published blocks of its prefix, as far as they were looked up."""
    report: CacheReport = field(factory=CacheReport)
    in_flight: bool = False
    """A launched batch names this request's blocks."""
    is_aborted: bool = False
    """To be dropped as soon as it is not in flight."""
    entered_s: float | None = None
    """When it got the place it has."""
    started_s: float | None = None
    """When it got its first place."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    longest_gap: Gap | None = None
    was_preempted: bool = False
    """Since its last token."""
    is_announced: bool = False
    """``Started`` was sent."""

    @property
    def num_cached_tokens(self) -> int:
        return self.report.num_device_tokens + self.report.num_host_tokens

    @property
    def request_id(self) -> RequestId:
        return self.submit.request_id

    @property
    def adapter_set(self) -> int:
        """Number of the context it is generated under; 0 for the bare model."""
        context = self.trail.contexts[-1][1]
        return context.number + 1 if context.adapters else 0

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
