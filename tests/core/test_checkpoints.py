"""Where requests resume on models with recurrent layers, and which states are kept for it."""

import pytest

from harness.core_fakes import answer, submit
from harness.core_server import Server, words
from kvtrio.core import invariants
from kvtrio.core.config import Group
from kvtrio.core.events import Abort
from kvtrio.core.explain import MissReason, TurnClass
from kvtrio.core.types import Retain, StateClass, Tier

STATE = Group(StateClass.POINT, None, 0, 64)
TOKENS = Group(StateClass.TOKEN, None, 8)
SIZES = {
    "groups": (STATE, TOKENS),
    "num_state_slots": 2,
    "num_host_state_slots": 20,
    "num_host_blocks": 200,
    "max_context": 512,
    "max_batch_tokens": 512,
    "checkpoint_spacing": 8,
    "checkpoint_grid": 64,
}
ANSWER = (7, 7, 7)


def hybrid(**changes):
    return Server(**{**SIZES, **changes})


def positions(server):
    """Of all checkpoints."""
    blocks = invariants._walk(server.core.cache.index.root)
    return sorted(each.position for block in blocks for each in block.checkpoints)


@pytest.mark.parametrize("groups", [(STATE, TOKENS), (TOKENS, STATE, STATE), (STATE,)])
@pytest.mark.parametrize("is_unified", [True, False])
def test_the_next_turn_goes_on_where_the_answer_ended(groups, is_unified):
    """Prompt and answer but its last token are reused, with attention layers or without."""
    server = hybrid(groups=groups, is_unified=is_unified)
    server.ask(words(1, 50))
    finished = server.ask((*words(1, 50), *ANSWER, *words(2, 20)))
    assert (finished.num_cached_tokens, finished.num_computed_tokens) == (52, 21)
    assert finished.cache.reason is MissReason.NEW_TOKENS


def test_a_state_inside_a_block_outlives_the_longer_block():
    """The turn that fills the block does not take the last one's end away."""
    server = hybrid()
    server.ask(words(1, 49))
    server.ask((*words(1, 49), *ANSWER, *words(2, 20)))
    assert 51 in positions(server)
    assert server.ask((*words(1, 49), *ANSWER, *words(3, 9))).num_cached_tokens == 51


@pytest.mark.parametrize("num_tokens", range(1, 40))
def test_an_identical_prompt_resumes_near_its_end(num_tokens):
    """The spacing and the slack before the end, whatever the length."""
    server = hybrid()
    first, second = (server.ask(words(1, num_tokens)) for _ in range(2))
    assert first.num_computed_tokens == num_tokens
    assert second.num_computed_tokens <= 8 + 4
    assert second.cache.reason is MissReason.NOTHING_MISSED


def test_checkpoints_stand_where_the_request_says():
    """At the ends of blocks before its positions, unless one stands close before."""
    server = hybrid()
    server.ask(words(1, 60), checkpoints=(2, 22, 26, 47))
    assert positions(server) == [20, 44, 56, 62]
    assert server.ask((*words(1, 24), *words(2, 9))).num_cached_tokens == 20


def test_long_stretches_have_a_sparse_grid():
    """In steps of the grid, of a multiple of it where the prompt is very long."""
    server = hybrid(checkpoint_grid=4, checkpoint_spacing=4)
    server.ask(words(1, 50))
    assert positions(server) == [*range(4, 49, 4), 52]
    server = hybrid(checkpoint_grid=4, checkpoint_spacing=4)
    server.ask(words(1, 200))
    assert positions(server) == [*range(16, 200, 16), 196, 202]


def test_where_prompts_part_the_third_one_resumes():
    """The second takes a checkpoint where it leaves the first."""
    server = hybrid(checkpoint_grid=512)
    system = words(1, 100)
    server.ask((*system, *words(2, 30)))
    second = server.ask((*system, *words(3, 30)))
    assert second.num_cached_tokens == 0
    assert second.cache.reason is MissReason.NO_CHECKPOINT
    assert second.cache.num_matched_tokens == 100
    assert server.ask((*system, *words(4, 30))).num_cached_tokens == 100


def test_tokens_without_a_state_are_no_reuse_and_the_report_says_so():
    """With a slot for each place and none besides, another conversation's start takes it."""
    server = hybrid(num_state_slots=1, num_host_state_slots=0)
    server.ask(words(1, 100))
    assert server.ask((*words(1, 100), *ANSWER, 5)).num_cached_tokens == 102
    server.ask(words(2, 20))
    back = server.ask((*words(1, 100), *ANSWER, 5, *ANSWER, 6))
    assert back.num_cached_tokens == 0
    assert (back.cache.reason, back.cache.turn) == (
        MissReason.NO_CHECKPOINT,
        TurnClass.CONTINUATION,
    )
    assert back.cache.num_matched_tokens == 106


