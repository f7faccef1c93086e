"""One generation to one HTTP answer, streamed or whole. The same deltas feed both."""

import logging
from collections.abc import AsyncGenerator
from functools import partial
from math import inf

import trio

from kvtrio.engine.offload import Offload
from kvtrio.serve import sse
from kvtrio.serve.choice import Tokens
from kvtrio.serve.dialect import Dialect
from kvtrio.serve.errors import INTERNAL, ApiError
from kvtrio.serve.generation import Generation
from kvtrio.serve.line import Line
from kvtrio.serve.replies import encode_json

log = logging.getLogger(__name__)

FLUSH_BYTES = 65536


async def whole(generation: Generation, dialect: Dialect, offload: Offload) -> bytes:
    """Wait for the end and return the body; raises ``ApiError``."""
    generation.tell_at_once(lambda delta: None, lambda: True)
    while not generation.is_over:
        await generation.read(inf)
    # With log-probabilities this is a hundred thousand small objects.
    return await offload.run(_body, dialect)


def _body(dialect: Dialect) -> bytes:
    return encode_json(dialect.body())


async def events(
    generation: Generation, dialect: Dialect, heartbeat_s: float, line: Line | None
) -> AsyncGenerator[bytes, None]:
    """Yield the stream's bytes, but for tokens that went over ``line``; after ``heartbeat_s``
    without any, a comment.

    An error on the way is an event of its own, and the stream ends as streams do: dropping the
    connection would tell the client nothing. Cleaning up is synchronous, since the end may come as
    a cancellation (while waiting) or as ``GeneratorExit`` (at a ``yield``).
    """
    try:
        written_s = trio.current_time()
        if line is not None:
            line.open()
            generation.tell_at_once(partial(_write, dialect, line), line.is_free)
        while not generation.is_over:
            deltas, data = await generation.read(written_s + heartbeat_s), b""
            if line is not None:
                await line.clear()
                written_s = max(written_s, line.written_s)
            for delta in deltas:
                data += b"".join(map(sse.frame, dialect.frames(delta)))
                if len(data) > FLUSH_BYTES:
                    yield data  # others get a turn before the next part is made
                    data, written_s = b"", trio.current_time()
            if data or trio.current_time() >= written_s + heartbeat_s:
                yield data or sse.PING
                written_s = trio.current_time()
        yield b"".join(map(sse.frame, dialect.last_frames())) + dialect.end
    except ApiError as error:
        yield sse.frame(error.body())
    except Exception:  # the status has gone out: the client hears of our bug in the stream
        log.exception("a stream failed")
        yield sse.frame(ApiError(INTERNAL).body())
    finally:
        generation.close()
        if line is not None:
            line.close()


def _write(dialect: Dialect, line: Line, delta: Tokens) -> None:
    if data := b"".join(map(sse.frame, dialect.frames(delta))):
        line.write(data, delta.choice.now_s)
