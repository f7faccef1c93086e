"""The catalogue of log lines. A field is a number, an enum member, a digest or an error class."""

from kvtrio.core.explain import CachePath, MissReason, TurnClass
from kvtrio.core.types import FinishReason, GapCause, RejectReason, RequestId, Retain
from kvtrio.engine.records import BreachReason
from kvtrio.obs.schema import Digest, Level, event
from kvtrio.obs.server_events import RecordEnd as RecordEnd
from kvtrio.obs.server_events import RecordStart as RecordStart
from kvtrio.obs.server_events import ServerCrash as ServerCrash
from kvtrio.obs.server_events import ServerStart as ServerStart
from kvtrio.obs.server_events import ServerStop as ServerStop
from kvtrio.obs.session_events import SessionChange as SessionChange
from kvtrio.obs.words import AdapterEvent as AdapterEvent
from kvtrio.obs.words import DiscardReason, Library
from kvtrio.obs.words import Section as Section

SCHEMA = "kvtrio.decision/1"
"""Version of the envelope and of every line in it; changes when a field changes its meaning."""


@event("request.done", Level.INFO)
class RequestDone:
    """The one canonical line of an admitted request. Times in seconds."""

    request_id: RequestId
    reason: FinishReason
    stopped_by_text: bool
    place: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    gap_p50_s: float | None
    """Between two tokens of the answer; None: fewer than two."""
    gap_p99_s: float | None
    gap_max_s: float | None
    session: Digest | None
    tenant: Digest | None
    """Who was served: the holder of an API key, or one user among the holder's."""
    purpose: int | None
    """Place in the operator's list (``--purposes``)."""
    retain: Retain
    num_adapters: int
    adapters: Digest | None
    """Of the effective set, by content and scale; GET /lora-adapters says which is whose."""
    path: CachePath
    miss_reason: MissReason
    turn: TurnClass
    num_device_tokens: int
    """Reused from the device."""
    num_host_tokens: int
    """Reused from RAM."""
    num_disk_tokens: int
    """Reused from disk: from blocks that came from there and were not used since."""
    num_matched_tokens: int
    """Known when the request started."""
    num_other_tokens: int
    """The longest match under another adapter set."""
    divergence_at: int | None
    """First position at which something other than what was wanted, or nothing, was known."""
    evicted_age_s: float | None
    num_recalled_tokens: int
    """Prompt tokens that kept the ids with which they were generated."""
    is_copy: bool
    """One more answer to a prompt that counts with its first answer."""
    num_recomputed_tokens: int
    """Computed again after a preemption; in none of the other counts."""
    num_preemptions: int
    longest_gap_s: float | None
    """As the reader saw it."""
    longest_gap_cause: GapCause | None
    longest_gap_prefill_tokens: int | None
    """Of others' prompts, in the step that ended it."""
    longest_gap_at: int | None
    """Tokens of the request itself, prompt and answer, when it waited."""
    longest_gap_request_id: RequestId | None
    """Whose prompt had the largest part of that step."""
    longest_gap_prompt_tokens: int | None
    """Length of that prompt."""
    longest_gap_prompt_at: int | None
    """Position in that prompt from which the step read it."""


@event("request.rejected", Level.INFO)
class RequestRejected:
    """A request was not admitted."""

    request_id: RequestId
    reason: RejectReason
    num_prompt_tokens: int
    limit: int
    """The one that was met: tokens of context, waiting requests or tokens, or 0."""
    retry_after_s: float


@event("cache.match", Level.INFO)
class CacheMatch:
    """A request found state, at its start or, computed meanwhile by others, at a later chunk."""

    request_id: RequestId
    num_tokens: int
    """More than it had."""
    num_host_tokens: int
    """Of these, from RAM."""
    num_disk_tokens: int
    """Of these, from disk."""
    path: CachePath
    """So far."""
    miss_reason: MissReason
    turn: TurnClass
    num_matched_tokens: int
    num_other_tokens: int


