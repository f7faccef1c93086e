"""Random traffic against the core: its rules hold after every event."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.core_fakes import NumberMatcher, answer, config, submit
from kvtrio.core import invariants
from kvtrio.core.events import Abort, Drain, Finished, Rejected, TokenOut
from kvtrio.core.machine import Core
from kvtrio.core.policy import Share
from kvtrio.core.types import FinishReason
from kvtrio.schedulers.fcfs import FCFS


class Traffic(RuleBasedStateMachine):
    """Submits, aborts, steps and odd policies in any order."""

    def __init__(self):
        super().__init__()
        self.core = Core(config(), self)
        self.batch = None
        self.now = 0.0
        self.number = 0
        self.open = {}
        self.ended = {}
        self.shares = None

    def plan(self, view):
        """The first-come policy, or whatever a rule asked for."""
        shares, self.shares = self.shares, None
        return FCFS().plan(view) if shares is None else shares

    def take(self, outputs):
        for output in outputs:
            if isinstance(output, Rejected | Finished):
                submitted = self.open.pop(output.request_id)
                assert output.request_id not in self.ended
                self.ended[output.request_id] = output
                if isinstance(output, Finished) and output.reason is not FinishReason.ABORT:
                    assert output.num_prompt_tokens == len(submitted.token_ids)
                    used = output.num_cached_tokens + output.num_computed_tokens
                    assert used == output.num_prompt_tokens
            elif isinstance(output, TokenOut):
                assert output.request_id in self.open

    @rule(
        num_tokens=st.integers(0, 45),
        max_new_tokens=st.none() | st.integers(1, 12),
        place=st.none() | st.integers(0, 2),
        stops=st.booleans(),
    )
    def submit(self, num_tokens, max_new_tokens, place, stops):
        self.number += 1
        event = submit(
            self.number,
            num_tokens,
            max_new_tokens=max_new_tokens,
            place=place,
            eos_ids=frozenset({1}),
            matcher=NumberMatcher(frozenset({2}) if stops else frozenset()),
        )
        self.open[event.request_id] = event
        self.take(self.core.handle(event, self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.take(self.core.handle(Abort(request_id), self.now))

    @precondition(lambda self: self.batch is None)
    @rule(data=st.data(), odd=st.booleans())
    def schedule(self, data, odd):
        if odd and self.core.requests:
            ids = data.draw(st.permutations(sorted(self.core.requests)))
            self.shares = [Share(i, data.draw(st.integers(1, 50))) for i in ids]
        self.batch = self.core.schedule(self.now)

    @precondition(lambda self: self.batch is not None)
    @rule(token_id=st.integers(1, 5), seconds=st.floats(0, 1))
    def update(self, token_id, seconds):
        self.now += seconds
        batch, self.batch = self.batch, None
        self.take(self.core.update(batch, answer(batch, token_id), self.now))

    @precondition(lambda self: self.number > 15)
    @rule()
    def drain(self):
        self.core.handle(Drain(), self.now)

    @invariant()
    def rules_hold(self):
        invariants.check(self.core)
        assert self.open.keys() == self.core.requests.keys()

    def teardown(self):
        """Whatever is open ends, and nothing is left behind."""
        if self.batch is not None:
            self.update(3, 0.0)
        for _ in range(2000):
            if not self.core.has_work:
                break
            self.schedule(None, False)
            self.update(3, 0.0)
        assert not self.open
        assert self.core.statistics().num_free_blocks == (30, 30)


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase
