"""Scenarios from traces, from logs, and made up."""

import gzip
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from harness.source_tree import ROOT
from kvtrio.core.types import Retain
from kvtrio.replay.import_log import import_log
from kvtrio.replay.imports import import_azure, import_mooncake
from kvtrio.replay.make_settings import MakeSettings
from kvtrio.replay.maker import make
from kvtrio.replay.scenario import Block, Fresh, Line, Part, Ref
from kvtrio.replay.scenario_file import Scenario, ScenarioError, checked, collect

FOLDER = ROOT / "scenarios"
MOONCAKE = (
    '{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 9]}'
)


def scenario(lines: list[Line]) -> Scenario:
    return collect(checked(lines))


def test_a_mooncake_trace(tmp_path: Path) -> None:
    """Times in ms, one block for each 512 tokens, the last one as long as what is left."""
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{MOONCAKE}\n")
    (request,) = scenario(import_mooncake(path)).requests
    assert (request.at_s, request.output_tokens) == (27.482, 52)
    assert request.prompt == (Block(46, 512), Block(47, 512), Block(9, 76))
    (small,) = scenario(import_mooncake(path, shrink=16)).requests
    assert small.prompt == (Block(46, 32), Block(47, 32), Block(9, 5))


def test_turns_of_a_mooncake_trace(tmp_path: Path) -> None:
    """A prompt that goes on from another is of its session; a common first block is not enough."""
    path = tmp_path / "trace.jsonl"
    rows = [[1, 2, 3], [1, 8], [1, 2, 4, 5], [1, 2, 4, 6, 7]]
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": number,
                    "input_length": 512 * len(ids) - 100,
                    "output_length": 1,
                    "hash_ids": ids,
                }
            )
            + "\n"
            for number, ids in enumerate(rows)
        )
    )
    requests = scenario(import_mooncake(path)).requests
    assert [(each.session, each.turn) for each in requests] == [(0, 0), (1, 0), (0, 1), (0, 2)]


def test_an_azure_trace(tmp_path: Path) -> None:
    """Lengths and times of seven decimals; what prompts share is not known, and said not to be."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,4808,10\r\n"
        "2023-11-16 18:17:04.0319600,3180,8\r\n"
    )
    found = scenario(import_azure(path))
    assert not found.header.is_exact
    assert [(each.at_s, each.output_tokens) for each in found.requests] == [(0.0, 10), (0.052, 8)]
    assert found.requests[0].prompt == (Fresh(4808),)


def test_an_azure_trace_of_2024(tmp_path: Path) -> None:
    """Its times have an offset from UTC; spreadsheets put a mark in front of the file."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 02:00:01+02:00,2399,6\n"
    )
    assert [each.at_s for each in scenario(import_azure(path)).requests] == [0.0, 0.99007]


@pytest.mark.parametrize("seconds", ["2023-11-16 18:17:02", "9999-11-16 18:17:03"])
def test_times_that_no_scenario_can_have(tmp_path: Path, seconds: str) -> None:
    """The line of the trace is named."""
    path = tmp_path / "trace.csv"
    start = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,1\n"
    path.write_text(f"{start}{seconds},1,1\n")
    with pytest.raises(ScenarioError, match=r"^line 3: earlier"):
        import_azure(path)
    path.write_text(f"{MOONCAKE}\n{MOONCAKE.replace('27482', '27481')}\n")
    with pytest.raises(ScenarioError, match=r"^line 2: earlier"):
        import_mooncake(path)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (import_mooncake, MOONCAKE + "\nnothing\n"),
        (import_mooncake, MOONCAKE + '\n{"timestamp": 1}\n'),
        (import_mooncake, MOONCAKE + "\n" + MOONCAKE.replace("1100", "-5") + "\n"),
        (import_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n"),
        (import_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,0,2\n"),
        (import_azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,3,2\n"),
        (import_mooncake, MOONCAKE + "\n" + MOONCAKE.replace("27482", "1" + "0" * 20) + "\n"),
        (import_log, '{"event":"server.start"}\n{"event":"request.done","x":1}\n'),
    ],
)
def test_traces_that_are_none(tmp_path: Path, read: Any, text: str) -> None:
    """The second line is named, and not repeated."""
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=r"^line 2: not a "):
        read(path)


