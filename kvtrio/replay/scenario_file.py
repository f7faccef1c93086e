"""Scenario files: strict and bounded reading, writing, and the rules that span lines.

Errors name a line and a rule, and never repeat what stands in the line.
"""

from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgspec
from attrs import define, field, frozen

from kvtrio.replay.scenario import (
    MAX_ADAPTERS,
    MAX_REQUESTS,
    SCHEMA,
    Action,
    Adapter,
    Expect,
    Header,
    Line,
    Part,
    Ref,
    Request,
    Use,
)

MAX_LINE_BYTES = 4 << 20

_decode = msgspec.json.Decoder(Line).decode
_encode = msgspec.json.Encoder().encode


class ScenarioError(ValueError):
    """A file is no scenario; the message is one clear line."""


@frozen(kw_only=True)
class Scenario:
    """A whole scenario. Requests are numbered by their places."""

    header: Header
    adapters: tuple[Adapter, ...]
    requests: tuple[Request, ...]
    actions: tuple[tuple[int, Action], ...] = ()
    """(number of requests before it, action), in order."""
    expects: tuple[Expect, ...] = ()


def schema_bytes() -> bytes:
    """JSON schema of a line, as ``scenarios/scenario.schema.json`` has it."""
    return msgspec.json.format(_encode(msgspec.json.schema(Line)), indent=2) + b"\n"


def encode_line(line: Line) -> bytes:
    """With its line end."""
    return _encode(line) + b"\n"


def write_scenario(path: Path, lines: Iterable[Line]) -> None:
    """Raises ``OSError``, and ``ScenarioError`` if the lines are no scenario; then nothing is left
    that could be taken for a whole one."""
    whole = checked(lines)
    first = next(whole)
    is_new = not path.exists()
    with path.open("wb") as file:
        try:
            for line in chain((first,), whole):
                file.write(encode_line(line))
            file.flush()
        except BaseException:
            with suppress(OSError):
                file.truncate(0)
                if is_new:
                    path.unlink()
            raise


def read_scenario(path: Path) -> Scenario:
    """Raises ``OSError`` and ``ScenarioError``."""
    with path.open("rb") as file:
        return collect(read_lines(file))


def read_lines(file: BinaryIO) -> Iterator[Line]:
    """The file's lines, checked, one at a time; raises ``ScenarioError``."""
    return checked(_decoded(file))


def collect(lines: Iterable[Line]) -> Scenario:
    """Put checked lines together."""
    whole = iter(lines)
    header = next(whole, None)
    if not isinstance(header, Header):
        raise ScenarioError("line 1: no header")
    adapters: list[Adapter] = []
    requests: list[Request] = []
    actions: list[tuple[int, Action]] = []
    expects: list[Expect] = []
    for line in whole:
        if isinstance(line, Request):
            requests.append(line)
        elif isinstance(line, Adapter):
            adapters.append(line)
        elif isinstance(line, Action):
            actions.append((len(requests), line))
        elif isinstance(line, Expect):
            expects.append(line)
    return Scenario(
        header=header,
        adapters=tuple(adapters),
        requests=tuple(requests),
        actions=tuple(actions),
        expects=tuple(expects),
    )


def checked(lines: Iterable[Line]) -> Iterator[Line]:
    """Pass on lines that are a scenario together; raises ``ScenarioError`` at the first other."""
    rules, number = Rules(), 0
    for number, line in enumerate(lines, 1):
        if (wrong := rules.fault(line)) is not None:
            raise ScenarioError(f"line {number}: {wrong}")
        yield line
    if number == 0:
        raise ScenarioError("line 1: no header")


def _decoded(file: BinaryIO) -> Iterator[Line]:
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise ScenarioError(f"line {number}: longer than {MAX_LINE_BYTES} bytes")
        try:
            line: Line = _decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # The decoder's message may quote the line.
            what = "a line" if number > 1 else "the header"
            raise ScenarioError(f"line {number}: not {what} of a {SCHEMA} file") from None
        yield line


@define(eq=False)
class Rules:
    """What lines have to do with those before them."""

    _num_lines: int = field(init=False, default=0)
    _num_purposes: int = field(init=False, default=0)
    _context: int = field(init=False, default=0)
    _aliases: set[str] = field(init=False, factory=set)
    _last_s: float = field(init=False, default=0.0)
    _prompts: "array[int]" = field(init=False, factory=lambda: array("I"))
    """Lengths, by request."""
    _outputs: "array[int]" = field(init=False, factory=lambda: array("I"))

    def fault(self, line: Line) -> str | None:
        """What is wrong with the next line; None: nothing, and it is taken in."""
        self._num_lines += 1
        if isinstance(line, Header) != (self._num_lines == 1):
            return "the first line, and no other, is the header"
        if isinstance(line, Header):
            self._num_purposes, self._context = len(line.purposes), line.max_context
            return None
        if isinstance(line, Adapter):
            return self._adapter_fault(line)
        if isinstance(line, Expect):
            others = [line.output_as, line.output_unlike]
            named = [line.request, *(each for each in others if each is not None)]
            is_known = all(each < len(self._prompts) for each in named)
            return None if is_known else "it expects something of a request that did not come yet"
        if line.at_s < self._last_s:
            return "it is earlier than the line before"
        self._last_s = line.at_s
        return self._request_fault(line) if isinstance(line, Request) else self._uses(line.scales)

    def _adapter_fault(self, line: Adapter) -> str | None:
        if line.alias in self._aliases:
            return "the alias was given before"
        if len(self._aliases) >= MAX_ADAPTERS:
            return f"more than {MAX_ADAPTERS} adapters"
        self._aliases.add(line.alias)
        return None

    def _uses(self, uses: tuple[Use, ...]) -> str | None:
        is_known = all(use.alias in self._aliases for use in uses)
        return None if is_known else "an adapter that no line before has introduced"

    def _request_fault(self, line: Request) -> str | None:
        number, length = len(self._prompts), line.prompt_tokens
        if line.id != number or number >= MAX_REQUESTS:
            return "requests are numbered from 0, one after the other"
        if line.purpose is not None and line.purpose >= self._num_purposes:
            return "a purpose that the header does not have"
        if length + line.output_tokens > self._context:
            return "longer than the header's context"
        if (line.ready_tokens or 0) > length + line.output_tokens:
            return "more was ready than there is"
        if any(use.start > length for use in line.adapters):
            return "an adapter that begins behind the prompt"
        if not all(self._is_there(piece) for piece in line.prompt if isinstance(piece, Ref)):
            return "a reference to tokens that no earlier request has"
        if not self._is_answer_known(line):
            return "its answer is that of a request that did not come yet, or wrote less"
        self._prompts.append(length)
        self._outputs.append(line.output_tokens)
        return self._uses(line.adapters)

    def _is_answer_known(self, line: Request) -> bool:
        if line.same_as is not None and line.same_as >= len(self._prompts):
            return False
        if (beginning := line.begins_as) is None:
            return True
        ref = Ref(beginning.request, Part.OUTPUT, 0, beginning.length)
        return self._is_there(ref) and beginning.length <= line.output_tokens

    def _is_there(self, ref: Ref) -> bool:
        lengths = self._prompts if ref.part is Part.PROMPT else self._outputs
        return ref.request < len(lengths) and ref.start + ref.length <= lengths[ref.request]
