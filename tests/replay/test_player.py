"""Playing a scenario: when requests are sent, what is said of them, and what ends it."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from attrs import evolve

from harness.replaying import client, play
from harness.serving import serving
from harness.virtual import SimSettings
from kvtrio.core.explain import CachePath
from kvtrio.replay.asking import Ask
from kvtrio.replay.listening import Answer
from kvtrio.replay.pacing import PlaySettings, schedule
from kvtrio.replay.played import Played
from kvtrio.replay.results import Api, Outcome, Pacing, Result, ServerKind
from kvtrio.replay.scenario import (
    Adapter,
    Expect,
    Fresh,
    Header,
    Line,
    Origin,
    Part,
    Ref,
    Request,
    Use,
)
from kvtrio.replay.scenario_file import Scenario, checked, collect
from kvtrio.replay.target import ReplayError, Target, Wishes, look
from kvtrio.replay.verdicts import Judge
from kvtrio.replay.words import WordTable, common_words

SIM = SimSettings(num_places=4, max_context=512, max_batch_tokens=64, block_size=16)
HEADER = Header(origin=Origin.MADE, max_context=512, purposes=("chat",))
OPEN = PlaySettings(pacing=Pacing.OPEN)


def conversation(think_s: float = 2.0) -> Scenario:
    """Three turns, 10 s apart."""
    turns: list[Line] = [HEADER]
    for turn in range(3):
        before = (Ref(turn - 1, Part.PROMPT, 0, 30 * turn + 5 * (turn - 1)),) if turn else ()
        answer = (Ref(turn - 1, Part.OUTPUT, 0, 5),) if turn else ()
        turns.append(
            Request(
                id=turn,
                at_s=10.0 * turn,
                session=1,
                turn=turn,
                think_s=think_s if turn else None,
                output_tokens=5,
                prompt=(*before, *answer, Fresh(30)),
            )
        )
    return collect(checked(turns))


def alone(*requests: Request) -> Scenario:
    return collect(checked([HEADER, *requests]))


@pytest.mark.slow
async def test_open_keeps_the_recorded_times(autojump_clock: Any) -> None:
    """Each request is sent when it came, divided by the speed; what the server says is noted."""
    played = await play(conversation(), SIM, evolve(OPEN, speed=4.0))
    assert [each.sent_s for each in played.results] == [0.0, 2.5, 5.0]
    assert [each.planned_s for each in played.results] == [0.0, 2.5, 5.0]
    last = played.results[-1]
    assert last.outcome is Outcome.DONE
    assert (last.num_prompt_tokens, last.num_cached_tokens) == (100, 69)
    assert last.path is CachePath.RESIDENT
    assert len(last.gaps_s) == 4
    assert last.first_token_s is not None
    assert last.gap_max_s == max(last.gaps_s)


async def test_closed_waits_for_the_answer_and_the_thought(autojump_clock: Any) -> None:
    """However long the answer takes."""
    played = await play(conversation(), SIM, evolve(OPEN, pacing=Pacing.CLOSED))
    first, second, third = played.results
    assert second.sent_s == pytest.approx(first.sent_s + first.total_s + 2.0, abs=1e-3)
    assert third.sent_s == pytest.approx(second.sent_s + second.total_s + 2.0, abs=1e-3)


async def test_an_answer_that_is_needed_is_waited_for(autojump_clock: Any) -> None:
    """At a speed at which the turn would come first, it is late, and goes on from what was said."""
    played = await play(conversation(), SIM, evolve(OPEN, speed=1e6))
    first, second, _ = played.results
    assert second.planned_s < second.sent_s
    assert second.sent_s >= first.sent_s + first.total_s
    assert [each.num_cached_tokens for each in played.results] == [0, 34, 69]


def test_a_sample_keeps_sessions_whole() -> None:
    """All turns of a session are played, or none."""
    requests = [
        Request(id=n, at_s=0.0, session=n % 50, output_tokens=1, prompt=(Fresh(5),))
        for n in range(200)
    ]
    plan = schedule(alone(*requests), PlaySettings(sample=0.4))
    sessions = [number % 50 for number in plan.numbers]
    assert all(sessions.count(each) == 4 for each in sessions)
    assert 10 <= len(set(sessions)) <= 30
    assert [each.id for each in plan.scenario.requests] == list(range(len(sessions)))


async def test_clients_that_leave(autojump_clock: Any) -> None:
    """One in the middle of its answer, one before the first token; the server sees both go."""
    scenario = alone(
        Request(id=0, at_s=0.0, left_s=9.0, output_tokens=5, prompt=(Fresh(30),)),
        Request(id=1, at_s=50.0, left_s=0.001, output_tokens=0, prompt=(Fresh(400),)),
        Request(id=2, at_s=90.0, output_tokens=5, prompt=(Fresh(30),)),
    )
    played = await play(scenario, SIM, OPEN)
    assert [each.outcome for each in played.results] == [Outcome.LEFT, Outcome.LEFT, Outcome.DONE]
    first, second, third = played.recorded.requests
    assert first.left_s is not None
    assert 5 <= first.output_tokens < 60
    assert second.left_s is not None
    assert (second.output_tokens, third.left_s) == (0, None)


@pytest.mark.slow
async def test_what_the_server_refuses(autojump_clock: Any) -> None:
    """A full queue is told from a failure, and neither ends the replay."""
    many = [Request(id=n, at_s=0.0, output_tokens=50, prompt=(Fresh(100),)) for n in range(9)]
    scenario = collect(
        checked(
            [
                evolve_header(2000),
                *many,
                Request(id=9, at_s=900.0, output_tokens=5, prompt=(Fresh(900),)),
            ]
        )
    )
    played = await play(scenario, evolve(SIM, num_places=1, max_waiting=3), OPEN)
    outcomes = [each.outcome for each in played.results]
    assert (outcomes.count(Outcome.DONE), outcomes.count(Outcome.REFUSED)) == (4, 5)
    assert outcomes[-1] is Outcome.FAILED
    assert played.results[-1].status == 400
    told = Played(10)
    for each in played.results:
        told.take(each)
    assert list(told.lines(1.0, ()))[1] == "not answered: 1 with status 400, 5 with status 429"


def evolve_header(max_context: int) -> Header:
    return Header(origin=Origin.MADE, max_context=max_context, purposes=("chat",))


@pytest.mark.slow
async def test_a_replay_that_is_stopped(autojump_clock: Any) -> None:
    """What ran gets a result all the same."""
    results: list[Result] = []
    with trio.move_on_after(1.0):
        await play(
            alone(Request(id=0, at_s=0.0, output_tokens=400, prompt=(Fresh(50),))),
            SIM,
            OPEN,
            also=results.append,
        )
    assert [each.outcome for each in results] == [Outcome.CUT]


@pytest.mark.slow
async def test_what_a_server_is(autojump_clock: Any) -> None:
    """kvtrio is known by what it says; adapters are found by name, or in order, or it is said that
    they are missing."""
    ours = (Adapter(alias="a0"), Adapter(alias="a1"))
    async with serving(sim=SIM) as server:
        http = client(server)
        with pytest.raises(ReplayError, match="2 adapters and the server 0"):
            await look(http, Wishes(), ours)
        await server.add_adapter("first")
        await server.add_adapter("second")
        target = await look(http, Wishes(adapters={"a0": "second"}), ours)
        assert (target.kind, target.api) == (ServerKind.KVTRIO, Api.TOKENS)
        assert target.adapter_ids == {"a0": 1, "a1": 1}
        assert target.max_context == 512
        assert len(target.vocabulary) > 90
        with pytest.raises(ReplayError, match="no adapter 'other'"):
            await look(http, Wishes(adapters={"a0": "other"}), ours)


@pytest.mark.slow
@pytest.mark.parametrize("api", [Api.WORDS, Api.CHAT])
async def test_servers_that_take_text(autojump_clock: Any, api: Api) -> None:
    """Prompts of words, that hold what was answered."""
    played = await play(conversation(), evolve(SIM, max_context=2048), OPEN, api=api)
    assert {each.outcome for each in played.results} == {Outcome.DONE}
    tokens = [each.num_prompt_tokens for each in played.results]
    assert tokens == sorted(tokens)
    assert all(each.first_token_s for each in played.results)


def test_bodies() -> None:
    """Each server gets what it knows: ours the purpose, llama-server scales of all adapters, others
    an adapter as a model."""
    request = Request(
        id=0,
        at_s=0.0,
        session=3,
        is_named=True,
        purpose=0,
        tenant=2,
        namespace=1,
        priority=4,
        adapters=(Use(alias="a0", scale=0.5),),
        output_tokens=7,
        prompt=(Fresh(3),),
    )
    ask = Ask(request, [1, 2, 3], 9, ("chat",), 7)
    ids = {"adapter_ids": {"a0": 1}, "all_ids": (0, 1)}
    ours = ask.body(_target(ServerKind.KVTRIO, Api.TOKENS, purposes=("chat",), **ids))
    assert ours["prompt"] == [1, 2, 3]
    assert (ours["n_predict"], ours["seed"], ours["ignore_eos"]) == (7, 9, True)
    assert ours["lora"] == [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 0.5}]
    assert ours["kvtrio"] == {
        "retain": "normal",
        "session": "scenario 3",
        "priority": 4,
        "purpose": "chat",
    }
    assert (ours["user"], ours["cache_salt"]) == ("tenant 2", "namespace 1")
    theirs = ask.body(_target(ServerKind.LLAMA, Api.TOKENS, **ids))
    assert "kvtrio" not in theirs
    assert theirs["lora"] == ours["lora"]
    text = Ask(request, "some words", 9, ("chat",), 7)
    other = text.body(
        _target(ServerKind.OPENAI, Api.WORDS, adapter_names={"a0": "m"}, more={"top_k": 1})
    )
    assert (other["model"], other["prompt"], other["max_tokens"]) == ("m", "some words", 7)
    assert other["top_k"] == 1
    assert not {"lora", "kvtrio", "ignore_eos"} & other.keys()


def _target(kind: ServerKind, api: Api, **more: Any) -> Target:
    import numpy as np

    fields: dict[str, Any] = {"model": "base", "max_context": None, "vocabulary": np.arange(9)}
    return Target(kind=kind, api=api, **(fields | more))


async def test_streams_of_other_servers() -> None:
    """Texts are counted as they come, and usage is read from the last event."""
    answer = Answer(Api.WORDS)
    events: Sequence[Any] = [
        {"choices": [{"text": " one"}]},
        {"choices": [{"text": " two"}]},
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        },
    ]
    raw = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
    raw += b": comment\n\ndata: [DONE]\n\n"
    for start in range(0, len(raw), 7):
        answer.take(200, raw[start : start + 7])
    assert answer.is_whole
    assert answer.atoms == [" one", " two"]
    assert answer.told() == {
        "num_cached_tokens": 4,
        "num_prompt_tokens": 9,
        "num_generated_tokens": 2,
    }


@pytest.mark.parametrize("event", [b"data: {]\n\n", b'data: {"error":{}}\n\n', b"data: 5\n\n"])
async def test_streams_that_make_no_sense(event: bytes) -> None:
    """They are a failure of the server."""
    with pytest.raises(ReplayError):
        Answer(Api.TOKENS).take(200, event)


def test_verdicts() -> None:
    """True, false, or not to be told; what was left out before leaves a doubt."""
    expects = (
        Expect(request=0, min_cached=5, max_cached=5, paths=(CachePath.RAM,), max_gap_s=1.0),
        Expect(request=1, output_as=0),
        Expect(request=2, output_unlike=0, min_cached=1),
    )
    judge = Judge(expects, counts_tokens=True)
    for number in range(3):
        if number == 2:
            judge.doubt()
        judge.take(_result(number), [1, 2, 3])
    found = {(each.request, each.what): each.is_met for each in judge.verdicts()}
    assert found == {
        (0, "min_cached"): True,
        (0, "max_cached"): False,
        (0, "paths"): False,
        (0, "max_gap_s"): None,
        (1, "output_as"): True,
        (2, "min_cached"): None,
        (2, "output_unlike"): None,
    }


def _result(number: int) -> Result:
    return Result(
        id=number,
        planned_s=0.0,
        sent_s=0.0,
        total_s=1.0,
        outcome=Outcome.DONE,
        status=200,
        num_cached_tokens=7,
        path=CachePath.RESIDENT,
    )


def test_words_are_many_and_plain() -> None:
    """Each is written in small letters and stands there once."""
    words = common_words()
    assert len(words) > 300
    assert all(word.isalpha() and word.islower() for word in words)
    table = WordTable()
    assert table.join([0, 1, table.number("!")]) == f" {words[0]} {words[1]}!"
    assert table.number("!") == len(words)


@pytest.mark.slow
async def test_a_key_is_sent(autojump_clock: Any) -> None:
    """Without the right one, one line says so."""
    async with serving(sim=SIM, api_keys=("right",)) as server:
        for key in (None, "wrong"):
            with pytest.raises(ReplayError, match="asks for a key"):
                await look(client(server, key), Wishes(), ())
        target = await look(client(server, "right"), Wishes(), ())
        assert target.kind is ServerKind.KVTRIO
