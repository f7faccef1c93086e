"""The core, one behaviour at a time."""

import pytest
from attrs import evolve

from harness.core_fakes import NumberMatcher, answer, make_core, submit
from kvtrio.core import invariants
from kvtrio.core.batch import StepResult
from kvtrio.core.config import Group
from kvtrio.core.events import Abort, Drain, Finished, Progress, Rejected, Started, TokenOut
from kvtrio.core.identity import TOKEN_MASK
from kvtrio.core.policy import Plan, PolicyError, Share, View
from kvtrio.core.types import FinishReason, RejectReason, RequestId, StateClass, Tier
from kvtrio.schedulers.fcfs import FCFS
from kvtrio.schedulers.priority import Priority

STATES = {
    "groups": (
        Group(StateClass.TOKEN, None, 24),
        Group(StateClass.POINT, None, 0, bytes_per_state=24),
    ),
    "num_state_slots": 8,
}


def step(core, now=0.0, token_id=7):
    """One whole step, with the invariants checked around it."""
    batch = core.schedule(now)
    invariants.check(core)
    outputs = core.update(batch, answer(batch, token_id), now)
    invariants.check(core)
    return outputs


def run(core, now=0.0):
    """Steps until nothing is left; all outputs."""
    outputs = []
    while core.has_work:
        outputs += step(core, now)
    return outputs


def num_held(core):
    """Blocks that requests hold: what is used and not cached."""
    return sum(core.cache.num_used.values()) - core.cache.index.num_blocks


def of(kind, outputs):
    return [output for output in outputs if isinstance(output, kind)]


def test_a_request_runs_to_its_length():
    """Three tokens are asked for, three come, and one terminal event ends them."""
    core = make_core()
    assert core.handle(submit(1), 0.0) == []
    outputs = run(core)
    assert [(t.index, t.text) for t in of(TokenOut, outputs)] == [(0, "7 "), (1, "7 "), (2, "7 ")]
    (finished,) = of(Finished, outputs)
    assert finished.reason is FinishReason.LENGTH
    assert (finished.num_prompt_tokens, finished.num_computed_tokens) == (6, 6)
    assert finished.num_generated_tokens == 3
    assert num_held(core) == 0


def test_outputs_come_in_order():
    """Started, progress of the prompt, the first token."""
    core = make_core()
    core.handle(submit(1), 0.0)
    assert [type(output) for output in step(core)] == [Started, Progress, TokenOut]


def test_a_long_prompt_is_read_in_chunks_beside_decoding():
    """A prompt over the budget takes several steps, and a running stream moves in each."""
    core = make_core()
    core.handle(submit(1, max_new_tokens=20), 0.0)
    step(core)
    core.handle(submit(2, num_tokens=36), 0.0)
    sizes, tokens = [], 0
    for _ in range(3):
        batch = core.schedule(0.0)
        sizes.append([len(chunk.token_ids) for chunk in batch.chunks])
        tokens += len(of(TokenOut, core.update(batch, answer(batch), 0.0)))
    assert sizes == [[1, 15], [1, 15], [1, 6]]
    assert tokens == 4


def test_chunks_carry_positions_and_blocks():
    """Chunks follow each other without a gap, and the table covers them."""
    core = make_core()
    core.handle(submit(1, num_tokens=20), 0.0)
    first = core.schedule(0.0)
    core.update(first, answer(first), 0.0)
    second = core.schedule(0.0)
    (a,), (b,) = first.chunks, second.chunks
    assert (a.start, a.end, b.start, b.end) == (0, 16, 16, 20)
    assert a.token_ids + b.token_ids == tuple(range(100, 120))
    assert [len(table) for table in b.block_tables] == [5, 5]
    assert b.block_tables[0][:4] == a.block_tables[0]
    assert a.sample is None
    assert b.sample is not None


