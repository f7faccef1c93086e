"""What is kept for groups with a sliding window, and where requests resume."""

import pytest

from harness.core_server import Server, words
from kvtrio.core import invariants
from kvtrio.core.blocks import Block
from kvtrio.core.config import Group
from kvtrio.core.explain import MissReason
from kvtrio.core.identity import tags_of
from kvtrio.core.index import Match
from kvtrio.core.resume import shortened
from kvtrio.core.types import Retain, StateClass, Tier

WINDOW = Group(StateClass.WINDOW, 64, 40)
TOKENS = Group(StateClass.TOKEN, None, 8)
STATE = Group(StateClass.POINT, None, 0, 64)
SIZES = {
    "groups": (WINDOW, TOKENS),
    "block_size": 16,
    "max_context": 2048,
    "max_batch_tokens": 128,
    "num_host_blocks": 400,
    "num_host_window_blocks": 400,
}
ANSWER = (7, 7, 7)
SCARCE = 20
"""Blocks on the device: two windows of 5, one to copy from and one more, and a step's 8."""


def windowed(**changes):
    return Server(**{**SIZES, **changes})


def kept(server):
    """Starts of the blocks whose parts are there."""
    blocks = invariants._walk(server.core.cache.index.root)
    return sorted(block.start for block in blocks if block.part is not None)


@pytest.mark.parametrize(
    "groups", [(WINDOW, TOKENS), (TOKENS, WINDOW, Group(StateClass.WINDOW, 3, 8)), (WINDOW,)]
)
@pytest.mark.parametrize("is_unified", [True, False])
def test_with_room_a_request_resumes_anywhere(groups, is_unified):
    """Next turn, the same again, an edit in the middle: to the token, as without windows."""
    server = windowed(groups=groups, is_unified=is_unified)
    server.ask(words(1, 300))
    assert server.ask((*words(1, 300), *ANSWER, *words(2, 20))).num_computed_tokens == 21
    assert server.ask(words(1, 300)).num_computed_tokens == 1
    assert server.ask((*words(1, 150), *words(3, 9))).num_computed_tokens == 9


@pytest.mark.parametrize("is_unified", [True, False])
def test_a_long_conversation_needs_a_window_and_little_more(is_unified):
    """Its turns compute what is new, though there is room for a tenth of it."""
    server = windowed(num_host_window_blocks=0, is_unified=is_unified)
    assert server.core.cache.parts.limits[Tier.DEVICE] == SCARCE
    prompt = words(1, 1500)
    server.ask(prompt)
    for turn in range(5):
        prompt = (*prompt, *ANSWER, *words(10 + turn, 40))
        assert server.ask(prompt).num_computed_tokens == 41
    assert len(kept(server)) <= SCARCE
    assert server.ask(prompt).num_computed_tokens <= 41


def test_a_long_answer_holds_no_more_than_its_window():
    """What falls out of it may go at once; what is left suffices to go on."""
    server = windowed(num_host_window_blocks=0, num_places=2)
    others = [(words(number, 200), {"max_new_tokens": 300}) for number in (1, 2)]
    first, second = server.ask_all(others)
    assert (first.num_generated_tokens, second.num_generated_tokens) == (300, 300)
    more = (*words(1, 200), *(7 for _ in range(300)), 8)
    assert server.ask(more).num_computed_tokens == 2


def test_an_answer_that_is_read_otherwise_loses_little():
    """A few blocks before the last window are kept with it."""
    server = windowed(num_host_window_blocks=0)
    server.ask(words(1, 200), max_new_tokens=200)
    answer = tuple(7 for _ in range(200))
    assert server.ask((*words(1, 200), *answer[:-40], 8, 8)).num_computed_tokens == 2


def test_last_windows_outlive_what_was_passed():
    """Conversations that take turns in memory for little more than their last windows never start
    again; nothing is left of their beginnings."""
    server = windowed(num_host_window_blocks=20)
    asked = {number: words(number, 300) for number in (1, 2, 3)}
    for turn in range(6):
        for number in asked:
            finished = server.ask(asked[number])
            assert not turn or finished.num_computed_tokens == 31
            asked[number] = (*asked[number], *ANSWER, *words(100 * turn + number, 30))
    assert min(kept(server)) > 200


def test_wanted_windows_outlive_others():
    """With room for some, those before the positions that the request names are kept."""
    server = windowed(num_host_window_blocks=0)
    server.ask(words(1, 900), checkpoints=(300,))
    edited = (*words(1, 300), *words(2, 9))
    finished = server.ask(edited)
    assert (finished.num_cached_tokens, finished.num_computed_tokens) == (288, 21)
    assert server.ask((*words(1, 500), *words(3, 9))).num_computed_tokens > 200


def test_the_third_one_resumes_where_prompts_part():
    """There the second's window is wanted."""
    server = windowed(num_host_window_blocks=10)
    server.ask((*words(1, 500), *words(2, 30)))
    server.ask((*words(1, 500), *words(3, 300)))
    assert server.ask((*words(1, 500), *words(4, 30))).num_computed_tokens <= 30 + 16


