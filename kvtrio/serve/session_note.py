"""What an answer tells of the session that its request named."""

from typing import Any

from attrs import define

from kvtrio.serve.errors import ErrorSpec


@define
class SessionNote:
    """What became of a request's session."""

    num_restored: int = 0
    num_saved: int | None = None
    """None: it was not to be saved, or could not be."""
    fault: ErrorSpec | None = None

    def told(self) -> dict[str, Any]:
        return {
            "restored": self.num_restored,
            "saved": self.num_saved,
            "error": self.fault.code if self.fault else None,
        }
