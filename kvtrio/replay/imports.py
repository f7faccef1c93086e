"""Public traces as scenarios.

Mooncake (FAST'25): JSON lines with ``timestamp`` in ms, ``input_length``, ``output_length`` and
``hash_ids``, one for each 512 tokens of the prompt; equal ids, equal prompts up to there. Azure LLM
inference traces (2023, 2024): CSV with TIMESTAMP, ContextTokens and GeneratedTokens; what prompts
have in common is not in them.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
from msgspec import Meta, Struct

from kvtrio.replay.blocks import BlockTrace, Row
from kvtrio.replay.scenario import (
    MAX_SECONDS,
    MAX_TOKENS,
    SCHEMA,
    Fresh,
    Header,
    Line,
    Origin,
    Request,
)
from kvtrio.replay.scenario_file import MAX_LINE_BYTES, ScenarioError

BLOCK_TOKENS = 512
AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
TIME = re.compile(
    r"(?P<whole>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?P<fraction>\.\d{1,9})?"
    r"(?P<offset>[-+]\d\d:\d\d)?",
    re.ASCII,
)
EARLIER = "earlier than the line before, or too far from the first"
Length = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class MooncakeLine(Struct):
    """One request; other members are ignored."""

    timestamp: Annotated[float, Meta(ge=0, le=MAX_SECONDS * 1e3)]
    input_length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_length: Length
    hash_ids: Annotated[list[Annotated[int, Meta(ge=0, le=2**53 - 1)]], Meta(max_length=20_000)]


def import_mooncake(path: Path, shrink: int = 1) -> list[Line]:
    """Raises ``OSError`` and ``ScenarioError``. ``shrink``: divide all lengths by it; 512 has to be
    a multiple of it."""
    size = BLOCK_TOKENS // shrink
    if shrink < 1 or size * shrink != BLOCK_TOKENS:
        raise ScenarioError(f"blocks of {BLOCK_TOKENS} tokens cannot be shrunk by that")
    lines = list(_mooncake_lines(path))
    rows = [
        Row(
            ids=tuple(line.hash_ids[: -(-line.input_length // BLOCK_TOKENS)]),
            num_prompt=-(-line.input_length // shrink),
            num_output=-(-line.output_length // shrink),
        )
        for line in lines
    ]
    found = zip(lines, rows, BlockTrace(rows, size).requests(), strict=True)
    requests = [
        Request(
            id=number,
            at_s=line.timestamp / 1e3,
            session=session,
            turn=turn,
            output_tokens=row.num_output,
            prompt=pieces,
        )
        for number, (line, row, (session, turn, pieces)) in enumerate(found)
    ]
    return [_header(Origin.MOONCAKE, requests), *requests]


def _mooncake_lines(path: Path) -> Iterator[MooncakeLine]:
    decode = msgspec.json.Decoder(MooncakeLine).decode
    last_ms = 0.0
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
            try:
                line = decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise ScenarioError(f"line {number}: not a line of a Mooncake trace") from None
            if line.timestamp < last_ms:
                raise ScenarioError(f"line {number}: {EARLIER}")
            last_ms = line.timestamp
            yield line


def import_azure(path: Path, shrink: int = 1) -> list[Line]:
    """Raises ``OSError`` and ``ScenarioError``."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        requests = list(_azure_requests(file, shrink))
    return [_header(Origin.AZURE, requests, is_exact=False), *requests]


def _azure_requests(file: TextIO, shrink: int) -> Iterator[Request]:
    rows = csv.reader(file)
    if [each.strip() for each in next(rows, [])] != AZURE_COLUMNS:
        raise ScenarioError(f"line 1: the columns are not {', '.join(AZURE_COLUMNS)}")
    first_s: float | None = None
    last_s = 0.0
    for number, row in enumerate(rows):
        try:
            when, context, generated = row
            at_s, num_prompt, num_output = _seconds(when), int(context), int(generated)
            if not (0 < num_prompt <= MAX_TOKENS and 0 <= num_output <= MAX_TOKENS):
                raise ValueError
        except (ValueError, IndexError):
            raise ScenarioError(f"line {number + 2}: not a line of an Azure trace") from None
        first_s = at_s if first_s is None else first_s
        if not last_s <= (since_s := round(at_s - first_s, 6)) <= MAX_SECONDS:
            raise ScenarioError(f"line {number + 2}: {EARLIER}")
        last_s = since_s
        yield Request(
            id=number,
            at_s=since_s,
            output_tokens=-(-num_output // shrink),
            prompt=(Fresh(-(-num_prompt // shrink)),),
        )


def _seconds(when: str) -> float:
    """Of ``2023-11-16 18:15:46.6805900``, or with an offset as in the traces of 2024: the standard
    library reads six decimals, not seven. Raises ``ValueError``."""
    found = TIME.fullmatch(when.strip())
    if found is None:
        raise ValueError("no time")
    whole = datetime.fromisoformat(f"{found['whole']}{found['offset'] or '+00:00'}")
    return whole.timestamp() + float(f"0{found['fraction'] or '.0'}")


def _header(origin: Origin, requests: Sequence[Request], *, is_exact: bool = True) -> Header:
    lengths = (each.prompt_tokens + each.output_tokens for each in requests)
    return Header(
        schema=SCHEMA, origin=origin, max_context=max(lengths, default=1), is_exact=is_exact
    )
