"""One generation over llama-server's /completion, and when its tokens came."""

from collections.abc import Sequence
from math import inf
from typing import Any

import trio
from attrs import define, frozen

from kvtrio.bench.errors import BenchError, NotMeasured
from kvtrio.bench.http import OK, Client, Reply

EVENT_END = b"\n\n"
DATA = b"data: "


@frozen(kw_only=True)
class Ask:
    """What to generate: greedy, and on past the end of the answer."""

    token_ids: Sequence[int]
    num_tokens: int
    may_reuse: bool = False
    """Whether the server may use what it remembers of earlier prompts."""

    def body(self) -> dict[str, Any]:
        return {
            "prompt": list(self.token_ids),
            "n_predict": self.num_tokens,
            "stream": True,
            "cache_prompt": self.may_reuse,
            "ignore_eos": True,
            "temperature": 0,
        }


@frozen(kw_only=True)
class Timing:
    """Times in seconds on the client's clock."""

    sent_s: float
    first_s: float
    """Arrival of the first event with a token."""
    last_s: float
    num_tokens: int

    @property
    def wait_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.sent_s

    @property
    def rate(self) -> float:
        """Tokens per second after the first. Raises ``NotMeasured`` if there is no time between."""
        return per_second(self.num_tokens - 1, self.last_s - self.first_s)


def per_second(num_tokens: int, seconds: float) -> float:
    """Raises ``NotMeasured`` for no time at all."""
    if seconds <= 0:
        raise NotMeasured("all tokens came at once")
    return num_tokens / seconds


async def tokenise(client: Client, text: str) -> list[int]:
    """Raises ``NotMeasured``, ``BenchError`` or ``OSError``."""
    reply = await client.post("/tokenize", {"content": text, "add_special": True})
    if reply.status != OK:
        raise NotMeasured(f"status {reply.status}")
    try:
        return [int(each) for each in reply.json()["tokens"]]
    except (LookupError, TypeError, ValueError):
        raise BenchError(f"{client.name} has no /tokenize as llama-server has it") from None


async def complete(client: Client, ask: Ask) -> Timing:
    """Raises ``NotMeasured``, ``BenchError`` or ``OSError``; the first also if tokens lack."""
    events, sent_s = _Events(), trio.current_time()
    await client.stream("/completion", ask.body(), events.take)
    final = Reply(OK, events.last).json()
    num_tokens = final.get("tokens_predicted") if isinstance(final, dict) else None
    if num_tokens != ask.num_tokens or not final.get("stop"):
        raise NotMeasured(f"{num_tokens} tokens came instead of {ask.num_tokens}")
    return Timing(
        sent_s=sent_s, first_s=events.first_s, last_s=events.last_s, num_tokens=num_tokens
    )


@define
class _Events:
    """Times of the first and of the last event of a stream.

    A server may hold tokens back while they are half a character, and may send several in one
    event, so events are not counted: the last one says how many tokens there were.
    """

    first_s: float = inf
    last_s: float = 0.0
    last: bytes = b"null"
    _tail: bytes = b""

    def take(self, status: int, data: bytes) -> None:
        if status != OK:
            raise NotMeasured(f"status {status}")
        now = trio.current_time()
        *events, self._tail = (self._tail + data).split(EVENT_END)
        for event in events:
            if event.startswith(DATA):
                self.first_s = min(self.first_s, now)
                self.last_s, self.last = now, event.removeprefix(DATA)