def test_end_of_generation_is_counted_but_has_no_text():
    """The end token is booked as generated and its text is not shown."""
    core = make_core()
    core.handle(submit(1, eos_ids=frozenset({7})), 0.0)
    outputs = run(core)
    assert [t.text for t in of(TokenOut, outputs)] == [""]
    (finished,) = of(Finished, outputs)
    assert (finished.reason, finished.stopped_by_text) == (FinishReason.STOP, False)
    assert finished.num_generated_tokens == 1


def test_a_stop_string_ends_the_request():
    """The matcher's word ends it, and nothing is flushed behind a stop."""
    core = make_core()
    core.handle(submit(1, matcher=NumberMatcher(frozenset({7}))), 0.0)
    (finished,) = of(Finished, run(core))
    assert (finished.reason, finished.stopped_by_text) == (FinishReason.STOP, True)
    assert finished.text == ""


def test_the_context_bounds_a_request_without_a_limit():
    """Prompt and answer together never exceed the context."""
    core = make_core()
    core.handle(submit(1, num_tokens=35, max_new_tokens=None), 0.0)
    (finished,) = of(Finished, run(core))
    assert finished.reason is FinishReason.LENGTH
    assert finished.num_generated_tokens == 5


@pytest.mark.parametrize(
    ("num_tokens", "reason"), [(0, RejectReason.EMPTY), (40, RejectReason.TOO_LONG)]
)
def test_impossible_prompts_are_rejected(num_tokens, reason):
    """Empty prompts and prompts that leave no room for a token are refused at once."""
    core = make_core()
    (rejected,) = core.handle(submit(1, num_tokens=num_tokens), 0.0)
    assert isinstance(rejected, Rejected)
    assert (rejected.reason, rejected.num_prompt_tokens) == (reason, num_tokens)
    assert not core.has_work


def test_the_queue_is_bounded():
    """Places plus waiting is the most that is admitted, wherever they are."""
    core = make_core()
    for number in range(8):
        assert core.handle(submit(number, tenant=b"%d" % number), 0.0) == []
    (rejected,) = core.handle(submit(8), 0.0)
    assert rejected.reason is RejectReason.QUEUE_FULL
    assert len(of(Finished, run(core))) == 8


def test_draining_refuses_new_and_finishes_old():
    """After a drain what was admitted ends in the ordinary way."""
    core = make_core()
    core.handle(submit(1), 0.0)
    core.handle(Drain(), 0.0)
    (rejected,) = core.handle(submit(2), 0.0)
    assert rejected.reason is RejectReason.DRAINING
    assert [f.reason for f in of(Finished, run(core))] == [FinishReason.LENGTH]


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_request_without_its_next_token_ends_alone(num_tokens):
    """One whose logits were not finite, right behind its prompt or later, frees all it held; the
    others go on."""
    core = make_core()
    for number in (1, 2):
        core.handle(submit(number), 0.0)
    for _ in range(num_tokens):
        batch = core.schedule(0.0)
        core.update(batch, answer(batch), 0.0)
    batch = core.schedule(0.0)
    sampled = tuple(
        None if chunk.request_id == 1 else each
        for chunk, each in zip(batch.chunks, answer(batch).sampled, strict=True)
    )
    (finished,) = [f for f in core.update(batch, StepResult(sampled), 0.0) if type(f) is Finished]
    assert (finished.request_id, finished.reason) == (1, FinishReason.ERROR)
    assert finished.num_generated_tokens == num_tokens
    invariants.check(core)
    assert [f.reason for f in of(Finished, run(core))] == [FinishReason.LENGTH]
    assert num_held(core) == 0


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("with_states", [False, True])
def test_a_request_that_no_step_has_memory_for_ends_alone(num_tokens, with_states):
    """Nothing of its chunk counts: what it would have written is neither published nor resumed."""
    core = make_core(**STATES if with_states else {})
    for number in (1, 2):
        core.handle(submit(number), 0.0)
    for _ in range(num_tokens):
        batch = core.schedule(0.0)
        core.update(batch, answer(batch), 0.0)
    batch = core.schedule(0.0)
    result = evolve(answer(batch), unplaced=(RequestId(1),))
    (finished,) = [f for f in core.update(batch, result, 0.0) if type(f) is Finished]
    assert (finished.request_id, finished.reason) == (1, FinishReason.NO_MEMORY)
    assert finished.num_generated_tokens == num_tokens
    invariants.check(core)
    own = [block for block in core.cache.index.root.children if block.tags[0] & TOKEN_MASK == 100]
    assert bool(own) is (num_tokens > 0)
    if with_states:
        assert core.cache.states.num_used[Tier.DEVICE] == 1
    assert [f.reason for f in of(Finished, run(core))] == [FinishReason.LENGTH]
    assert num_held(core) == 0


