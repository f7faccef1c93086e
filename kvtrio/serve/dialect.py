"""What an answer looks like: one protocol, three dialects (native, text, chat)."""

from typing import Any, Protocol

from attrs import frozen

from kvtrio import __version__
from kvtrio.serve.choice import Delta
from kvtrio.serve.served import ServedModel

Payload = dict[str, Any]

BUILD = f"b{__version__}-kvtrio"
"""``system_fingerprint`` and ``build_info``; clients of llama-server expect a leading b."""


class Dialect(Protocol):
    """Renders one generation; used by one answer, fed with every delta in order."""

    @property
    def end(self) -> bytes:
        """What follows the last frame."""
        ...

    def frames(self, delta: Delta) -> list[Payload]:
        """Return the events that a delta is worth; often one, sometimes none."""
        ...

    def last_frames(self) -> list[Payload]:
        """Return the events after every choice has ended."""
        ...

    def body(self) -> Any:
        """Return the plain answer, once every choice has ended."""
        ...


@frozen(kw_only=True)
class Origin:
    """What all parts of one answer share."""

    id: str
    created: int
    """Unix time, seconds."""
    model: ServedModel
    model_name: str
    """What the answer calls the model: its own name, or that of the adapter that was asked for."""
    n_ctx: int

    def envelope(self, kind: str) -> Payload:
        """Return the members around OpenAI's ``choices``."""
        return {
            "id": f"chatcmpl-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model_name,
            "system_fingerprint": BUILD,
        }
