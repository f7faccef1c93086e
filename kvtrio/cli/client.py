"""A small streaming client for /v1/chat/completions, on the standard library."""

import http.client
import json
from collections.abc import Iterator, Sequence
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from attrs import asdict, frozen

CONNECT_S = 10.0
STREAM = b"data: "
END = b"[DONE]"


class ChatError(Exception):
    """The server cannot be reached or refuses; the message is one clear line."""


@frozen
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@frozen
class ChatClient:
    """Talks to one server; a connection per answer, so that leaving one stops it."""

    address: SplitResult
    api_key: str | None = None

    @classmethod
    def for_url(cls, url: str, api_key: str | None = None) -> Self:
        """Raises ``ChatError`` if ``url`` is no http or https address."""
        try:
            address = urlsplit(url if "://" in url else f"http://{url}")
            is_usable = address.scheme in ("http", "https") and bool(address.hostname)
            is_usable = is_usable and (address.port is None or address.port > 0)
        except ValueError:
            is_usable = False
        if not is_usable:
            raise ChatError("--url must look like http://127.0.0.1:8080")
        return cls(address, api_key)

    @property
    def path(self) -> str:
        return self.address.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"

    def stream(self, messages: Sequence[Message]) -> Iterator[str]:
        """Yield the answer's pieces. Raises ``ChatError``, also in the middle."""
        connection = self._connect()
        try:
            yield from _pieces(self._post(connection, messages))
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the connection to {self.address.netloc} broke") from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        secure = self.address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self.address.hostname or "", self.address.port, timeout=CONNECT_S)
        try:
            connection.connect()
        except OSError as error:
            raise ChatError(
                f"no server at {self.address.netloc}; start one with `kvtrio serve`"
            ) from error
        # From here on the server may think for as long as it needs.
        connection.sock.settimeout(None)
        return connection

    def _post(
        self, connection: http.client.HTTPConnection, messages: Sequence[Message]
    ) -> http.client.HTTPResponse:
        body = {"messages": [asdict(message) for message in messages], "stream": True}
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request("POST", self.path, json.dumps(body).encode(), headers)
        except ValueError:
            raise ChatError("--url or --api-key holds signs that cannot be sent") from None
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ChatError(_refusal(response))
        return response


def _pieces(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[str]:
    for line in lines:
        if not line.startswith(STREAM):
            continue
        data = line.removeprefix(STREAM).strip()
        if data == END:
            return
        try:
            texts = list(_texts(json.loads(data)))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ChatError("the server's answer makes no sense") from None
        yield from texts
    raise ChatError("the server ended the answer too early")


def _texts(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise ChatError(f"the server stopped: {event['error'].get('message', 'no reason given')}")
    for choice in event.get("choices", ()):
        if text := choice.get("delta", {}).get("content"):
            yield text


def _refusal(response: http.client.HTTPResponse) -> str:
    try:
        reason = str(json.loads(response.read())["error"]["message"])
    except (ValueError, LookupError, TypeError):
        reason = "no reason given"
    return f"the server answered {response.status}: {reason}"
