"""Random traffic against the core: its rules hold after every event, and no state is ever read
that was computed from anything but the request's own history."""

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from harness.core_fakes import NumberMatcher, answer, config, shared_ram, submit
from harness.memory import Memory
from kvtrio.core import invariants
from kvtrio.core.config import Group
from kvtrio.core.events import Abort, Drain, Finished, Rejected, Tick, TokenOut
from kvtrio.core.identity import AdapterUse, KeyMaker, Segment
from kvtrio.core.machine import Core
from kvtrio.core.policy import Plan, Share
from kvtrio.core.types import FinishReason, Retain, StateClass
from kvtrio.schedulers.fair import Fair
from kvtrio.schedulers.fcfs import FCFS
from kvtrio.schedulers.priority import Priority
from kvtrio.schedulers.stall_free import StallFree

ADAPTERS = st.lists(
    st.builds(
        AdapterUse,
        adapter_id=st.integers(1, 3),
        digest=st.sampled_from([b"a" * 32, b"b" * 32]),
        scale=st.sampled_from([0.0, 0.5, 1.0]),
    ),
    max_size=2,
).map(tuple)


class CollidingKeys(KeyMaker):
    """Every key is the same: only the tokens tell blocks apart."""

    def block_key(self, parent, start, token_ids, runs):
        return b"x"


