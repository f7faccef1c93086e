"""One generation's account: tokens, blocks, times. States change only along ``TRANSITIONS``."""

import sys
from functools import cached_property

from attrs import define, field

from kvtrio.core.batch import SampleRow
from kvtrio.core.blocks import Block, Checkpoint, Slot
from kvtrio.core.events import Gap, Submit
from kvtrio.core.explain import CacheReport
from kvtrio.core.identity import AdapterUse, TokenTrail
from kvtrio.core.sampling import mixed, unit
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
    max_tokens: int = sys.maxsize
    """Prompt and answer together: with so many it ends."""
    blocks: list[Block] = field(factory=list)
    """Grows until the request ends; a block may be replaced by an equal published one."""
    tables: dict[int, list[BlockId]] = field(factory=dict)
    """By group with K and V, the places of ``blocks``. In a group with a sliding window what lies
    before ``first_part`` means nothing."""
    first_part: int = 0
    """Index of the first block whose part it holds, where there are windows."""
    slot: Slot | None = None
    """Of a running request, where the model has recurrent layers: their state."""
    stops: list[int] = field(factory=list)
    """Where chunks of its prompt may end for a checkpoint, ascending; see ``states``."""
    due: int = 0
    """The one that the last chunk was cut for."""
    last_checkpoint: int = 0
    """Position of the last one on its path, taken or resumed from."""
    rolling: Checkpoint | None = None
    """The last one within its answer."""
    _table_ids: tuple[tuple[BlockId, ...], ...] | None = field(init=False, default=None)
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
    is_fetching: bool = False
    """It waits for its state from disk, and does not start before."""
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
        return self.report.num_reused_tokens

    @cached_property
    def request_id(self) -> RequestId:
        return self.submit.request_id

    @cached_property
    def adapters(self) -> tuple[AdapterUse, ...]:
        """Under which it is generated."""
        return self.trail.contexts[-1][1].adapters

    @cached_property
    def adapter_set(self) -> int:
        """A number for them, whoever asks for them; 0 for the bare model."""
        return hash(self.adapters) if self.adapters else 0

    @cached_property
    def _draw_start(self) -> int:
        return mixed(self.submit.sampling.seed)

    @cached_property
    def _fixed_row(self) -> SampleRow | None:
        """Where all its tokens are chosen alike: by the largest logit, of which nothing is taken
        off."""
        params = self.submit.sampling
        is_fixed = params.temperature == 0.0 and not params.has_penalties
        return SampleRow(params, 0.0, ()) if is_fixed else None

    def sample_row(self) -> SampleRow:
        """How its next token is chosen."""
        if self._fixed_row is not None:
            return self._fixed_row
        params, index = self.submit.sampling, len(self.token_ids) - self.num_prompt_tokens
        recent = tuple(self.token_ids[-params.repeat_last_n :]) if params.has_penalties else ()
        return SampleRow(params, unit(mixed(self._draw_start + index)), recent)

    def block_tables(self) -> tuple[tuple[BlockId, ...], ...]:
        """Per group, ``tables`` as they are now, or the place of ``slot``."""
        if self._table_ids is None:
            tables = {group: tuple(table) for group, table in self.tables.items()}
            for group, place in self.slot.places if self.slot else ():
                tables[group] = (place,)
            self._table_ids = tuple(tables[group] for group in sorted(tables))
        return self._table_ids

    def note_tables(self) -> None:
        """``tables`` or ``slot`` changed."""
        self._table_ids = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def num_prompt_tokens(self) -> int:
        return len(self.submit.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """It wrote something, and its last token is all that is missing."""
        return self.num_generated_tokens > 0 and self.num_missing_tokens == 1

    def move(self, state: RequestState) -> None:
        """Change state, or raise ``IllegalTransition`` and change nothing."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.state.value} -> {state.value}")
        self.state = state