def test_an_answer_that_is_read_otherwise_loses_little():
    """While it is written, a checkpoint goes along: the one before is given up for it."""
    server = hybrid()
    finished = server.ask(words(1, 20), max_new_tokens=100)
    assert finished.num_generated_tokens == 100
    assert positions(server) == [16, 112, 119]
    changed = (*words(1, 20), *(7 for _ in range(96)), 8, 8)
    assert server.ask(changed).num_cached_tokens == 112


def test_auxiliary_requests_leave_no_state():
    """They may resume from what others left."""
    server = hybrid()
    server.ask(words(1, 50))
    before = positions(server)
    finished = server.ask((*words(1, 50), *ANSWER, *words(2, 40)), retain=Retain.AUXILIARY)
    assert finished.num_cached_tokens == 52
    assert positions(server) == before


def test_what_an_aborted_request_computed_is_kept():
    """Its slot becomes the checkpoint where it was."""
    server = hybrid(max_batch_tokens=30)
    request_id = server.send(words(1, 60))
    batch = server.core.schedule(0.0)
    server.core.update(batch, answer(batch), 0.0)
    server.core.handle(Abort(request_id), 0.0)
    invariants.check(server.core)
    assert positions(server) == [30]
    assert server.ask(words(1, 60)).num_cached_tokens == 30


def test_one_that_lost_its_place_goes_on_where_it_was():
    """Preemption is a release, and coming back is a match."""
    server = hybrid(max_batch_tokens=30)
    request_id = server.send(words(1, 60))
    batch = server.core.schedule(0.0)
    server.core.update(batch, answer(batch), 0.0)
    server.core.preempt(server.core.requests[request_id], 0.0)
    invariants.check(server.core)
    (finished,) = server.run().values()
    assert (finished.num_preemptions, finished.num_recomputed_tokens) == (1, 0)


def test_equal_new_prompts_together_are_computed_once():
    """But for what lies behind the last checkpoint."""
    server = hybrid(num_places=3, num_state_slots=6, max_batch_tokens=64)
    ended = server.ask_all([(words(1, 41), {})] * 3)
    assert [f.num_computed_tokens for f in ended] == [41, 5, 5]


def test_the_last_of_a_conversation_outlives_its_older_ones():
    """With room for three, two conversations of many turns never start again."""
    server = hybrid(num_host_state_slots=2)
    asked = {1: words(1, 40), 2: words(2, 40)}
    for turn in range(8):
        for number in asked:
            finished = server.ask(asked[number])
            if turn:
                assert finished.num_computed_tokens <= 21
            asked[number] = (*asked[number], *ANSWER, *words(10 * turn + number, 20))
    assert len(positions(server)) <= 4


def test_pinned_states_go_last():
    """As long as the pin holds, others' go before."""
    server = hybrid(num_host_state_slots=3)
    server.ask(words(1, 40), retain=Retain.PIN, retain_s=1000.0)
    for number in range(2, 12):
        server.ask(words(number, 60))
    assert server.ask((*words(1, 40), *ANSWER, 5)).num_cached_tokens == 42
    server.now += 2000.0
    for number in range(12, 22):
        server.ask(words(number, 60))
    assert server.ask((*words(1, 40), *ANSWER, 6)).num_cached_tokens == 0


def test_blocks_behind_the_last_state_go_first():
    """Nobody can resume there."""
    server = hybrid(num_state_slots=1, num_host_state_slots=2, num_host_blocks=2, max_context=80)
    server.ask(words(1, 60), checkpoints=(20,))
    blocks = list(invariants._walk(server.core.cache.index.root))
    kept = [each for block in blocks for each in block.checkpoints]
    for checkpoint in kept:
        if checkpoint.position > 20:
            server.core.cache.states.drop(checkpoint, server.now)
    invariants.check(server.core)
    server.ask(words(2, 60), retain=Retain.AUXILIARY)
    gone = [block for block in blocks if block.key is None]
    assert len(gone) > 8
    assert all(block.start >= 20 for block in gone)
    assert server.ask(words(1, 60)).num_cached_tokens == 20


def test_states_never_outnumber_their_limits():
    """In either memory, running ones included."""
    server = hybrid(num_places=2, num_state_slots=3, num_host_state_slots=4, is_unified=False)
    for number in range(12):
        server.ask_all([(words(number, 30), {}), (words(100 + number, 50), {})])
        statistics = server.core.statistics()
        for tier in Tier:
            assert statistics.num_used_slots[tier] <= statistics.max_slots[tier]
    assert statistics.num_used_slots == {Tier.DEVICE: 3, Tier.HOST: 4}


def test_without_recurrent_layers_there_are_no_checkpoints():
    """Nothing is cut, copied or counted for them."""
    server = Server(groups=(TOKENS,), max_batch_tokens=64)
    server.core.handle(submit(1, token_ids=words(1, 30), checkpoints=(8,)), 0.0)
    batch = server.core.schedule(0.0)
    assert (batch.chunks[0].end, batch.copies) == (30, ())
    assert server.core.cache.states is None
    assert server.core.statistics().max_slots == {}
