"""Scenarios in virtual time: the same decisions however they are computed, and every time."""

import io
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from random import Random

import pytest
from attrs import define, evolve

from harness.scenarios import Traffic, random_scenario
from kvtrio.core import invariants
from kvtrio.core.config import CoreConfig, Group
from kvtrio.core.types import StateClass
from kvtrio.obs.logging import Clock, Log
from kvtrio.obs.observer import JsonObserver, StepSampling
from kvtrio.obs.schema import Level
from kvtrio.plugins import SCHEDULERS, load, names
from kvtrio.replay.machines import SHIPPED
from kvtrio.replay.make_settings import MakeSettings
from kvtrio.replay.maker import make
from kvtrio.replay.ranges import Vocabulary, cut, joined, total
from kvtrio.replay.scenario import Part, Ref, What
from kvtrio.replay.scenario_file import Scenario, checked, collect
from kvtrio.replay.simulated_core import PlainTrail
from kvtrio.replay.simulation import SimulatedServer, Simulation

SMALL: dict[str, object] = {
    "groups": (Group(StateClass.TOKEN, None, 8), Group(StateClass.WINDOW, 16, 8)),
    "block_size": 4,
    "num_places": 3,
    "max_context": 400,
    "max_waiting": 8,
    "max_batch_tokens": 64,
    "num_host_blocks": 60,
}
RECURRENT: dict[str, object] = {
    "groups": (Group(StateClass.TOKEN, None, 8), Group(StateClass.POINT, None, 0, 64)),
    "num_state_slots": 8,
    "num_host_state_slots": 8,
    "checkpoint_spacing": 8,
    "checkpoint_grid": 32,
}


@define
class _Now:
    simulation: Simulation | None = None

    def __call__(self) -> float:
        return self.simulation.now if self.simulation else 0.0


def log_of(scenario: Scenario, scheduler: str = "stall_free", **changes: object) -> bytes:
    """What a simulated server logs, every step included. ``changes``: of ``SMALL`` and of the
    server."""
    own = {key: changes.pop(key) for key in ("is_closed", "is_merged", "check") if key in changes}
    server = SimulatedServer(
        config=CoreConfig(**(SMALL | changes)),  # type: ignore[arg-type]
        policy=load(SCHEDULERS, scheduler)(),
        machine=SHIPPED["two-cores"],
        **own,  # type: ignore[arg-type]
    )
    file, now = io.BytesIO(), _Now()
    clock = Clock(monotonic_ns=lambda: int(1e9 * now()), wall_s=now)
    log = Log(file, clock, Level.DEBUG)
    writer = JsonObserver(log, StepSampling(), key=bytes(32))
    now.simulation = Simulation(server, scenario, writer, writer.wants_step)
    for _ in now.simulation.run():
        pass
    return file.getvalue()


KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "two memories": {"is_unified": False},
    "recurrent": RECURRENT,
    "recurrent, two memories": RECURRENT | {"is_unified": False},
    "closed": {"is_closed": True},
    "tight": {"num_host_blocks": 4, "num_places": 2, "max_gap_s": 0.004},
}


CASES = [(name, "plain") for name in names(SCHEDULERS)]
CASES += [("stall_free", kind) for kind in KINDS if kind != "plain"]


@pytest.mark.slow
@pytest.mark.parametrize(("scheduler", "kind"), CASES)
def test_many_steps_at_once_change_nothing(scheduler, kind):
    """The log, with every step in it, is that of a run step by step; the core stays consistent."""
    seed = len(scheduler) + len(kind)
    traffic = Traffic(num_requests=40, may_restart=True, max_output=60, mean_gap_s=0.5)
    scenario, changes = random_scenario(seed, traffic), KINDS[kind]
    merged = log_of(scenario, scheduler, check=invariants.check, **changes)
    assert merged == log_of(scenario, scheduler, is_merged=False, **changes)
    assert merged.count(b'"request.done"') > 20