def test_abort_while_waiting_or_between_steps_frees_at_once():
    """Without a launched step nothing is held back."""
    core = make_core()
    core.handle(submit(1), 0.0)
    (finished,) = core.handle(Abort(RequestId(1)), 1.0)
    assert (finished.reason, finished.queue_s) == (FinishReason.ABORT, 1.0)
    core.handle(submit(2), 0.0)
    step(core)
    (finished,) = core.handle(Abort(RequestId(2)), 0.0)
    assert finished.reason is FinishReason.ABORT
    invariants.check(core)
    assert num_held(core) == 0
    assert core.handle(Abort(RequestId(2)), 0.0) == []


def test_abort_in_flight_waits_for_the_step():
    """Blocks that a launched batch names stay held until its update."""
    core = make_core()
    core.handle(submit(1), 0.0)
    batch = core.schedule(0.0)
    assert core.handle(Abort(RequestId(1)), 0.0) == []
    assert core.handle(Abort(RequestId(1)), 0.0) == []
    assert num_held(core) > 0
    invariants.check(core)
    (finished,) = core.update(batch, answer(batch), 0.0)
    assert finished.reason is FinishReason.ABORT
    assert finished.num_generated_tokens == 0
    assert num_held(core) == 0


def test_a_pinned_request_waits_for_its_place():
    """It runs in the place it asked for, and others go elsewhere meanwhile."""
    core = make_core(num_places=2)
    core.handle(submit(1, place=1, max_new_tokens=6), 0.0)
    step(core)
    core.handle(submit(2, place=1), 0.0)
    core.handle(submit(3), 0.0)
    started = {s.request_id: s.place for s in of(Started, run(core))}
    assert started == {2: 1, 3: 0}


def test_a_free_place_that_somebody_waits_for_is_left_to_them():
    """A request without a wish takes an unclaimed place first."""
    core = make_core()
    core.handle(submit(1), 0.0)
    core.handle(submit(2, place=0), 0.0)
    started = {s.request_id: s.place for s in of(Started, step(core))}
    assert started == {1: 1, 2: 0}


def test_times_add_up():
    """Queue, prefill and decode are measured from arrival to the last token."""
    core = make_core()
    core.handle(submit(1), 1.0)
    batch = core.schedule(3.0)
    core.update(batch, answer(batch), 7.0)
    step(core, 8.0)
    (finished,) = of(Finished, step(core, 9.0))
    assert (finished.queue_s, finished.prefill_s, finished.decode_s) == (2.0, 4.0, 2.0)


def test_places_show_what_they_last_held():
    """A finished request stays visible as counts, no longer processing."""
    core = make_core()
    core.handle(submit(1), 0.0)
    run(core)
    first, second, _ = core.statistics().places
    assert (first.is_processing, first.num_prompt_tokens, first.num_generated_tokens) == (
        False,
        6,
        3,
    )
    assert second.request_id is None


def test_a_step_is_bound_by_the_gap_only_where_somebody_streams():
    """The one token that is left of a known prompt is no stream; the next one's row is."""
    core = make_core()
    core.handle(submit(1, max_new_tokens=1), 0.0)
    run(core)
    core.handle(submit(2, 5, token_ids=(*range(100, 104), 1), max_new_tokens=2), 0.0)
    core.handle(submit(3, 9, max_new_tokens=2), 0.0)
    limits_s, num_tokens = [], []
    while core.has_work:
        batch = core.schedule(0.0)
        limits_s.append(batch.limit_s)
        num_tokens.append([len(chunk.token_ids) for chunk in batch.chunks])
        core.update(batch, answer(batch), 0.0)
    assert num_tokens == [[1, 9], [1, 1]]
    assert limits_s == [core.config.max_step_s, core.config.max_gap_s]


