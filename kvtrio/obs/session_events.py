"""Log lines about saved sessions; part of the catalogue in ``events``."""

from kvtrio.core.stored import StoreFault
from kvtrio.obs.schema import Digest, Level, event
from kvtrio.obs.words import SessionEvent


@event("session.change", Level.INFO)
class SessionChange:
    """A conversation was saved or restored, or could not be."""

    what: SessionEvent
    name: Digest
    """As ``request.done`` has it of requests that name the session."""
    fault: StoreFault | None
    """None: it was done. Then the rest are counts of the session, else 0."""
    num_tokens: int
    num_states: int
    """Checkpoints."""
    num_bytes: int
    num_new_bytes: int
    """Written: state that other sessions have is not written again."""
    duration_s: float
    """From the asking; a place that was busy included."""
