"""What is closed when a request is over, however it ends."""

from contextlib import ExitStack
from typing import Any, cast

import trio
from quart import Request
from quart_trio.asgi import TrioASGIHTTPConnection

CLEANUP = "kvtrio.cleanup"
"""Key in the ASGI scope: an ExitStack that is closed when the request is over."""


def cleanup(request: Request) -> ExitStack:
    stack = cast(dict[str, Any], request.scope)[CLEANUP]
    assert isinstance(stack, ExitStack)
    return stack


class ClosingConnection(TrioASGIHTTPConnection):
    """A request that cleans up after itself.

    The streaming generator closes its generation too, and sooner; but one that was never started,
    since the client left before the first byte, runs no ``finally``.
    """

    async def handle_request(  # type: ignore[override]  # quart-trio's own has a nursery too
        self, nursery: trio.Nursery, request: Request, send: Any
    ) -> None:
        with ExitStack() as stack:
            cast(dict[str, Any], request.scope)[CLEANUP] = stack
            await super().handle_request(nursery, request, send)
