"""Log lines about the server's life; part of the catalogue in ``events``."""

from kvtrio.obs.schema import Digest, Level, event
from kvtrio.obs.words import (
    BackendKind,
    CacheKind,
    ComputeType,
    DeviceKind,
    InstructionSet,
    RecordingEnd,
    TemplateSource,
)


@event("server.start", Level.INFO)
class ServerStart:
    """The server listens; sizes are those that were allocated."""

    port: int

    model: Digest
    """Of the model file's name."""
    version_major: int
    version_minor: int
    version_patch: int
    device: DeviceKind
    backend: BackendKind
    compute_type: ComputeType
    key_type: CacheKind
    value_type: CacheKind
    instruction_set: InstructionSet | None
    """None: not compiled by us."""
    num_converted: int
    """Tensors of a type that the backend does not compute with, kept in another."""
    template: TemplateSource
    num_threads: int | None
    num_places: int
    max_context: int
    """Longest request, in tokens."""
    max_waiting: int
    max_batch_tokens: int
    max_gap_s: float
    """What a step may take while an answer streams."""
    block_size: int
    """Tokens per block."""
    num_blocks: int
    """Per group of layers that see all tokens, on the device."""
    num_host_blocks: int
    """The same in RAM."""
    num_window_blocks: int
    """Per group of layers that see a window of the last tokens, on the device."""
    num_host_window_blocks: int
    """The same in RAM."""
    num_groups: int
    num_state_slots: int
    """Per group of recurrent layers, on the device: one for each place, the others checkpoints."""
    num_host_state_slots: int
    """The same in RAM, all checkpoints."""
    bytes_per_state: int
    """Of one slot, in all groups; 0: the model has no recurrent layers, and a request may go on
    from any position."""
    shared_ram_bytes: int
    """What all kinds of state share in RAM: the numbers there are then what each could have alone;
    0: each has its share."""
    shared_block_bytes: int
    """Of one block there, of layers that see all tokens."""
    shared_part_bytes: int
    """The same of layers that see a window."""
    pool_bytes: int
    weight_bytes: int
    num_adapters: int
    load_s: float
    max_disk_bytes: int
    """Of the disk tier; 0: there is none."""
    num_disk_entries: int
    """Blocks and states that an earlier run left there."""
    num_disk_bytes: int
    """Of their files."""
    has_sessions: bool
    """Conversations can be saved: there is a folder for them."""


@event("server.stop", Level.INFO)
class ServerStop:
    """The last line of a clean run."""

    uptime_s: float
    num_requests: int
    num_steps: int
    num_lost_lines: int
    """Log lines that could not be written."""


@event("server.crash", Level.ERROR)
class ServerCrash:
    """The last line of a run that ended by a fault of ours."""

    error: type[BaseException]
    uptime_s: float


@event("record.start", Level.INFO)
class RecordStart:
    """From here on requests are recorded: times, lengths and what is equal to what."""

    max_bytes: int
    max_s: float


@event("record.end", Level.INFO)
class RecordEnd:
    """The recording is over, and its file closed."""

    why: RecordingEnd
    num_requests: int
    """That are in the file."""
    num_lost: int
    """Requests that were taken in and are not in it."""
    num_bytes: int
    error: type[BaseException] | None
