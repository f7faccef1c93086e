"""A request after all checks: what to compute and what to tell. Nothing here can fail any more, but
for the adapters: which there are is looked up at admission."""

from attrs import evolve, field, frozen

from kvtrio.core.identity import Segment
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import Retain
from kvtrio.model.matcher import TextMatcher
from kvtrio.model.recall import Encoded
from kvtrio.serve.adapters import Scales, Selection
from kvtrio.serve.alignment import Alignment
from kvtrio.serve.outline import Outline


@frozen(kw_only=True)
class Wants:
    """How the caller would like to be told."""

    stream: bool = False
    include_usage: bool = False
    tokens: bool = False
    progress: bool = False
    timings_per_token: bool = False
    heartbeat_s: float | None = None
    """None: the server's own."""
    response_fields: tuple[str, ...] = ()


@frozen
class Owner:
    """Whose state and whose saved sessions they are: an API key's with a salt, or everybody's."""

    namespace: bytes = b""
    """Of state; changes with each start of a server that keeps nothing on disk."""
    tag: bytes = b""
    """Of sessions; the same on every server."""


@frozen
class NamedSession:
    """A session that a request goes on with."""

    name: str
    is_to_be_saved: bool


@frozen(kw_only=True)
class Keeping:
    """Whose state it is, what of it may be used, and what becomes of it."""

    owner: Owner = field(factory=Owner)
    reuse: bool = True
    retain: Retain = Retain.NORMAL
    retain_s: float = 0.0
    session: bytes | None = None
    """The conversation's name as a digest."""
    named: NamedSession | None = None
    purpose: int | None = None

    @property
    def namespace(self) -> bytes:
        return self.owner.namespace


@frozen(kw_only=True)
class Queueing:
    """Whose turn it is, and how long it may wait."""

    tenant: bytes = b""
    priority: int = 0
    deadline_s: float | None = None
    """It is to be started by then, on the engine's clock."""
    predict: bool = False
    """The caller wants to know when the first token was expected."""


@frozen(kw_only=True)
class Job:
    """One HTTP request for text: ``n`` answers for each of its prompts."""

    prompts: tuple[tuple[int, ...], ...]
    message_ends: tuple[int, ...] = ()
    """Positions in the prompt of a chat, where a model with recurrent layers should be able to
    resume; see ``message_ends``."""
    prompt_field: str
    """Where the prompt came from, for error texts."""
    n: int
    max_new_tokens: int | None
    """As asked for; None: until the context is full."""
    sampling: SamplingParams
    is_seeded: bool
    """The caller chose the seed."""
    ignore_eos: bool
    eos_ids: frozenset[int]
    stops: tuple[str, ...]
    matchers: tuple[TextMatcher, ...]
    """One for each answer; made here because large stop sets take a while."""
    alignments: tuple[Alignment, ...] = ()
    """One for each answer, if log-probabilities are wanted."""
    place: int | None
    wants: Wants
    prompt_texts: tuple[str, ...] = ()
    """The prompts as text, special tokens visible, for answers that repeat them."""
    keeping: Keeping = field(factory=Keeping)
    queueing: Queueing = field(factory=Queueing)
    encoded: tuple[Encoded | None, ...] = ()
    """How each prompt that is one text was encoded, to remember its answers."""
    is_forced: bool = False
    """The caller shaped the choice of tokens: the answers are not remembered, for they would change
    how others' prompts are tokenised."""
    outline: Outline | None = None
    """Of a prompt made of messages."""
    lora: Scales | None = None
    """What the request says of adapters."""
    model_name: str | None = None
    selection: Selection = field(factory=Selection)
    """What it gets; see ``admitted``."""
    segments: tuple[tuple[Segment, ...], ...] = ()
    """Of each prompt."""

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.n

    @property
    def is_silent(self) -> bool:
        """The caller wants the prompt to be read and nothing written. The engine has to sample to
        be done with a prompt; that token is dropped."""
        return self.max_new_tokens == 0

    @property
    def is_to_be_saved(self) -> bool:
        """As a session, with its answer."""
        named = self.keeping.named
        return named is not None and named.is_to_be_saved

    def admitted(self, selection: Selection) -> "Job":
        """The job under the adapters that are its from now on."""
        segments = tuple(selection.segments(prompt) for prompt in self.prompts)
        return evolve(self, selection=selection, segments=segments)

    def num_recalled_of(self, index: int) -> int:
        """Of the prompt of answer ``index``: tokens that kept their generated ids."""
        encoded = self.encoded[index // self.n]
        return encoded.num_recalled_tokens if encoded is not None else 0

    def sampling_of(self, index: int) -> SamplingParams:
        """Answer ``index``'s settings: the answers to one prompt have seeds one apart, and a chosen
        seed gives each prompt of a batch what it would give the prompt alone."""
        offset = index % self.n if self.is_seeded else index
        return evolve(self.sampling, seed=self.sampling.seed + offset)