def test_the_samples_are_what_their_script_writes() -> None:
    """They are made up, with a seed."""
    script = runpy.run_path(str(FOLDER / "make_samples.py"))
    mooncake, azure = FOLDER / script["MOONCAKE"], FOLDER / script["AZURE"]
    assert mooncake.read_text(encoding="utf-8") == script["mooncake"]()
    assert azure.read_text(encoding="utf-8") == script["azure"]()
    assert len(scenario(import_mooncake(mooncake)).requests) == script["NUM_REQUESTS"]
    assert len(scenario(import_azure(azure)).requests) == script["NUM_REQUESTS"]


def done(number: int, **changes: Any) -> str:
    """A line of a log."""
    line = {
        "schema": "kvtrio.decision/1",
        "timestamp": f"2026-11-29T10:00:{number:02}.500000Z",
        "event": "request.done",
        "request_id": number,
        "reason": "length",
        "num_prompt_tokens": 100,
        "num_cached_tokens": 0,
        "num_computed_tokens": 100,
        "num_generated_tokens": 20,
        "queue_s": 0.1,
        "prefill_s": 0.2,
        "decode_s": 0.2,
        "session": None,
        "tenant": None,
        "purpose": 1,
        "retain": "normal",
        "adapters": None,
        "num_matched_tokens": 0,
        "num_other_tokens": 0,
    }
    return json.dumps(line | changes, separators=(",", ":")) + "\n"


def test_a_log(tmp_path: Path) -> None:
    """Who went on from whom is guessed from how much was known; requests come when they came."""
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"event":"server.start"}\n'
        + done(1)
        + done(2, num_prompt_tokens=150, num_matched_tokens=119, adapters=None)
        + done(3, num_prompt_tokens=100, num_matched_tokens=99)
        + done(4, num_prompt_tokens=70, num_matched_tokens=40, adapters="00ff00ff00ff00ff")
        + done(5, reason="abort", retain="auxiliary", tenant="00000000000000aa")
    )
    found = scenario(import_log(path))
    first, second, third, fourth, fifth = found.requests
    assert [each.at_s for each in found.requests] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert second.prompt == (Ref(0, Part.PROMPT, 0, 100), Ref(0, Part.OUTPUT, 0, 20), Fresh(30))
    assert (second.session, second.turn) == (first.session, 1)
    assert third.prompt == (Ref(1, Part.PROMPT, 0, 100),)
    assert fourth.prompt[0].length == 40
    assert [each.alias for each in fourth.adapters] == ["a0"]
    assert (fifth.left_s, fifth.retain, fifth.tenant) == (0.5, Retain.AUXILIARY, 1)
    assert fifth.ready_tokens is None


def test_a_log_that_was_packed(tmp_path: Path) -> None:
    """With gzip it is read; what is cut or packed otherwise is said to be so, and a log of another
    version is none."""
    path = tmp_path / "log.gz"
    packed = gzip.compress((done(1) + done(2)).encode())
    path.write_bytes(packed)
    assert len(scenario(import_log(path)).requests) == 2
    for data in (packed[:-9], packed[:20] + b"x" + packed[21:], b"\x28\xb5\x2f\xfd"):
        path.write_bytes(data)
        with pytest.raises(ScenarioError, match=r"^packed with "):
            import_log(path)
    path.write_text(done(1, schema="kvtrio.decision/2"))
    with pytest.raises(ScenarioError, match=r"^line 1: not a request\.done"):
        import_log(path)


def test_a_log_of_clients_that_left(tmp_path: Path) -> None:
    """Before its first token: as much of the prompt was read as was found or computed."""
    path = tmp_path / "log.jsonl"
    gone = {"reason": "abort", "num_generated_tokens": 0}
    path.write_text(done(1, **gone, num_cached_tokens=20, num_computed_tokens=32))
    (request,) = scenario(import_log(path)).requests
    assert (request.ready_tokens, request.stop) == (52, 52)


BUSY = MakeSettings(
    seed=3,
    num_adapters=2,
    switch_share=0.2,
    again_share=0.2,
    back_share=0.2,
    summary_share=0.2,
    leave_share=0.1,
    probe_every_s=60.0,
    num_burst=7,
    num_tenants=2,
    max_context=2000,
)


