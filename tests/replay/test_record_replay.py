"""Traffic that was recorded plays to the same decisions."""

from collections import Counter
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import pytest
from attrs import evolve
from msgspec.structs import replace

from harness.replaying import computing, play
from harness.virtual import Records, SimSettings
from kvtrio.engine.records import RequestRecord
from kvtrio.replay.machines import SHIPPED
from kvtrio.replay.make_settings import MakeSettings
from kvtrio.replay.maker import make
from kvtrio.replay.pacing import PlaySettings
from kvtrio.replay.results import Outcome, Pacing
from kvtrio.replay.scenario import Ref
from kvtrio.replay.scenario_file import Scenario, checked, collect
from kvtrio.replay.simulation import SimulatedServer, Simulation
from kvtrio.schedulers.stall_free import StallFree

MIXED = MakeSettings(
    seed=4,
    num_sessions=62,
    num_turns=4,
    num_systems=3,
    system_tokens=40,
    user_tokens=8,
    output_tokens=6,
    think_s=30.0,
    max_context=256,
    switch_share=0.15,
    again_share=0.1,
    back_share=0.1,
    summary_share=0.1,
    leave_share=0.05,
    probe_every_s=20.0,
    num_burst=6,
    burst_tokens=60,
    num_tenants=3,
)
OPEN = PlaySettings(pacing=Pacing.OPEN)
ROOMY = SimSettings(
    num_places=96,
    max_context=256,
    max_batch_tokens=256,
    block_size=16,
    num_host_blocks=0,
    is_paranoid=False,
)
"""So much memory that nothing is displaced."""


def mixed(**changes: Any) -> Scenario:
    return collect(checked(make(evolve(MIXED, **changes))))


def in_virtual_time(scenario: Scenario, like: SimSettings) -> list[RequestRecord]:
    """The scenario simulated, at a pace at which no two requests overlap."""
    requests = tuple(replace(each, at_s=1000.0 * each.id) for each in scenario.requests)
    machine, records = SHIPPED["two-cores"], Records()
    server = SimulatedServer(config=like.config, policy=StallFree(), machine=machine)
    for _ in Simulation(server, evolve(scenario, requests=requests), records).run():
        pass
    return sorted(records.requests, key=lambda record: record.request_id)


def what_was_reused(record: RequestRecord) -> tuple[Any, ...]:
    """The part of a decision that time has no part in."""
    cache = record.cache
    return (
        record.num_prompt_tokens,
        record.num_cached_tokens,
        cache.path,
        cache.reason,
        cache.num_matched_tokens,
        cache.num_other_tokens,
        cache.is_divergence,
    )


def decision(record: RequestRecord) -> tuple[Any, ...]:
    """What the cache decided for a request, and how long it was."""
    return (
        record.num_prompt_tokens,
        record.num_cached_tokens,
        record.num_computed_tokens,
        record.num_recomputed_tokens,
        record.retain,
        record.purpose,
        len(record.adapters),
        record.cache,
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_computing", [False, True], ids=["sim", "cpu"])
async def test_a_recording_replays_to_the_same_decisions(
    autojump_clock: Any, is_computing: bool
) -> None:
    """Three hundred mixed requests: sizes, paths, reasons and turns are equal, one by one; and in
    virtual time all that does not depend on time."""
    num_adapters = 0 if is_computing else 3
    first = mixed(num_adapters=num_adapters, named=not is_computing)
    assert len(first.requests) >= 300
    with computing(ROOMY) if is_computing else nullcontext(ROOMY) as server:
        once = await play(first, server, adapters=num_adapters)
        assert all(each.outcome in (Outcome.DONE, Outcome.LEFT) for each in once.results)
    with computing(ROOMY) if is_computing else nullcontext(ROOMY) as server:
        again = await play(once.recorded, server, adapters=num_adapters)
    assert [decision(each) for each in again.records] == [decision(each) for each in once.records]
    simulated = in_virtual_time(once.recorded, ROOMY)
    assert list(map(what_was_reused, simulated)) == list(map(what_was_reused, once.records))


def with_aborts(scenario: Scenario) -> Scenario:
    """Clients leave in their answers, as it has them do; and before, where nobody goes on from the
    answer. No two requests overlap."""
    pieces = [piece for each in scenario.requests for piece in each.prompt]
    needed = {piece.request for piece in pieces if isinstance(piece, Ref)}
    free = [each.id for each in scenario.requests[:-1] if each.id not in needed]
    left_s = dict(zip(free[::3], cycle([0.0004, 0.0015, 0.004]), strict=False))
    requests = [
        replace(
            each,
            at_s=1000.0 * each.id,
            left_s=left_s.get(each.id, each.left_s),
            output_tokens=0 if each.id in left_s else each.output_tokens,
        )
        for each in scenario.requests[:-1]
    ]
    return evolve(scenario, requests=tuple(requests))


@pytest.mark.slow
async def test_what_clients_left_is_found_again(autojump_clock: Any) -> None:
    """Three hundred requests, some aborted in or behind their prompts or in their answers: what
    comes after them finds the same when they are simulated or replayed; simulated ones do, too."""
    server = evolve(ROOMY, num_places=32, num_host_blocks=2000, max_batch_tokens=32)
    once = await play(with_aborts(mixed(leave_share=0.2)), server, OPEN)
    requests, found = once.recorded.requests, list(map(what_was_reused, once.records))
    where = Counter(
        (each.output_tokens > 0, each.stop is not None) for each in requests if each.left_s
    )
    assert len(requests) >= 300
    assert where[True, False] > 20
    assert min(where[False, False], where[False, True]) >= 2
    assert list(map(what_was_reused, in_virtual_time(once.recorded, server))) == found
    again = await play(once.recorded, server)
    pairs = zip(requests, found, map(what_was_reused, again.records), strict=True)
    assert [each for each, before, after in pairs if each.stop is None and before != after] == []
