"""The lines of a scenario: traffic as times, lengths and what is equal to what; no text, no token.

1. A line is a JSON object with a ``kind``. The first is the header; requests follow in the order of
   their admission, numbered from 0; adapters, actions and expectations stand between them.
2. No field can hold a caller's words: what is not a number, a truth value or a member of an enum is
   an alias (a letter and a number), or one of the operator's own words in the header.
3. A prompt is a row of pieces. A ``Ref`` names tokens of an earlier request; so equal tokens stay
   equal, and different ones different, whatever tokens a replay puts in their place.

``scenarios/README.md`` says it for people, ``scenarios/scenario.schema.json`` for programs.
"""

from enum import Enum
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from kvtrio.core.explain import CachePath, MissReason
from kvtrio.core.types import Retain

SCHEMA: Final = "kvtrio.scenario/1"
MAX_PIECES = 16_384
"""Of one prompt."""
MAX_TOKENS = 10_000_000
"""Of one prompt or answer."""
MAX_REQUESTS = 10_000_000
MAX_ADAPTERS = 4096
"""In one scenario; and of a request, 64."""
MAX_PURPOSES = 65_536
MAX_SECONDS = 1e11

Number = Annotated[int, Meta(ge=0, le=MAX_REQUESTS)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Length = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Alias = Annotated[str, Meta(pattern="^a[0-9]{1,6}$")]
Scale = Annotated[float, Meta(ge=-100, le=100)]
Hex = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
Slug = Annotated[str, Meta(pattern="^[a-z0-9-]{1,64}$")]
Word = Annotated[str, Meta(min_length=1, max_length=64)]
WholeNumber = Annotated[int, Meta(ge=0, le=2**53 - 1)]


class Part(Enum):
    """Of an earlier request, what a reference means."""

    PROMPT = "prompt"
    OUTPUT = "output"


class Ref(Struct, frozen=True, tag_field="kind", tag="ref", forbid_unknown_fields=True):
    """Tokens of an earlier request."""

    request: Number
    part: Part
    start: Tokens
    length: Length


class Fresh(Struct, frozen=True, tag_field="kind", tag="fresh", forbid_unknown_fields=True):
    """Tokens that were not seen before. The first one differs from all that followed the same
    tokens before."""

    length: Length


class Block(Struct, frozen=True, tag_field="kind", tag="block", forbid_unknown_fields=True):
    """The first ``length`` tokens of the row that ``digest`` stands for, as in traces of blocks."""

    digest: WholeNumber
    length: Length


Piece = Ref | Fresh | Block


class Use(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An adapter of a request."""

    alias: Alias
    scale: Scale = 1.0
    start: Tokens = 0
    """Position from which on it applies, for adapters that are invoked in the prompt."""


class Beginning(Struct, frozen=True, forbid_unknown_fields=True):
    """The first tokens of an earlier request's answer."""

    request: Number
    length: Length


class Origin(Enum):
    """Where a scenario came from."""

    RECORDED = "recorded"
    MADE = "made"
    MOONCAKE = "mooncake"
    AZURE = "azure"
    LOG = "log"


class Header(
    Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    tag="header",
    forbid_unknown_fields=True,
):
    """The first line."""

    schema: Literal["kvtrio.scenario/1"] = SCHEMA
    origin: Origin
    max_context: Length
    """Prompt and answer together fit into so many tokens."""
    purposes: Annotated[tuple[Word, ...], Meta(max_length=MAX_PURPOSES)] = ()
    """The operator's words; requests give places in this list."""
    name: Slug | None = None
    num_places: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    """Of the server that recorded it, or that it is made for."""
    started_s: Seconds | None = None
    """Unix time of second 0, for recordings."""
    seed: WholeNumber | None = None
    """With which it was made."""
    is_exact: bool = True
    """False where prompts had to be guessed, since the source has lengths only."""


class Adapter(
    Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    tag="adapter",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """An adapter, before its first use."""

    alias: Alias
    content: Hex | None = None
    """As ``GET /lora-adapters`` of the recording server, and its log, show it."""


class Request(
    Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    tag="request",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """One admitted request. Times in seconds, from the start of the scenario."""

    id: Number
    at_s: Seconds
    """Never earlier than the one before."""
    session: Number | None = None
    turn: Number = 0
    """Within the session."""
    is_named: bool = False
    """The caller named the session; otherwise it was found out from the prompts."""
    purpose: Annotated[int, Meta(ge=0, lt=MAX_PURPOSES)] | None = None
    retain: Retain = Retain.NORMAL
    retain_s: Seconds = 0.0
    """For a pin."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    tenant: Number = 0
    """Who is served."""
    namespace: Number = 0
    """Whose state may be used; 0: everybody's."""
    adapters: Annotated[tuple[Use, ...], Meta(max_length=64)] = ()
    """What it got."""
    is_global: bool = False
    """It got them because the global scales were so, and said nothing itself."""
    reuse: bool = True
    """False: cached state was not to be used."""
    output_tokens: Tokens
    """What it wrote until its end, or until its client left."""
    is_silent: bool = False
    """The prompt was to be read and nothing written."""
    left_s: Seconds | None = None
    """After so long its client left; None: it stayed."""
    ready_tokens: Tokens | None = None
    """Of a request whose client left: so much of prompt and answer was computed or found by then.
    None: not known."""
    think_s: Seconds | None = None
    """Between the end of the session's request before and this one."""
    same_as: Number | None = None
    """An earlier request with the same prompt, whose answer began with this one or the other way
    round."""
    begins_as: Beginning | None = None
    """An earlier request with the same prompt, whose answer was the same for longer, and then
    differed."""
    checkpoints: Annotated[tuple[Tokens, ...], Meta(max_length=4096)] = ()
    """Ends of messages in the prompt, for models with recurrent layers."""
    prompt: Annotated[tuple[Piece, ...], Meta(min_length=1, max_length=MAX_PIECES)]
    log_id: WholeNumber | None = None
    """``request_id`` in the log of the server that recorded it."""

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.length for piece in self.prompt)

    @property
    def sampled_tokens(self) -> int:
        """To sample for as much state as it left. The last token that is sampled is never computed;
        a client mostly leaves while its last one is, and what comes of that nobody gets."""
        if self.left_s is None:
            return self.output_tokens
        if self.ready_tokens is None:
            return self.output_tokens + bool(self.output_tokens)
        return max(self.output_tokens, self.ready_tokens - self.prompt_tokens + 1)

    @property
    def stop(self) -> int | None:
        """The position in its prompt up to which it was read, if its client left then."""
        ready = self.ready_tokens or 0
        return ready if self.left_s is not None and 0 < ready < self.prompt_tokens else None


class What(Enum):
    """What an operator or a client does beside sending requests."""

    SCALES = "scales"
    """Set the global scales; adapters that are not named get 0."""
    SAVE = "save"
    """Save the place in which the session ran last."""
    RESTORE = "restore"
    ERASE = "erase"
    RESTART = "restart"
    """Stop the server and start it again with the same settings."""


class Action(
    Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    tag="action",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Done when all requests before it have ended, and before the next one is sent."""

    at_s: Seconds
    what: What
    scales: Annotated[tuple[Use, ...], Meta(max_length=64)] = ()
    session: Number | None = None


class Expect(
    Struct,
    frozen=True,
    kw_only=True,
    tag_field="kind",
    tag="expect",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """What must come out for one request; stands behind it. Absent: anything may."""

    request: Number
    min_cached: Tokens | None = None
    max_cached: Tokens | None = None
    paths: tuple[CachePath, ...] = ()
    """Any of them."""
    reasons: tuple[MissReason, ...] = ()
    max_first_token_s: Seconds | None = None
    """From sending; of use in virtual time, and where a machine is known."""
    max_gap_s: Seconds | None = None
    output_as: Number | None = None
    """It answers what that request answered."""
    output_unlike: Number | None = None


Line = Header | Adapter | Request | Action | Expect