def test_most_steps_are_taken_many_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Else the test above compares nothing."""
    counts = [0, 0]
    real: dict[str, Callable[..., object]] = {
        "_step": Simulation._step,
        "_note_stretch": Simulation._note_stretch,
    }

    def counted(index: int, name: str) -> Callable[..., object]:
        def call(self: Simulation, argument: object) -> object:
            counts[index] += 1
            return real[name](self, argument)

        return call

    for index, name in enumerate(real):
        monkeypatch.setattr(Simulation, name, counted(index, name))
    log_of(random_scenario(3, Traffic(max_output=60, mean_gap_s=0.5)))
    assert counts[1] > 2 * counts[0]


def test_a_later_turn_hashes_only_what_is_new(monkeypatch: pytest.MonkeyPatch):
    """Whether or not a server was told the conversation's name."""
    counts: list[int] = []
    real = PlainTrail._key_after

    def counted(trail: PlainTrail, index: int, num_tokens: int) -> bytes:
        counts[-1] += 1
        return real(trail, index, num_tokens)

    monkeypatch.setattr(PlainTrail, "_key_after", counted)
    settings = MakeSettings(num_sessions=2, num_turns=6, user_tokens=20, output_tokens=4)
    for named in (True, False):
        counts.append(0)
        scenario = collect(checked(make(evolve(settings, named=named))))
        log_of(scenario, num_host_blocks=4000, max_context=4000)
    num_prompt_tokens = sum(request.prompt_tokens for request in scenario.requests)
    assert counts[0] == counts[1] < num_prompt_tokens / 2 / 4


def test_every_request_is_accounted_for():
    """Each gets one line, finished or refused, under pressure on places, queue and cache."""
    scenario = random_scenario(5, Traffic(num_requests=200, mean_gap_s=0.02))
    log = log_of(scenario, num_host_blocks=8, max_waiting=3, max_waiting_tokens=500)
    done, refused = log.count(b'"request.done"'), log.count(b'"request.rejected"')
    assert done + refused == 200
    assert refused > 5
    assert b'"cache.evict"' in log


@pytest.mark.slow
def test_equal_runs_log_equal_bytes():
    """Also in another process, whose hashes differ."""
    code = (
        "import hashlib, sys; from harness.scenarios import random_scenario;"
        "from replay.test_simulation import log_of;"
        "log = log_of(random_scenario(4), num_host_blocks=8);"
        "sys.stdout.write(hashlib.sha256(log).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={"PYTHONPATH": ":".join(path for path in sys.path if path), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 64


@pytest.mark.slow
def test_a_restart_forgets():
    """What came before it is not found after it, and everybody has ended before it."""
    scenario = random_scenario(11, Traffic(num_requests=120, may_restart=True))
    numbers = [number for number, action in scenario.actions if action.what is What.RESTART]
    assert numbers
    log = log_of(scenario, num_host_blocks=400)
    lines = [line for line in log.splitlines() if b'"request.done"' in line]
    first = next(line for line in lines if b'"request_id":%d,' % numbers[0] in line)
    assert b'"num_cached_tokens":0' in first


# --- tokens ---


def test_tokens_are_equal_where_the_scenario_says_so_and_nowhere_else():
    """Against a naive list of every token."""
    scenario = random_scenario(8, Traffic(num_requests=150))
    vocabulary = Vocabulary()
    seen: set[int] = set()
    for request in scenario.requests:
        vocabulary.add(request)
        prompt = list(chain(*vocabulary.prompts[request.id]))
        assert len(prompt) == request.prompt_tokens
        start = 0
        for piece in request.prompt:
            here = prompt[start : start + piece.length]
            start += piece.length
            if isinstance(piece, Ref):
                known = (vocabulary.prompts if piece.part is Part.PROMPT else vocabulary.outputs)[
                    piece.request
                ]
                assert here == list(chain(*known))[piece.start : piece.start + piece.length]
            elif type(piece).__name__ == "Fresh":
                assert not seen & set(here)
        seen |= {*prompt, *chain(*vocabulary.outputs[request.id])}


def test_ranges_are_cut_and_joined_as_lists_are():
    """Any part of any row."""
    rng = Random(2)
    for _ in range(200):
        parts = [range(n, n + rng.randrange(4)) for n in rng.choices([0, 3, 5, 100], k=5)]
        row, whole = joined(parts), [token for part in parts for token in part]
        assert list(chain(*row)) == whole
        assert total(row) == len(whole)
        start = rng.randrange(len(whole) + 1)
        length = rng.randrange(len(whole) - start + 1)
        assert list(chain(*cut(row, start, length))) == whole[start : start + length]
