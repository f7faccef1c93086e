"""The fixed words of log lines."""

from enum import Enum


class Library(Enum):
    """Whose message was left out."""

    HYPERCORN = "hypercorn"
    QUART = "quart"
    TRIO = "trio"
    TORCH = "torch"
    KVTRIO = "kvtrio"
    WARNINGS = "py"
    OTHER = "other"


class DeviceKind(Enum):
    """What computes."""

    CPU = "cpu"
    CUDA = "cuda"
    OTHER = "other"


class BackendKind(Enum):
    """Whose arithmetic it is."""

    CPU = "cpu"
    CUDA = "cuda"
    TORCH = "torch"
    SIM = "sim"
    OTHER = "other"


class ComputeType(Enum):
    """Type of matrices in memory."""

    F32 = "f32"
    BF16 = "bf16"
    FILE = "file"
    """Each as the model file has it."""
    OTHER = "other"


class CacheKind(Enum):
    """Type of keys or values in the KV cache."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    OTHER = "other"


class InstructionSet(Enum):
    """What compiled kernels are made for."""

    AVX512 = "avx512"
    AVX2 = "avx2"
    PORTABLE = "portable"


class Section(Enum):
    """Which part of a prompt a position lies in."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    OTHER = "other"
    """A message of another role."""
    TAIL = "tail"
    """Behind the last message: where the answer begins."""
    PROMPT = "prompt"
    """The prompt was not made of messages."""


class DiscardReason(Enum):
    """Why state was not kept."""

    AUXILIARY = "auxiliary"
    """The request asked for it."""
    # As ``stored.StoreFault`` has them.
    NOT_FOUND = "not_found"
    NOT_REGULAR = "not_regular"
    TRUNCATED = "truncated"
    DAMAGED = "damaged"
    NEWER = "newer"
    FOREIGN = "foreign"
    TEMPORARY = "temporary"
    """Left behind by a process that died while it wrote."""
    LIMIT = "limit"
    """It does not fit under the limit that is set now."""
    NO_SPACE = "no_space"
    IO = "io"


class AdapterEvent(Enum):
    """What happened to an adapter."""

    LOADED = "loaded"
    REPLACED = "replaced"
    """Another one took its name."""
    SCALED = "scaled"
    """Its global scale changed."""
    UNLOADED = "unloaded"
    """Its name is gone; requests that use it go on."""
    FREED = "freed"
    """Nobody uses it any more: its memory was given back."""


class SessionEvent(Enum):
    """What happened to a saved session."""

    SAVED = "saved"
    RESTORED = "restored"


class TemplateSource(Enum):
    """Where the chat template comes from."""

    MODEL = "model"
    OVERRIDE = "override"
    DEFAULT = "default"
    """The model has none."""


class RecordingEnd(Enum):
    """Why a recording ended."""

    STOPPED = "stopped"
    """With the server."""
    TIME = "time"
    SIZE = "size"
    BEHIND = "behind"
    """More requests came than could be compared with each other."""
    FILE = "file"
    """The file could not be written."""
    FAULT = "fault"
    """Of ours; the server goes on."""