def test_made_up_traffic_is_repeatable() -> None:
    """The same seed gives the same lines, another one others."""
    assert list(make(BUSY)) == list(make(BUSY))
    assert list(make(BUSY)) != list(make(evolve(BUSY, seed=4)))


def test_made_up_traffic_has_what_was_asked_for() -> None:
    """Conversations that share system prompts and go on, probes, summaries, a burst, and nothing
    that is too long."""
    found = scenario(list(make(BUSY)))
    requests = found.requests
    assert {each.session for each in requests} >= set(range(20))
    assert sum(each.purpose == 3 for each in requests) == 10
    assert sum(each.tenant == 2 for each in requests) == 7
    assert any(each.purpose == 2 for each in requests)
    assert any(each.left_s is not None for each in requests)
    assert {use.alias for each in requests for use in each.adapters} == {"a0", "a1"}
    longest = max(each.prompt_tokens + each.output_tokens for each in requests)
    assert 500 < longest <= 2000
    firsts = [each for each in requests if each.turn == 0 and each.session is not None]
    assert sum(each.prompt[0] == Fresh(300) for each in firsts) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"num_turns": 0},
        {"again_share": 1.1},
        {"span_s": -1.0},
        {"span_s": 1e300},
        {"think_s": 1e300},
        {"max_context": 10**9},
        {"user_tokens": 10**9},
        {"num_adapters": 5000},
        {"num_tenants": 10**8},
        {"seed": 2**53},
    ],
)
def test_traffic_that_cannot_be(change: dict[str, Any]) -> None:
    """The flag is named."""
    fault = evolve(BUSY, **change).fault()
    assert fault is not None
    assert fault.startswith("--" + next(iter(change)).replace("_", "-"))


@pytest.mark.parametrize(
    "change", [{"num_sessions": 500_000}, {"num_burst": 10**7}, {"probe_every_s": 1e-9}]
)
def test_more_traffic_than_fits_into_memory(change: dict[str, Any]) -> None:
    """It is refused before anything is made."""
    assert evolve(BUSY, **change).fault() == "that is more than 1,000,000 requests"


def mooncake_rows(path: Path, rows: list[tuple[list[int], int, int]]) -> Scenario:
    """(ids, tokens of the prompt, tokens of the answer) of each request of a trace."""
    path.write_text(
        "".join(
            f'{{"timestamp": {number}, "input_length": {num_prompt}, "output_length": {num_output},'
            f' "hash_ids": {ids}}}\n'
            for number, (ids, num_prompt, num_output) in enumerate(rows)
        )
    )
    return scenario(import_mooncake(path))


def test_a_turn_of_a_mooncake_trace_begins_with_the_turn_before(tmp_path: Path) -> None:
    """Its last block, that was not full, and its answer stand at the beginning of blocks that have
    other ids; what goes on from those has them, too."""
    found = mooncake_rows(
        tmp_path / "trace.jsonl",
        [([1, 2, 3], 1100, 60), ([1, 2, 4, 5], 1800, 9), ([1, 2, 4, 6, 7], 2100, 9)],
    )
    _, second, third = found.requests
    assert second.prompt == (
        Block(1, 512),
        Block(2, 512),
        Ref(0, Part.PROMPT, 1024, 76),
        Ref(0, Part.OUTPUT, 0, 60),
        Fresh(1536 - 1160),
        Block(5, 264),
    )
    assert third.prompt[:3] == (
        Block(1, 512),
        Block(2, 512),
        Ref(1, Part.PROMPT, 1024, 1800 - 1024),
    )
    assert third.prompt[3:] == (Ref(1, Part.OUTPUT, 0, 9), Fresh(2048 - 1809), Block(7, 52))
    assert [(each.session, each.turn) for each in found.requests] == [(0, 0), (0, 1), (0, 2)]


def test_what_many_prompts_begin_with_is_no_conversation(tmp_path: Path) -> None:
    """Behind a system prompt many different blocks follow; one that asks again is of the session,
    and its answer is nobody's yet."""
    many = [([1, 2, number], 1100 + number, 5) for number in range(10, 16)]
    found = mooncake_rows(tmp_path / "trace.jsonl", [*many, ([1, 2, 10], 1110, 5)])
    assert [each.session for each in found.requests] == [0, 1, 2, 3, 4, 5, 0]
    assert found.requests[-1].prompt == found.requests[0].prompt
