"""A kvtrio log as a scenario: exact in times and lengths, a guess in what prompts have in common.

The log says how much of a prompt was known, and not of which request. A prompt is therefore taken
to go on from the latest request of its session, or, without one, from the latest request under the
same adapters that is long enough; as far as the log says that it was known.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from attrs import define, field
from msgspec import Meta, Struct

from kvtrio.core.types import FinishReason, Retain
from kvtrio.replay.log_lines import log_lines
from kvtrio.replay.scenario import (
    MAX_PURPOSES,
    MAX_TOKENS,
    SCHEMA,
    Adapter,
    Fresh,
    Header,
    Line,
    Origin,
    Part,
    Piece,
    Ref,
    Request,
    Use,
)
from kvtrio.replay.scenario_file import ScenarioError

DONE = b'"event":"request.done"'
LOOK_BACK = 256
"""Requests among which one is looked for that a prompt may go on from."""
GONE = frozenset(FinishReason) - {FinishReason.STOP, FinishReason.LENGTH}
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class DoneLine(Struct, kw_only=True):
    """What is used of a ``request.done`` line."""

    schema: Literal["kvtrio.decision/1"]
    timestamp: datetime
    request_id: int
    reason: FinishReason
    num_prompt_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    num_cached_tokens: Tokens
    num_computed_tokens: Tokens
    num_generated_tokens: Tokens
    queue_s: float
    prefill_s: float
    decode_s: float
    retain: Retain
    session: str | None = None
    tenant: str | None = None
    purpose: Annotated[int, Meta(ge=0, lt=MAX_PURPOSES)] | None = None
    adapters: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")] | None = None
    num_matched_tokens: Tokens = 0
    num_other_tokens: Tokens = 0

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s + self.decode_s

    @property
    def num_ready(self) -> int:
        """Of the prompt, what was computed or found."""
        return min(self.num_cached_tokens + self.num_computed_tokens, self.num_prompt_tokens)

    @property
    def arrived_s(self) -> float:
        return self.timestamp.timestamp() - self.total_s


def import_log(path: Path) -> list[Line]:
    """Raises ``OSError`` and ``ScenarioError``."""
    lines = enumerate(log_lines(path), 1)
    done = [_decoded(raw, number) for number, raw in lines if DONE in raw]
    done.sort(key=lambda line: line.arrived_s)
    guess = _Guess(done[0].arrived_s if done else 0.0)
    requests = [guess.request(line) for line in done]
    purposes = max((line.purpose for line in done if line.purpose is not None), default=-1) + 1
    header = Header(
        schema=SCHEMA,
        origin=Origin.LOG,
        max_context=max((each.prompt_tokens + each.output_tokens for each in requests), default=1),
        purposes=tuple(f"purpose-{number}" for number in range(purposes)),
        is_exact=False,
    )
    adapters = [Adapter(alias=f"a{n}", content=content) for content, n in guess.aliases.items()]
    return [header, *adapters, *requests]


def _decoded(raw: bytes, number: int) -> DoneLine:
    try:
        return msgspec.json.decode(raw, type=DoneLine)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ScenarioError(f"line {number}: not a request.done as kvtrio writes it") from None


@define(eq=False)
class _Known:
    """An earlier request."""

    id: int
    line: DoneLine
    session: int
    turn: int


@define(eq=False)
class _Guess:
    """Takes lines in the order of arrival."""

    started_s: float
    aliases: dict[str, int] = field(init=False, factory=dict)
    _tenants: dict[str, int] = field(init=False, factory=dict)
    _earlier: list[_Known] = field(init=False, factory=list)
    _latest: dict[str, _Known] = field(init=False, factory=dict)
    """By session."""
    _num_sessions: int = field(init=False, default=0)

    def request(self, line: DoneLine) -> Request:
        before = self._before(line)
        is_next = before is not None and (line.session is not None or _is_whole(before, line))
        if before is not None and is_next:
            mine = _Known(len(self._earlier), line, before.session, before.turn + 1)
        else:
            mine = _Known(len(self._earlier), line, self._num_sessions, 0)
            self._num_sessions += 1
        self._earlier.append(mine)
        if line.session is not None:
            self._latest[line.session] = mine
        has_left = line.reason in GONE
        return Request(
            id=mine.id,
            at_s=round(max(line.arrived_s - self.started_s, 0.0), 6),
            session=mine.session,
            turn=mine.turn,
            is_named=line.session is not None,
            purpose=line.purpose,
            # How long a pin held is not in the log.
            retain=line.retain if line.retain is not Retain.PIN else Retain.NORMAL,
            tenant=self._tenant(line.tenant),
            adapters=self._uses(line.adapters),
            output_tokens=line.num_generated_tokens,
            left_s=round(line.total_s, 6) if has_left else None,
            ready_tokens=line.num_ready if has_left and not line.num_generated_tokens else None,
            think_s=_think_s(before, line) if is_next else None,
            prompt=tuple(_pieces(before, line)),
            log_id=line.request_id,
        )

    def _before(self, line: DoneLine) -> _Known | None:
        """The request that this one's prompt is taken to go on from."""
        if line.session is not None and line.session in self._latest:
            return self._latest[line.session]
        wanted = _num_known(line)
        if not wanted:
            return None
        latest = self._earlier[-LOOK_BACK:]
        long = [each for each in latest if _length(each.line) >= wanted]
        same = [each for each in long if each.line.adapters == line.adapters] or long
        exact = [each for each in same if _is_whole(each, line)]
        return max(exact or same, key=lambda each: each.id, default=None)

    def _tenant(self, name: str | None) -> int:
        return 0 if name is None else self._tenants.setdefault(name, len(self._tenants) + 1)

    def _uses(self, content: str | None) -> tuple[Use, ...]:
        """A set of adapters is one adapter here."""
        if content is None:
            return ()
        return (Use(alias=f"a{self.aliases.setdefault(content, len(self.aliases))}"),)


def _num_known(line: DoneLine) -> int:
    """The cache's last token is always computed again, so it may know one more."""
    return max(line.num_matched_tokens, line.num_other_tokens, line.num_cached_tokens)


def _length(line: DoneLine) -> int:
    return line.num_prompt_tokens + line.num_generated_tokens


def _is_whole(before: _Known, line: DoneLine) -> bool:
    """All that the cache can have of ``before`` was known: its last token was never computed."""
    return _num_known(line) >= _length(before.line) - 1


def _think_s(before: _Known | None, line: DoneLine) -> float | None:
    if before is None:
        return None
    return round(max(line.arrived_s - before.line.timestamp.timestamp(), 0.0), 6)


def _pieces(before: _Known | None, line: DoneLine) -> Iterator[Piece]:
    left = line.num_prompt_tokens
    if before is not None:
        known = min(_num_known(line), left)
        if _is_whole(before, line):
            known = min(_length(before.line), left)
        if known == left - 1:
            known = left  # the cache never gives a prompt's last token
        in_prompt = min(known, before.line.num_prompt_tokens)
        in_output = min(known - in_prompt, before.line.num_generated_tokens)
        for part, length in ((Part.PROMPT, in_prompt), (Part.OUTPUT, in_output)):
            if length:
                yield Ref(before.id, part, 0, length)
                left -= length
    if left:
        yield Fresh(left)
