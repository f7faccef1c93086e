"""Messages into and out of the core. All frozen; none holds text but ``TokenOut``."""

from typing import Protocol

from attrs import field, frozen

from kvtrio.core.batch import Sampled
from kvtrio.core.explain import CacheReport, Found
from kvtrio.core.heads import Wanted
from kvtrio.core.identity import Segment, TokenTrail
from kvtrio.core.messages import message
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.stored import Incoming, Stored, StoreFault
from kvtrio.core.types import FinishReason, GapCause, RejectReason, RequestId, Retain


@message
class Piece:
    """Text that one more token made ready, and whether a stop string ended the request."""

    text: str = ""
    stopped: bool = False


class Matcher(Protocol):
    """Turns token ids into text and finds stop strings; the core knows no tokenizer.

    Held by one request and used by the core alone. ``push`` returns the text that can no longer
    turn into a stop string; with ``stopped`` it has dropped the stop string and all behind it.
    ``flush`` returns what was held back, when the request ends for another reason.
    """

    def push(self, token_id: int) -> Piece: ...

    def flush(self) -> str: ...


# --- inputs ---


@frozen(kw_only=True)
class Submit:
    """Ask for one generation."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    max_new_tokens: int | None
    """None: until the context is full."""
    sampling: SamplingParams
    matcher: Matcher = field(eq=False)
    eos_ids: frozenset[int] = frozenset()
    place: int | None = None
    """Run in this place, and wait for it if it is taken."""
    namespace: bytes = b""
    """The tenant whose state may be used and will be extended."""
    segments: tuple[Segment, ...] = (Segment(0),)
    """Which adapters from which position on; ascending, the first at 0."""
    reuse: bool = True
    """Look for cached state."""
    retain: Retain = Retain.NORMAL
    retain_s: float = 0.0
    """How long a pin holds, from the end of the request."""
    session: bytes | None = None
    """Opaque digest of the caller's name for the conversation."""
    tenant: bytes = b""
    """Who is served; policies may share among tenants."""
    priority: int = 0
    """Class; a higher number goes first where the policy knows classes."""
    deadline_s: float | None = None
    """It is to be started by then, or refused."""
    purpose: int | None = None
    """Place of the request's purpose in the operator's list."""
    num_recalled_tokens: int = 0
    """Of the prompt: those that kept the ids with which they were generated here."""
    is_copy: bool = False
    """Another request for the same prompt of the same caller stands for it in prompt totals."""
    checkpoints: tuple[int, ...] = ()
    """Positions in the prompt, ascending, where later prompts may part from it: ends of messages.
    Of use to models with recurrent layers."""
    is_silent: bool = False
    """The prompt is to be read and nothing written; the token that comes with it does not count."""


@frozen
class Abort:
    """Forget a request, wherever it is. Unknown or finished ids are no error."""

    request_id: RequestId


@frozen
class Drain:
    """Admit nothing more; what was admitted finishes."""


@frozen
class Tick:
    """Time has passed: end what was to start by now. Sent before each ``schedule``."""


@frozen(kw_only=True)
class Conversation:
    """Tokens, and under what each was or is to be computed."""

    token_ids: tuple[int, ...]
    namespace: bytes = b""
    segments: tuple[Segment, ...] = (Segment(0),)
    """As in ``Submit``."""


@frozen
class Read:
    """Read these out of memory, in front of coming steps. The answer has the same number."""

    number: int
    wanted: tuple[Wanted, ...] = field(eq=False)


@frozen
class Bring:
    """Take in some of a sequence's state, in front of coming steps. The answer, when all is there
    that fits, has the same number."""

    number: int
    trail: TokenTrail = field(eq=False)
    pieces: tuple[Incoming, ...]


@frozen
class Hold:
    """A place where nobody runs is to stand for a sequence."""

    place: int
    trail: TokenTrail = field(eq=False)


@frozen
class Erase:
    """Forget what a place holds of a namespace while nobody runs there, and its state, unless
    others share it."""

    place: int
    namespace: bytes = b""


@frozen
class Written:
    """A ``keeping.Write`` has ended."""

    key: bytes
    state_offset: int
    size: int | None
    """Of the file; None: it failed, and there is none."""


@frozen
class Fetched:
    """What a ``keeping.Fetch`` found, in its order; None where it failed."""

    number: int
    stored: tuple[Stored | None, ...] = field(eq=False)
    faults: tuple[StoreFault, ...] = ()
    """Of those that failed."""


@frozen
class Lost:
    """Something on disk could not be read for a caller."""

    key: bytes
    state_offset: int
    fault: StoreFault


Input = Submit | Abort | Drain | Tick | Read | Bring | Hold | Erase | Written | Fetched | Lost

# --- outputs ---


@frozen
class Rejected:
    request_id: RequestId
    reason: RejectReason
    num_prompt_tokens: int
    limit: int
    """The limit that was met: tokens of context, waiting requests or tokens, or 0."""
    retry_after_s: float = 0.0
    """When it may be worth to try again; for a full queue and a missed deadline."""


@frozen
class Started:
    """The request left the queue; sent when its first step is done."""

    request_id: RequestId
    place: int
    started_s: float
    """When that step was decided, on the core's clock."""


@frozen
class Progress:
    """A chunk of prompt was computed and more is to come."""

    request_id: RequestId
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int


@message
class TokenOut:
    request_id: RequestId
    index: int
    """0 for the first generated token."""
    sampled: Sampled
    text: str


@frozen
class OtherPrompt:
    """The prompt that had the largest part of a step in which others waited."""

    request_id: RequestId
    num_prompt_tokens: int
    start: int
    """Position from which the step read it."""


@frozen
class Gap:
    """Time between two tokens of one request, and what it was spent on."""

    seconds: float
    cause: GapCause
    num_prefill_tokens: int
    """Of others, in the step that ended it."""
    at: int | None = None
    """Tokens of the request itself, prompt and answer, when it waited; None: not known."""
    prompt: OtherPrompt | None = None
    """None: no prompt was read in that step."""


@frozen(kw_only=True)
class Finished:
    """The one terminal event of an admitted request, with its account (times in seconds).

    num_cached + num_computed = num_prompt tokens, unless the request was aborted before its prompt
    was done.
    """

    request_id: RequestId
    reason: FinishReason
    text: str
    """Text that was held back until the end."""
    stopped_by_text: bool
    place: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    """Prompt tokens that were computed."""
    num_generated_tokens: int
    queue_s: float
    prefill_s: float
    """From the start of the first step to the first token."""
    decode_s: float
    cache: CacheReport
    num_recomputed_tokens: int = 0
    """Tokens computed again after a preemption; in none of the other counts."""
    num_preemptions: int = 0
    longest_gap: Gap | None = None
    num_ready_tokens: int = 0
    """Of prompt and answer, those whose state was there: computed here or found."""


@frozen
class Cached:
    """More of a prompt was found."""

    request_id: RequestId
    found: Found
    report: CacheReport


Output = Rejected | Started | Cached | Progress | TokenOut | Finished