class Traffic(RuleBasedStateMachine):
    """Submits, aborts, steps and odd policies in any order."""

    keys = KeyMaker(b"secret of the tests", b"root")
    policies = (FCFS(), StallFree(), Fair(), Priority())
    sizes: ClassVar = {}
    num_examples = 100
    shares_ram = False
    """All kinds of state have one budget of bytes in RAM."""
    variety = 1
    """One request in so many differs from others in adapters or namespace."""

    def __init__(self):
        super().__init__()
        self.core = None
        self.batch = None
        self.now = 0.0
        self.number = 0
        self.open = {}
        self.ended = {}
        self.histories = {}
        self.asked = None
        self.prompts = [()]

    @initialize(
        num_host_blocks=st.sampled_from([0, 3, 20]),
        is_unified=st.booleans(),
        num_slots=st.tuples(st.sampled_from([3, 4, 9]), st.sampled_from([0, 1, 5])),
        num_host_parts=st.sampled_from([0, 2, 9]),
        ram_bytes=st.sampled_from([0, 70, 200, 1000]),
    )
    def start(self, num_host_blocks, is_unified, num_slots, num_host_parts, ram_bytes):
        sizes = {"num_host_blocks": num_host_blocks, "is_unified": is_unified, **self.sizes}
        sizes["num_host_window_blocks"] = num_host_parts
        sizes |= dict(zip(("num_state_slots", "num_host_state_slots"), num_slots, strict=True))
        if self.shares_ram:
            sizes |= shared_ram(ram_bytes, sizes["groups"], sizes.get("block_size", 4))
        self.core = Core(config(**sizes), self, self.keys)
        self.memory = Memory.of(self.core.config)

    def plan(self, view):
        """The first-come policy, or whatever a rule asked for."""
        asked, self.asked = self.asked, None
        if asked is not None:
            return asked
        return self.policies[self.number % len(self.policies)].plan(view)

    def take(self, outputs):
        for output in outputs:
            if isinstance(output, Rejected | Finished):
                submitted = self.open.pop(output.request_id)
                assert output.request_id not in self.ended
                self.ended[output.request_id] = output
                if isinstance(output, Finished) and output.reason in (
                    FinishReason.STOP,
                    FinishReason.LENGTH,
                ):
                    assert output.num_prompt_tokens == len(submitted.token_ids)
                    used = output.num_cached_tokens + output.num_computed_tokens
                    assert used == output.num_prompt_tokens
                    assert output.num_computed_tokens >= 1 or output.num_preemptions
                    assert submitted.reuse or output.num_cached_tokens == 0
            elif isinstance(output, TokenOut):
                self.history(output.request_id, output.sampled.token_id)

    def history(self, request_id, token_id):
        """One more position of a request, with all that its state depends on."""
        event, history = self.open[request_id], self.histories[request_id]
        segment = [s for s in event.segments if s.start <= len(history)][-1]
        uses = tuple(sorted((u.digest, u.scale) for u in segment.adapters if u.scale))
        history.append((token_id, event.namespace, uses))

    @rule(data=st.data())
    def submit(self, data):
        base = data.draw(st.sampled_from(self.prompts[-6:]))
        cut = data.draw(st.integers(0, len(base)))
        tail = data.draw(st.lists(st.integers(1, 3), max_size=14))
        is_odd = data.draw(st.integers(1, self.variety)) == 1
        adapters = data.draw(ADAPTERS) if is_odd else ()
        segments = (Segment(0, adapters),)
        if data.draw(st.booleans()) and cut > 1:
            segments = (Segment(0), Segment(data.draw(st.integers(1, cut)), adapters))
        self.number += 1
        event = submit(
            self.number,
            token_ids=(*base[:cut], *tail),
            max_new_tokens=data.draw(st.none() | st.integers(1, 12)),
            place=data.draw(st.none() | st.integers(0, 2)),
            eos_ids=frozenset({5}),
            matcher=NumberMatcher(frozenset({4})),
            segments=segments,
            namespace=data.draw(st.sampled_from([b"", b"tenant"])) if is_odd else b"",
            reuse=data.draw(st.integers(0, 5)) > 0,
            retain=data.draw(st.sampled_from([*Retain, Retain.NORMAL, Retain.NORMAL])),
            retain_s=2.0,
            tenant=data.draw(st.sampled_from([b"", b"one", b"two"])),
            priority=data.draw(st.integers(0, 2)),
            deadline_s=data.draw(st.none() | st.floats(self.now - 1, self.now + 3)),
            checkpoints=tuple(sorted(data.draw(st.sets(st.integers(0, 30), max_size=3)))),
        )
        self.open[event.request_id] = event
        self.histories[event.request_id] = []
        for token_id in event.token_ids:
            self.history(event.request_id, token_id)
        self.take(self.core.handle(event, self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.take(self.core.handle(Abort(request_id), self.now))

    @precondition(lambda self: self.core and self.batch is None)
    @rule(data=st.data(), odd=st.booleans())
    def schedule(self, data, odd):
        self.take(self.core.handle(Tick(), self.now))
        if odd and self.core.requests:
            self.asked = self.odd_plan(data)
        self.batch = self.core.schedule(self.now)

    def odd_plan(self, data):
        """Anything that the contract allows."""
        ids = data.draw(st.permutations(sorted(self.core.requests)))
        all_streams = data.draw(st.booleans())
        victims = [i for i in ids if i in self.core.running and data.draw(st.booleans())]
        streams = self.core.streams.rows if all_streams else ()
        rest = [i for i in ids if i not in victims and i not in streams]
        shares = []
        for i in rest:
            victim = None if i in self.core.running or not victims else victims.pop()
            shares.append(Share(i, data.draw(st.integers(1, 50)), victim))
        return Plan(shares, all_streams)

    @precondition(lambda self: self.batch is not None)
    @rule(token_id=st.sampled_from([1, 1, 1, 2, 2, 3, 4, 5]), seconds=st.floats(0, 1))
    def update(self, token_id, seconds):
        self.now += seconds
        batch, self.batch = self.batch, None
        assert self.memory.run(batch, self.histories) == ()
        self.take(self.core.update(batch, answer(batch, token_id), self.now))
        for chunk in batch.chunks:
            tokens = [item[0] for item in self.histories[chunk.request_id]]
            self.prompts.append(tuple(tokens))

    @precondition(lambda self: self.number > 25)
    @rule()
    def drain(self):
        self.core.handle(Drain(), self.now)

    @invariant()
    def rules_hold(self):
        if self.core is not None:
            invariants.check(self.core)
            assert self.open.keys() == self.core.requests.keys()

    def teardown(self):
        """Whatever is open ends, and nothing is left behind but the cache."""
        if self.core is None:
            return
        if self.batch is not None:
            self.update(3, 0.0)
        for _ in range(2000):
            if not self.core.has_work:
                break
            self.schedule(None, False)
            if self.batch is not None:
                self.update(3, 0.0)
            invariants.check(self.core)
        assert not self.open
        used = sum(self.core.cache.num_used.values())
        assert used == self.core.cache.index.num_blocks
        if (states := self.core.cache.states) is not None:
            assert sum(states.num_used.values()) == self.core.cache.index.root.num_states


class CollidingTraffic(Traffic):
    """The same with a hash that is no hash."""

    keys = CollidingKeys(b"secret of the tests", b"root")


class CrowdedTraffic(Traffic):
    """The same with one small place."""

    sizes: ClassVar = {"num_places": 3, "max_context": 16, "block_size": 4}


STATE = Group(StateClass.POINT, None, 0, 64)
NEAR = {"checkpoint_spacing": 4, "checkpoint_grid": 8}


class HybridTraffic(Traffic):
    """The same with recurrent layers around those with K and V."""

    variety = 8
    sizes: ClassVar = {
        "groups": (STATE, Group(StateClass.TOKEN, None, 8), STATE, Group(StateClass.WINDOW, 16, 8)),
        **NEAR,
    }


class RecurrentTraffic(Traffic):
    """The same with recurrent layers alone, and keys that collide."""

    keys = CollidingTraffic.keys
    variety = 8
    sizes: ClassVar = {"groups": (STATE, STATE), **NEAR}


class CrowdedHybridTraffic(Traffic):
    """The same with small places: requests end within few blocks."""

    variety = 8
    sizes: ClassVar = {**HybridTraffic.sizes, **CrowdedTraffic.sizes}


class WindowTraffic(Traffic):
    """The same with windows of little more than a block, of a few tokens and of many blocks."""

    variety = 8
    sizes: ClassVar = {
        "groups": (
            Group(StateClass.WINDOW, 6, 8),
            Group(StateClass.TOKEN, None, 8),
            Group(StateClass.WINDOW, 3, 8),
        ),
        "max_context": 64,
        **NEAR,
    }


class WindowsOnlyTraffic(Traffic):
    """The same without full attention, with keys that collide."""

    keys = CollidingTraffic.keys
    variety = 8
    sizes: ClassVar = {"groups": (Group(StateClass.WINDOW, 5, 8),), "max_context": 64, **NEAR}


class WindowHybridTraffic(Traffic):
    """The same with recurrent layers and windows."""

    variety = 8
    sizes: ClassVar = {
        "groups": (STATE, Group(StateClass.WINDOW, 7, 8), Group(StateClass.TOKEN, None, 8)),
        "max_context": 64,
        **NEAR,
    }


class SharedHybridTraffic(HybridTraffic):
    """The same with one small budget in RAM."""

    num_examples = 30
    shares_ram = True


class SharedWindowHybridTraffic(WindowHybridTraffic):
    """The same with small windows."""

    num_examples = 30
    shares_ram = True


class CrowdedSharedTraffic(CrowdedHybridTraffic):
    """The same with small places."""

    num_examples = 50
    shares_ram = True


@pytest.mark.slow
@pytest.mark.parametrize(
    "traffic",
    [
        Traffic,
        CollidingTraffic,
        CrowdedTraffic,
        HybridTraffic,
        RecurrentTraffic,
        CrowdedHybridTraffic,
        WindowTraffic,
        WindowsOnlyTraffic,
        WindowHybridTraffic,
        SharedHybridTraffic,
        SharedWindowHybridTraffic,
        CrowdedSharedTraffic,
    ],
)
def test_random_traffic(traffic):
    """See the classes."""
    run_state_machine_as_test(
        traffic,
        settings=settings(
            max_examples=traffic.num_examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        ),
    )
