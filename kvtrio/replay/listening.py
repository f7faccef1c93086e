"""What comes back for one request: events of a stream, and when they came."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import trio
from attrs import define, field

from kvtrio.core.explain import CachePath, MissReason, TurnClass
from kvtrio.replay.results import Api, Result
from kvtrio.replay.target import OK, ReplayError

EVENT_END = b"\n\n"
DATA = b"data: "
DONE = b"[DONE]"
MAX_EVENT = 64 << 20
Found = dict[str, Any]


class Enough(Exception):
    """The reader has what it wanted."""


@define(eq=False)
class Answer:
    """Takes a stream as it arrives; times on the loop's clock."""

    api: Api
    num_enough: int | None = None
    """With so many atoms the reader leaves; None: it stays."""
    status: int = 0
    atoms: list[int | str] = field(factory=list)
    """Token ids, or texts, as they were told."""
    times_s: list[float] = field(factory=list)
    """One for each atom."""
    is_whole: bool = False
    """The server said that this was all."""
    final: Found = field(factory=dict)
    """What it told at the end."""
    _tail: bytes = b""

    def take(self, status: int, data: bytes) -> None:
        """Raises ``ReplayError`` if it makes no sense, and ``Enough``."""
        self.status = status
        if status != OK:
            return
        now = trio.current_time()
        *events, self._tail = (self._tail + data).split(EVENT_END)
        if len(self._tail) > MAX_EVENT:
            raise ReplayError("an event of the stream has no end")
        for event in events:
            if event.startswith(DATA):
                self._take_event(event.removeprefix(DATA), now)
        if self.num_enough is not None and len(self.atoms) >= self.num_enough:
            raise Enough

    def _take_event(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.is_whole = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise ReplayError("an event of the stream is no JSON") from None
        if not isinstance(event, dict) or "error" in event:
            raise ReplayError("the server stopped in the middle of an answer")
        atoms = self._native(event) if self.api is Api.TOKENS else self._text(event)
        self.atoms += atoms
        self.times_s += [now] * len(atoms)

    def _native(self, event: Found) -> list[int | str]:
        if event.get("stop"):
            self.final, self.is_whole = event, True
            return []
        tokens = event.get("tokens")
        return [each for each in tokens if isinstance(each, int)] if tokens else []

    def _text(self, event: Found) -> list[int | str]:
        if any(event.get(name) for name in ("usage", "timings", "kvtrio")):
            self.final = {**self.final, **event}
        texts: list[int | str] = []
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            texts += [text] if text else []
        return texts

    def gaps_s(self) -> list[float]:
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return [round(late - early, 4) for early, late in pairs]

    def told(self) -> Found:
        """What the server says about it, as members of a ``Result``; what makes no sense is left
        out."""
        told: Found = {}
        for part in (_usage, _timings, _cache):
            with suppress(LookupError, TypeError, ValueError, AttributeError):
                told |= part(self.final)
        return told


def _timings(final: Found) -> Found:
    timings = final["timings"]
    return {
        "num_cached_tokens": int(timings["cache_n"]),
        "num_prompt_tokens": int(timings["cache_n"] + timings["prompt_n"]),
        "num_generated_tokens": int(timings["predicted_n"]),
        "prefill_s": timings["prompt_ms"] / 1e3,
        "decode_s": timings["predicted_ms"] / 1e3,
    }


def _usage(final: Found) -> Found:
    usage = final["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return {
        "num_cached_tokens": details.get("cached_tokens"),
        "num_prompt_tokens": int(usage["prompt_tokens"]),
        "num_generated_tokens": int(usage["completion_tokens"]),
    }


def _cache(final: Found) -> Found:
    cache = final["kvtrio"]["cache"]
    return {
        "path": CachePath(cache["path"]),
        "miss_reason": MissReason(cache["reason"]),
        "turn": TurnClass(cache["turn"]),
        "num_matched_tokens": int(cache["matched"]),
        "divergence_at": (cache["divergence"] or {}).get("position"),
    }


def with_gaps(result: Result, gaps_s: list[float]) -> Result:
    """The gaps, and nearest-rank percentiles of them: always a gap that happened."""
    if not gaps_s:
        return result
    ordered = sorted(gaps_s)

    def percentile(share: float) -> float:
        return ordered[int(-(-share * len(ordered) // 1)) - 1]

    return msgspec.structs.replace(
        result,
        gap_p50_s=percentile(0.5),
        gap_p99_s=percentile(0.99),
        gap_max_s=ordered[-1],
        gaps_s=tuple(gaps_s),
    )
