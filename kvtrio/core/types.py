"""Words that every layer shares: ids and closed enums."""

from enum import Enum
from typing import NewType

RequestId = NewType("RequestId", int)
"""One generation, unique for the life of the process."""
BlockId = NewType("BlockId", int)
"""One run of ``block_size`` token places in one group's pool."""


class FinishReason(Enum):
    """Why a request ended. OpenAI's names where they exist."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    """It did not start in time."""
    ERROR = "error"
    """The model gave no finite numbers for its next token."""
    NO_MEMORY = "no_memory"
    """A step had no memory for its part, not even alone."""


class GapCause(Enum):
    """What the longest gap between two of a request's tokens was spent on."""

    STEP = "step"
    """The step itself: decoding rows."""
    PREFILL = "prefill"
    """Others' prompts in the same step."""
    MOVE = "move"
    """State moved between memories."""
    PREEMPTED = "preempted"
    READER = "reader"
    """The tokens were ready and lay unread; found by the engine, never by the core."""


class RequestState(Enum):
    """Where a request is; ``core.request.TRANSITIONS`` says which moves are legal."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class StateClass(Enum):
    """What a group of layers keeps, and so where a request may resume."""

    TOKEN = "token"
    """Full attention, MLA: any position."""
    WINDOW = "window"
    """Sliding window: any position whose preceding window is present."""
    POINT = "point"
    """Recurrent state: exact checkpoints only."""


class RejectReason(Enum):
    """Why a request was not admitted."""

    TOO_LONG = "too_long"
    EMPTY = "empty"
    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS = "queue_tokens"
    """The prompts that wait are too long together."""
    DEADLINE = "deadline"
    """It could not start in time."""
    DRAINING = "draining"


class Tier(Enum):
    """Where state lies, nearest first."""

    DEVICE = "device"
    HOST = "ram"

    # Enum hashes names, in Python; tiers are keys on the path of every block.
    __hash__ = object.__hash__


class Retain(Enum):
    """What a request asks for its state."""

    AUXILIARY = "auxiliary"
    """Do not keep it: health probes, titles, recaps."""
    NORMAL = "normal"
    PIN = "pin"
    """Keep it for a time, as long as pins leave room for others."""
