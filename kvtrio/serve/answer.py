"""One generation to one HTTP answer, streamed or whole. The same deltas feed both."""

import logging
from collections.abc import AsyncGenerator
from math import inf
from typing import Any

import trio

from kvtrio.serve import sse
from kvtrio.serve.dialect import Dialect
from kvtrio.serve.errors import INTERNAL, ApiError
from kvtrio.serve.generation import Generation

log = logging.getLogger(__name__)


async def whole(generation: Generation, dialect: Dialect) -> Any:
    """Wait for the end and return the body; raises ``ApiError``."""
    while not generation.is_over:
        await generation.read(inf)
    return dialect.body()


async def events(
    generation: Generation, dialect: Dialect, heartbeat_s: float
) -> AsyncGenerator[bytes, None]:
    """Yield the stream's bytes; after ``heartbeat_s`` without any, a comment.

    An error on the way is an event of its own, and the stream ends as streams do: dropping the
    connection would tell the client nothing. Cleaning up is synchronous, since the end may come as
    a cancellation (while waiting) or as ``GeneratorExit`` (at a ``yield``).
    """
    try:
        written_s = trio.current_time()
        while not generation.is_over:
            deltas = await generation.read(written_s + heartbeat_s)
            data = b"".join(sse.frame(each) for delta in deltas for each in dialect.frames(delta))
            if data or trio.current_time() >= written_s + heartbeat_s:
                yield data or sse.PING
                written_s = trio.current_time()
        yield b"".join(map(sse.frame, dialect.last_frames())) + dialect.end
    except ApiError as error:
        yield sse.frame(error.body())
    except Exception:
        log.exception("a stream failed")
        yield sse.frame(ApiError(INTERNAL).body())
    finally:
        generation.close()
