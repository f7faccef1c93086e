"""Server-sent events: the bytes of a stream."""

import msgspec

MIME_TYPE = "text/event-stream"
HEADERS = {
    "Cache-Control": "no-cache",
    # nginx collects a response before it passes it on, unless told otherwise.
    "X-Accel-Buffering": "no",
}
PING = b":\n\n"
"""A comment: every client skips it, every proxy counts it as life."""
DONE = b"data: [DONE]\n\n"
"""OpenAI's end of stream; llama-server's own routes have none."""

_encoder = msgspec.json.Encoder()


def frame(payload: object) -> bytes:
    """Return one event with ``payload`` as JSON (no line break can occur in it)."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"
