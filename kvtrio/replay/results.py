"""What a replay found out: JSON lines that ``kvtrio analyze`` reads beside logs.

The first line is a ``run``, then a ``result`` for each request in the order in which they ended, a
``verdict`` for each expectation, and an ``end``. A file without ``end`` is what a killed replay
left, and is as valid. Names are those of the log's ``request.done`` where they mean the same. All
times are in seconds, on the replay's own clock; None is what the server does not tell.
"""

from collections.abc import Iterator
from enum import Enum
from typing import BinaryIO, Final, Literal

import msgspec
from msgspec import Struct

from kvtrio.core.explain import CachePath, MissReason, TurnClass
from kvtrio.core.types import Retain
from kvtrio.replay.scenario import Use

SCHEMA: Final = "kvtrio.replay/1"
MAX_LINE_BYTES = 16 << 20


class ResultsError(ValueError):
    """A file holds no results; the message is one clear line."""


class ServerKind(Enum):
    """What answered."""

    KVTRIO = "kvtrio"
    LLAMA = "llama-server"
    OPENAI = "openai"


class Api(Enum):
    """How prompts went there."""

    TOKENS = "tokens"
    """Token ids, to /completion: exact."""
    WORDS = "words"
    """Text, to /v1/completions."""
    CHAT = "chat"
    """Text, as one message to /v1/chat/completions."""


class Pacing(Enum):
    """When requests are sent."""

    OPEN = "open"
    """At the recorded times, divided by the speed."""
    CLOSED = "closed"
    """When the session's answer before has ended and its user has thought."""
    SERIAL = "serial"
    """One after the other, in the recorded order."""


class Outcome(Enum):
    """What became of a request."""

    DONE = "done"
    LEFT = "left"
    """Its client left, as in the scenario."""
    REFUSED = "refused"
    """Status 429 or 503."""
    FAILED = "failed"
    """Another status, or no whole answer."""
    CUT = "cut"
    """The replay was stopped while it ran."""


class Run(Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """The first line."""

    schema: Literal["kvtrio.replay/1"] = SCHEMA
    scenario: str
    """SHA-256 of the scenario file."""
    num_requests: int
    """To be sent."""
    pacing: Pacing
    speed: float
    sample: float
    """Share of the sessions that are played."""
    seed: int
    server: ServerKind
    api: Api
    started_s: float
    """Unix time of second 0."""


class Result(Struct, frozen=True, kw_only=True, tag_field="kind", tag="result", omit_defaults=True):
    """One request, as its client saw it."""

    id: int
    """In the scenario."""
    session: int | None = None
    scenario_turn: int = 0
    purpose: int | None = None
    retain: Retain = Retain.NORMAL
    tenant: int = 0
    adapters: tuple[Use, ...] = ()
    planned_s: float
    """When it was to be sent, from the start of the replay."""
    sent_s: float
    first_token_s: float | None = None
    """From sending; as ``total_s``."""
    total_s: float
    gap_p50_s: float | None = None
    """Between two of its tokens; None with fewer than two."""
    gap_p99_s: float | None = None
    gap_max_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    """Between any two of its tokens, in order, to the tenth of a millisecond."""
    outcome: Outcome
    status: int
    """Of HTTP; 0: there was none."""
    num_prompt_tokens: int | None = None
    """As the server counts, like those below."""
    num_cached_tokens: int | None = None
    num_generated_tokens: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    path: CachePath | None = None
    miss_reason: MissReason | None = None
    turn: TurnClass | None = None
    num_matched_tokens: int | None = None
    divergence_at: int | None = None


class Verdict(Struct, frozen=True, kw_only=True, tag_field="kind", tag="verdict"):
    """Whether an expectation came true."""

    request: int
    what: str
    """A field of ``scenario.Expect``."""
    is_met: bool | None
    """None: it could not be told."""


class End(Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """The last line."""

    is_complete: bool
    """False: it was stopped before all were sent and answered."""
    num_results: int
    wall_s: float


Line = Run | Result | Verdict | End

_decode = msgspec.json.Decoder(Line).decode
_encode = msgspec.json.Encoder().encode


def encode_line(line: Line) -> bytes:
    """With its line end."""
    return _encode(line) + b"\n"


def read_results(file: BinaryIO) -> Iterator[Line]:
    """The lines, one at a time, without a last one that was cut off; raises ``ResultsError``."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if not raw.endswith(b"\n") and len(raw) <= MAX_LINE_BYTES:
            return
        try:
            line: Line = _decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ResultsError(f"line {number}: not a line of a {SCHEMA} file") from None
        if isinstance(line, Run) != (number == 1):
            raise ResultsError(f"line {number}: the first line, and no other, is the run")
        yield line