def test_what_nobody_wants_goes_before_last_windows_however_old():
    """A long prompt leaves parts that are worth nothing; three of four conversations before it keep
    their windows."""
    server = windowed(num_host_window_blocks=21)
    for number in range(4):
        server.ask(words(1 + number, 300))
    server.ask(words(9, 900))
    kept = [server.ask((*words(1 + n, 300), *ANSWER, 5)).num_cached_tokens for n in (3, 2, 1, 0)]
    assert kept == [302, 302, 302, 0]


def test_tokens_without_their_window_are_no_reuse_and_the_report_says_so():
    """Others took the room; what is computed again is found next time."""
    server = windowed(num_host_window_blocks=0)
    server.ask(words(1, 300))
    for number in range(2, 5):
        server.ask(words(number, 300))
    back = server.ask((*words(1, 300), *ANSWER, 5))
    assert back.num_cached_tokens == 0
    assert back.cache.reason is MissReason.NO_CHECKPOINT
    assert back.cache.num_matched_tokens == 302
    assert server.ask((*words(1, 300), *ANSWER, 5, *ANSWER, 6)).num_computed_tokens == 2


def test_blocks_that_nobody_can_resume_in_go_first():
    """Before older ones whose windows are there."""
    server = windowed(num_host_window_blocks=0, num_host_blocks=0, max_context=640)
    server.ask(words(1, 300), retain=Retain.PIN, retain_s=1000.0)
    server.ask(words(2, 300))
    server.ask(words(3, 500), max_new_tokens=100)
    starts = server.core.cache.index.root.children
    assert {block.tags[0] & 0xFFFF for block in starts} == {1000, 3000}


def test_pinned_windows_go_last():
    """As long as the pin holds, others' go before."""
    server = windowed(num_host_window_blocks=0)
    server.ask(words(1, 100), retain=Retain.PIN, retain_s=1000.0)
    for number in range(2, 8):
        server.ask(words(number, 200))
    assert server.ask((*words(1, 100), *ANSWER, 5)).num_computed_tokens == 2


def test_what_is_not_kept_leaves_no_part():
    """It may go on from what others left."""
    server = windowed()
    server.ask(words(1, 100))
    before = kept(server)
    request = (*words(1, 100), *ANSWER, *words(2, 100))
    assert server.ask(request, retain=Retain.AUXILIARY).num_computed_tokens == 101
    assert kept(server) == before


def test_equal_prompts_together_are_computed_once():
    """Those that wait hold the same parts."""
    server = windowed(num_places=3)
    ended = server.ask_all([(words(1, 401), {})] * 3)
    assert [finished.num_computed_tokens for finished in ended] == [401, 1, 1]


def test_recurrent_layers_and_windows_resume_together():
    """At a checkpoint whose window is there, or at an earlier one."""
    sizes = {"num_state_slots": 2, "num_host_state_slots": 20, "checkpoint_grid": 128}
    server = windowed(groups=(STATE, WINDOW, TOKENS), **sizes)
    server.ask(words(1, 400))
    assert server.ask((*words(1, 400), *ANSWER, 5)).num_computed_tokens == 2
    assert server.ask((*words(1, 200), *words(2, 9))).num_cached_tokens == 128
    for block in invariants._walk(server.core.cache.index.root):
        if block.start == 144 and block.part is not None:
            server.core.cache.parts.lose(block.part, server.now)
    assert server.ask((*words(1, 200), *words(3, 9))).num_cached_tokens == 128


@pytest.mark.parametrize("is_unified", [True, False])
def test_parts_never_outnumber_their_limits(is_unified):
    """In either memory; where they are one, there is one limit."""
    server = windowed(num_places=2, num_host_window_blocks=7, is_unified=is_unified)
    for number in range(8):
        server.ask_all([(words(number, 200), {}), (words(100 + number, 70), {})])
        statistics = server.core.statistics()
        for tier in Tier:
            assert statistics.num_used_parts[tier] <= statistics.max_parts[tier]
    total = 2 * (2 * 5 + 2) + 8 + 7
    assert sum(statistics.max_parts.values()) == total == sum(statistics.num_used_parts.values())


def test_without_windows_nothing_is_counted_for_them():
    """A block has no part."""
    server = windowed(groups=(TOKENS,))
    server.ask(words(1, 100))
    assert kept(server) == []
    assert server.core.statistics().max_parts == {}


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "num_partial"),
    [(40, 2, 5), (37, 2, 5), (35, 2, 3), (32, 2, 0), (31, 1, 15), (5, 0, 5), (0, 0, 0)],
)
def test_a_match_is_shortened_to_the_token(num_tokens, num_blocks, num_partial):
    """Whole blocks and the first places of one more."""
    whole = tags_of((1,) * 16)
    blocks = tuple(Block(ids=(), tags=whole, start=end - 16, end=end) for end in (16, 32))
    rest = Block(ids=(), tags=tags_of((1,) * 5), start=32, end=37)
    match = shortened(Match(blocks, rest, 5, 37), num_tokens)
    assert (len(match.blocks), match.num_partial) == (num_blocks, num_partial)
    assert match.num_tokens == min(num_tokens, 37)
    assert match.partial is (None if not num_partial else (*blocks, rest)[num_blocks])
