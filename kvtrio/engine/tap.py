"""Who may see requests with their tokens, beside their readers."""

from typing import Protocol

from kvtrio.core.events import Finished, Submit, TokenOut


class Tap(Protocol):
    """Called synchronously on the loop; must not block. ``now`` is the engine's clock.

    Unlike an ``Observer`` it is shown tokens, so it must keep them to itself.
    """

    def admitted(self, submit: Submit, now: float) -> None:
        """A request was admitted; in this order."""
        ...

    def said(self, output: TokenOut | Finished, now: float) -> None:
        """A request got a token, or ended."""
        ...
