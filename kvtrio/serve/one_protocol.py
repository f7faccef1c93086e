"""hypercorn's HTTP/1 and nothing else.

HTTP/2 is a reverse proxy's job: hypercorn's has faults under trio, among them that a stream whose
client has gone goes on. But hypercorn changes to it without TLS, too: at a client's ``Upgrade:
h2c``, or when a connection begins with HTTP/2's preface. Here an upgrade is ignored, as HTTP/1.1
permits, and another version is refused.
"""

from typing import Any

from hypercorn.events import Closed
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import ConnectionState

from kvtrio.serve.line import NAME, Line

VERSION_NOT_SUPPORTED = 505
UNFINISHED = ("SEND_BODY", "ERROR")
"""States of a client that has more to say, or said what cannot be read on."""


class OtherVersion(Exception):
    """The request is not HTTP/1."""


class OnlyHTTP1(H11Protocol):
    """hypercorn's, which never becomes another one."""

    async def _check_protocol(self, event: Any) -> None:
        if not event.http_version.startswith(b"1."):
            raise OtherVersion

    async def _handle_events(self) -> None:
        try:
            await super()._handle_events()
        except OtherVersion:
            await self._send_error_response(VERSION_NOT_SUPPORTED)
            await self.send(Closed())


def one_protocol(wrapper: ProtocolWrapper, line: Line | None) -> None:
    """Put ``OnlyHTTP1`` in the place of the fresh protocol of a connection that read nothing. Its
    requests find ``line`` in their scope."""
    wrapper.protocol = OnlyHTTP1(
        wrapper.app,
        wrapper.config,
        wrapper.context,
        wrapper.task_group,
        ConnectionState({**wrapper.state, NAME: line}),
        wrapper.ssl,
        wrapper.client,
        wrapper.server,
        wrapper.send,
    )


def wants_rest(wrapper: ProtocolWrapper) -> bool:
    """The client is within a message of which the answer is there already."""
    # The states are h11's, hypercorn's own dependency; their names are their representation.
    return repr(getattr(wrapper.protocol.connection, "their_state", None)) in UNFINISHED