class Broken:
    """A policy that answers what it is told."""

    def __init__(self, shares):
        self.shares = shares

    def plan(self, view: View) -> Plan:
        return Plan(self.shares)


@pytest.mark.parametrize(
    "shares",
    [
        [Share(RequestId(9), 1)],
        [Share(RequestId(1), 1), Share(RequestId(1), 1)],
        [Share(RequestId(1), 0)],
    ],
)
def test_a_policy_that_breaks_its_contract_changes_nothing(shares):
    """Unknown, repeated or empty shares raise, and the core is as it was."""
    core = make_core(Broken(shares))
    core.handle(submit(1), 0.0)
    with pytest.raises(PolicyError):
        core.schedule(0.0)
    invariants.check(core)
    assert core.statistics().num_waiting == 1


def test_a_greedy_policy_is_clipped():
    """Shares over the budget or over what is missing are cut, not refused."""
    core = make_core(Broken([Share(RequestId(1), 99), Share(RequestId(2), 99)]))
    core.handle(submit(1, num_tokens=10), 0.0)
    core.handle(submit(2, num_tokens=10), 0.0)
    batch = core.schedule(0.0)
    assert [len(chunk.token_ids) for chunk in batch.chunks] == [10, 6]
    invariants.check(core)


def test_a_victim_goes_on_until_its_taker_starts():
    """Of two equal prompts of a high class one waits for the other's blocks: only one stream is
    stopped for them in that step, and the other when the second one starts."""
    core = make_core(Priority(), num_places=2)
    for number in (1, 2):
        core.handle(submit(number, max_new_tokens=20), 0.0)
    step(core)
    for number in (3, 4):
        token_ids = tuple(range(900, 912))
        core.handle(submit(number, token_ids=token_ids, priority=1), 0.0)
    for num_preemptions in (1, 2):
        batch = core.schedule(0.0)
        invariants.check(core)
        assert len(batch.chunks) == len(core.running) == 2
        assert sum(core.requests[i].num_preemptions for i in (1, 2)) == num_preemptions
        core.update(batch, answer(batch), 0.0)


def test_a_place_is_only_taken_by_who_waits():
    """A victim that is named for a running request breaks the contract."""

    class Greedy:
        def plan(self, view: View) -> Plan:
            first, *others = view.running or view.waiting
            return Plan([Share(first.request_id, 1, *(other.request_id for other in others))])

    core = make_core(Greedy())
    core.handle(submit(1), 0.0)
    step(core)
    core.handle(submit(2), 0.0)
    core.policy = FCFS()
    step(core)
    core.policy = Greedy()
    with pytest.raises(PolicyError, match="has a place"):
        core.schedule(0.0)


def test_a_policy_cannot_change_what_tenants_got():
    """It reads the core's own counters, and no more."""

    class Thief(FCFS):
        def plan(self, view: View) -> Plan:
            with pytest.raises(TypeError):
                view.service[b""] = -1.0
            return FCFS.plan(self, view)

    core = make_core(Thief())
    core.handle(submit(1), 0.0)
    step(core)
    assert core.service.counters[b""] > 0.0


def test_spare_blocks_keep_state_on_the_device():
    """A prompt is found again after more others than a device without them holds."""
    found = []
    for spare in (0, 40):
        core = make_core(num_host_blocks=0, num_spare_blocks=spare, num_spare_window_blocks=spare)
        for number in (*range(1, 16), 1):
            tokens = tuple(range(100 * number, 100 * number + 14))
            core.handle(submit(len(found) + 100 + number, token_ids=tokens), 0.0)
            (finished,) = of(Finished, run(core))
        found.append(finished.num_cached_tokens)
    assert found == [0, 13]
