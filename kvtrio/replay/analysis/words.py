"""What of a line is read, and as what: taken from the catalogue of log lines.

1. Words come in as members of a closed set, digests as 16 hexadecimal digits, all else as numbers
   within bounds. What is none of these becomes nothing, so that no text of a file that is not what
   it seems can get into a report.
2. A field that a newer or older server does not write is nothing as well.
"""

from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin

import attrs

from kvtrio.obs.events import CATALOGUE, SCHEMA
from kvtrio.obs.schema import Digest, name_of
from kvtrio.replay import results

SCHEMAS = (SCHEMA, results.SCHEMA)
RESULT_KINDS = ("run", "result", "verdict", "end")
OUTCOMES = tuple(outcome.value for outcome in results.Outcome)
FIELDS = (
    "server.start: num_places, max_gap_s, num_blocks, num_host_blocks, num_adapters",
    "server.stop: uptime_s, num_lost_lines",
    "request.done: request_id, reason, place, num_prompt_tokens, num_cached_tokens,"
    " num_computed_tokens, num_generated_tokens, queue_s, prefill_s, decode_s, gap_p50_s,"
    " gap_p99_s, gap_max_s, session, tenant, purpose, retain, num_adapters, adapters, path,"
    " miss_reason, turn, num_device_tokens, num_host_tokens, num_disk_tokens, num_matched_tokens,"
    " divergence_at, evicted_age_s, is_copy, num_recomputed_tokens, num_preemptions,"
    " longest_gap_s, longest_gap_cause, longest_gap_prefill_tokens, longest_gap_at,"
    " longest_gap_request_id, longest_gap_prompt_tokens, longest_gap_prompt_at",
    "request.rejected: reason, num_prompt_tokens",
    "cache.divergence: miss_reason, position, section",
    "cache.restore: num_blocks, num_disk_blocks",
    "cache.evict: num_demoted_blocks, num_dropped_blocks, num_dropped_tokens, longest_idle_s",
    "cache.discard: why, num_tokens",
    "tier.usage: num_device_blocks, num_host_blocks, num_running, num_waiting",
    "sched.step: step, num_chunks, num_prefill_tokens, num_decode_rows, duration_s, limit_s,"
    " breach",
)
"""What the tables need. A field that the catalogue lacks is read as nothing."""
RESULT_COLUMNS = {
    "kind": "VARCHAR",
    "id": "BIGINT",
    "scenario_turn": "BIGINT",
    "sent_s": "DOUBLE",
    "first_token_s": "DOUBLE",
    "total_s": "DOUBLE",
    "outcome": "VARCHAR",
    "started_s": "DOUBLE",
    "scenario": "VARCHAR",
    "server": "VARCHAR",
    "is_met": "BOOLEAN",
    "is_complete": "BOOLEAN",
}
ENVELOPE = {"schema": "VARCHAR", "event": "VARCHAR", "timestamp": "TIMESTAMP"}
RAW = ("schema", "scenario")
"""Compared or hashed, and not kept."""
SQL_TYPES: dict[Any, str] = {int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN"}


def _wanted() -> list[tuple[str, str]]:
    pairs = []
    for line in FIELDS:
        event, _, names = line.partition(":")
        pairs += [(event, name.strip()) for name in names.split(",")]
    return pairs


def _kind(event_class: type, name: str) -> Any:
    """The type of the field, without ``None`` and ``NewType``; None if there is no such field."""
    fields = attrs.fields_dict(event_class)
    if name not in fields:
        return None
    kind = fields[name].type
    union = get_origin(kind) in (Union, UnionType)
    options = [each for each in get_args(kind) if each is not type(None)] if union else [kind]
    return getattr(options[0], "__supertype__", options[0])


def _read() -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """SQL types of all fields; the words of those that have some; those that are digests."""
    classes = {name_of(each): each for each in CATALOGUE}
    types: dict[str, str] = {}
    words: dict[str, list[str]] = {"event": [*classes], "kind": list(RESULT_KINDS)}
    digests: list[str] = []
    for event, name in _wanted():
        kind = _kind(classes[event], name)
        types.setdefault(name, SQL_TYPES.get(kind, "BIGINT" if kind is None else "VARCHAR"))
        if isinstance(kind, type) and issubclass(kind, Enum):
            known = words.setdefault(name, [])
            known += [str(member.value) for member in kind if member.value not in known]
        elif kind is Digest and name not in digests:
            digests.append(name)
    words["outcome"] = list(OUTCOMES)
    words["server"] = [kind.value for kind in results.ServerKind]
    return types, words, digests


FIELD_TYPES, WORDS, DIGESTS = _read()
COLUMNS = ENVELOPE | FIELD_TYPES | RESULT_COLUMNS
"""As they are read."""


def declarations() -> str:
    """For ``read_json(columns = ...)``."""
    return "{" + ", ".join(f"\"{name}\": '{kind}'" for name, kind in COLUMNS.items()) + "}"


def enum_types() -> list[str]:
    """Statements that make a type of each closed set of words."""
    return [
        f"CREATE TYPE {name}_word AS ENUM ({', '.join(repr(word) for word in words)})"
        for name, words in WORDS.items()
    ]


def checked(name: str) -> str:
    """The column in SQL, if its value is what it may be."""
    kind = COLUMNS[name]
    if name in WORDS:
        return f'TRY_CAST("{name}" AS {name}_word) AS "{name}"'
    if name in DIGESTS:
        return f'{name}_of("{name}", kind) AS "{name}"'
    if kind in ("BIGINT", "DOUBLE"):
        return f'within("{name}") AS "{name}"'
    return f'"{name}"'