@event("cache.divergence", Level.INFO)
class CacheDivergence:
    """Where, in the conversation that a request sent, the reuse ended and why."""

    request_id: RequestId
    miss_reason: MissReason
    position: int
    """In tokens."""
    message_index: int | None
    section: Section


@event("cache.restore", Level.INFO)
class CacheRestore:
    """Blocks came back to the device, or came into memory."""

    num_blocks: int
    """From RAM."""
    num_disk_blocks: int
    """From disk, or with a session."""


@event("cache.evict", Level.INFO)
class CacheEvict:
    """Blocks left the device for RAM, or left the cache."""

    num_demoted_blocks: int
    num_dropped_blocks: int
    num_dropped_tokens: int
    longest_idle_s: float
    """Longest time since its last use among the dropped."""


@event("cache.discard", Level.INFO)
class CacheDiscard:
    """What a request computed was not put into the cache; or a block or state on disk was of no use
    and is removed."""

    request_id: RequestId | None
    why: DiscardReason
    num_tokens: int | None


@event("tier.usage", Level.INFO)
class TierUsage:
    """How full the tiers are; now and then. Blocks are those that requests hold or the cache has;
    limits are in ``server.start``."""

    num_device_blocks: int
    num_host_blocks: int
    num_device_states: int
    """Of recurrent layers; 0 without such."""
    num_host_states: int
    num_disk_bytes: int
    """Of the disk tier's files; 0 without one."""
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    """Of the prompts in the queue."""


@event("adapter.change", Level.INFO)
class AdapterChange:
    """An adapter came, went or changed; later requests are affected, running ones are not."""

    what: AdapterEvent
    name: Digest
    content: Digest
    """As ``request.done`` shows the adapter alone at scale 1."""
    scale: float
    """Global."""
    num_bytes: int
    num_loaded: int
    """Adapters that requests may name now."""


@event("sched.step", Level.INFO)
class SchedStep:
    """One forward pass. Sampled at level info; every one at level debug."""

    step: int
    num_chunks: int
    """Requests in the batch."""
    num_prefill_tokens: int
    num_decode_rows: int
    num_running: int
    """After the step, as ``num_waiting``."""
    num_waiting: int
    duration_s: float
    predicted_s: float
    """What the cost model expected, with its margin."""
    limit_s: float
    """What it may take: the gap where an answer streams, else what keeps joining quick."""
    is_breach: bool
    """It took longer; always written."""
    breach: BreachReason | None
    is_slow: bool
    """Written because of its duration, not by sampling."""


@event("sched.cost", Level.INFO)
class SchedCost:
    """What the cost model has learned, in seconds per unit; now and then, and at the end."""

    num_observed: int
    """Steps."""
    margin: float
    """What predictions are multiplied by."""
    base_s: float
    prefill_token_s: float
    prefill_context_s: float
    """Per token of prefill and position it attends to."""
    decode_row_s: float
    decode_context_s: float
    adapter_s: float
    prefill_chunk_s: float
    """Per request whose prompt is read, beside its tokens."""


@event("loop.stall", Level.WARNING)
class LoopStall:
    """A task kept the event loop busy; nobody else was served meanwhile."""

    held_s: float


@event("library.note", Level.WARNING)
class LibraryNote:
    """A library logged something. Its words may quote a user, so only their origin is kept."""

    library: Library
    severity: Level
    line: int
    """In the library's source."""
    error: type[BaseException] | None


CATALOGUE = (
    ServerStart,
    ServerStop,
    ServerCrash,
    RecordStart,
    RecordEnd,
    RequestDone,
    RequestRejected,
    CacheMatch,
    CacheDivergence,
    CacheRestore,
    CacheEvict,
    CacheDiscard,
    TierUsage,
    AdapterChange,
    SessionChange,
    SchedStep,
    SchedCost,
    LoopStall,
    LibraryNote,
)
