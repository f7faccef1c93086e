"""Public traces as scenarios.

Mooncake (FAST'25): JSON lines with ``timestamp`` in ms, ``input_length``, ``output_length`` and
``hash_ids``, one for each 512 tokens of the prompt; equal ids, equal prompts up to there. Azure LLM
inference traces (2023): CSV with TIMESTAMP, ContextTokens and GeneratedTokens; what prompts have in
common is not in them.
"""

import csv
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
from attrs import define, field
from msgspec import Meta, Struct

from kvtrio.replay.scenario import (
    MAX_TOKENS,
    SCHEMA,
    Block,
    Fresh,
    Header,
    Line,
    Origin,
    Piece,
    Request,
)
from kvtrio.replay.scenario_file import MAX_LINE_BYTES, ScenarioError

BLOCK_TOKENS = 512
AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
SECONDS = len("2023-11-16 18:15:46")
Length = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class MooncakeLine(Struct):
    """One request; other members are ignored."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_length: Length
    hash_ids: Annotated[list[Annotated[int, Meta(ge=0, le=2**53 - 1)]], Meta(max_length=20_000)]


def import_mooncake(path: Path, shrink: int = 1) -> list[Line]:
    """Raises ``OSError`` and ``ScenarioError``. ``shrink``: divide all lengths by it; 512 has to be
    a multiple of it."""
    size = BLOCK_TOKENS // shrink
    if shrink < 1 or size * shrink != BLOCK_TOKENS:
        raise ScenarioError(f"blocks of {BLOCK_TOKENS} tokens cannot be shrunk by that")
    decode = msgspec.json.Decoder(MooncakeLine).decode
    requests: list[Request] = []
    families = _Families()
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
            try:
                line = decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise ScenarioError(f"line {number}: not a line of a Mooncake trace") from None
            session, turn = families.place(line.hash_ids)
            requests.append(
                Request(
                    id=len(requests),
                    at_s=line.timestamp / 1e3,
                    session=session,
                    turn=turn,
                    output_tokens=-(-line.output_length // shrink),
                    prompt=tuple(_blocks(line, size, -(-line.input_length // shrink))),
                )
            )
    return [_header(Origin.MOONCAKE, requests), *requests]


def import_azure(path: Path, shrink: int = 1) -> list[Line]:
    """Raises ``OSError`` and ``ScenarioError``."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        requests = list(_azure_requests(file, shrink))
    return [_header(Origin.AZURE, requests, is_exact=False), *requests]


def _azure_requests(file: TextIO, shrink: int) -> Iterator[Request]:
    rows = csv.reader(file)
    if [each.strip() for each in next(rows, [])] != AZURE_COLUMNS:
        raise ScenarioError(f"line 1: the columns are not {', '.join(AZURE_COLUMNS)}")
    first_s: float | None = None
    number = 0
    for number, row in enumerate(rows):
        try:
            when, context, generated = row
            at_s, num_prompt, num_output = _seconds(when), int(context), int(generated)
            if not (0 < num_prompt <= MAX_TOKENS and 0 <= num_output <= MAX_TOKENS):
                raise ValueError
        except (ValueError, IndexError):
            raise ScenarioError(f"line {number + 2}: not a line of an Azure trace") from None
        first_s = at_s if first_s is None else first_s
        yield Request(
            id=number,
            at_s=round(at_s - first_s, 6),
            output_tokens=-(-num_output // shrink),
            prompt=(Fresh(-(-num_prompt // shrink)),),
        )


def _seconds(when: str) -> float:
    """Of ``2023-11-16 18:15:46.6805900``: the standard library reads six decimals, not seven."""
    whole, fraction = when[:SECONDS], when[SECONDS:]
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0{fraction or '.0'}")


def _blocks(line: MooncakeLine, size: int, length: int) -> Iterator[Piece]:
    """The last one is what is left; what no id speaks of is new."""
    for digest in line.hash_ids:
        if length > 0:
            yield Block(digest, min(size, length))
            length -= size
    if length > 0:
        yield Fresh(length)


def _header(origin: Origin, requests: Sequence[Request], *, is_exact: bool = True) -> Header:
    lengths = (each.prompt_tokens + each.output_tokens for each in requests)
    return Header(
        schema=SCHEMA, origin=origin, max_context=max(lengths, default=1), is_exact=is_exact
    )


@define(eq=False)
class _Families:
    """Sessions by guess: a prompt goes on from the one that had its last known block, if it begins
    with all blocks of that one but the last, which need not have been full."""

    _owner: dict[int, int] = field(init=False, factory=dict)
    """Session in which a block was seen last."""
    _turns: list[tuple[int, int]] = field(init=False, factory=list)
    """Per session its number of turns, and of blocks in the last."""

    def place(self, digests: Sequence[int]) -> tuple[int, int]:
        """(session, turn)"""
        known = [each for each in digests if each in self._owner]
        session = self._owner[known[-1]] if known else -1
        if not known or len(known) < max(2, self._turns[session][1] - 1):
            session = len(self._turns)
            self._turns.append((0, 0))
        turn = self._turns[session][0]
        self._turns[session] = (turn + 1, len(digests))
        self._owner.update(dict.fromkeys(digests, session))
        return session, turn
