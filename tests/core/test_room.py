"""One budget of bytes in RAM for all kinds of state: what stays, and which places have memory."""

import pytest

from harness.core_fakes import shared_ram
from harness.core_server import Server, words
from kvtrio.core import invariants
from kvtrio.core.batch import GiveBack
from kvtrio.core.config import Group
from kvtrio.core.rules import InvariantError
from kvtrio.core.types import Retain, StateClass, Tier

STATE = Group(StateClass.POINT, None, 0, 640)
TOKENS = Group(StateClass.TOKEN, None, 8)
WINDOW = Group(StateClass.WINDOW, 16, 40)
BLOCK, RAM = 4, 12_000
SIZES = {
    "block_size": BLOCK,
    "max_context": 512,
    "max_batch_tokens": 512,
    "num_state_slots": 2,
    "checkpoint_spacing": 8,
    "checkpoint_grid": 64,
}
ANSWER = (7, 7, 7)
KINDS = {"recurrent": (STATE, TOKENS), "windows": (TOKENS, WINDOW), "all": (STATE, TOKENS, WINDOW)}


def shared(groups, num_bytes=RAM, **changes):
    sizes = {**SIZES, **shared_ram(num_bytes, groups, BLOCK)}
    return Server(**{"groups": groups, **sizes, **changes})


def fixed(groups):
    """As backends share out as many bytes where each kind has its own; see ``backends.groups``."""
    if STATE in groups:
        num_slots = RAM // 2 // STATE.bytes_per_state
        rest = RAM - num_slots * STATE.bytes_per_state
        sizes = {"num_host_state_slots": num_slots, "num_host_blocks": rest // (8 * BLOCK)}
    else:
        num_blocks = 3 * RAM // (3 * 8 * BLOCK + 40 * BLOCK)
        sizes = {"num_host_blocks": num_blocks, "num_host_window_blocks": num_blocks // 3}
    return Server(groups=groups, **SIZES, **sizes, check=unchecked)


def unchecked(core):
    """The rules are checked elsewhere."""


def num_kept(server, count, num_tokens):
    """Of so many conversations with prompts of so many tokens, whose next turn computes what is
    new and little more."""
    for number in range(count):
        server.ask(words(number + 1, num_tokens))
    kept = 0
    for number in reversed(range(count)):
        turn = (*words(number + 1, num_tokens), *ANSWER, *words(90 + number, 8))
        kept += server.ask(turn).num_computed_tokens <= 16
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "count", "num_tokens", "with_shares", "with_one_budget"),
    [
        (KINDS["recurrent"], 30, 24, 10, 13),
        (KINDS["recurrent"], 20, 60, 7, 12),
        (KINDS["recurrent"], 12, 120, 4, 7),
        (KINDS["windows"], 20, 60, 10, 11),
        (KINDS["windows"], 6, 400, 2, 3),
    ],
)
def test_one_budget_keeps_more_conversations(
    groups, count, num_tokens, with_shares, with_one_budget
):
    """As many bytes, whatever the kind of state that the traffic has most of."""
    assert num_kept(fixed(groups), count, num_tokens) == with_shares
    assert num_kept(shared(groups, check=unchecked), count, num_tokens) == with_one_budget


@pytest.mark.slow
@pytest.mark.parametrize("is_unified", [True, False])
@pytest.mark.parametrize("groups", KINDS.values(), ids=KINDS.keys())
def test_room_moves_between_kinds_and_back(groups, is_unified):
    """Long conversations fill RAM, short ones take it over, and long ones again."""
    sizes = {"max_context": 128, "max_batch_tokens": 64, "is_unified": is_unified}
    server = shared(groups, num_bytes=6000, **sizes)
    room, counts = server.core.cache.room, []
    for turn, (length, count) in enumerate(((100, 12), (20, 40), (100, 12))):
        for number in range(count):
            server.ask(words(100 * turn + number, length))
        counts.append([kind.num_in_ram() for kind in room.kinds])
        num_bytes = room.num_bytes
        assert num_bytes > 6000 - STATE.bytes_per_state
    long, short, again = counts
    assert long != short != again


def test_what_goes_is_worth_least_for_its_bytes():
    """A large state of few tokens goes before many blocks, and one of many tokens stays."""
    server = shared((STATE, TOKENS), num_bytes=3000)
    server.ask(words(1, 300))
    for number in range(6):
        server.ask(words(2 + number, 10))
    assert server.ask((*words(1, 300), *ANSWER, 5)).num_cached_tokens > 250


def test_pinned_state_goes_last_over_all_kinds():
    """While it is pinned, its blocks and its state outlive whatever comes."""
    server = shared((STATE, TOKENS, WINDOW), num_bytes=4000)
    server.ask(words(1, 60), retain=Retain.PIN, retain_s=1e6)
    for number in range(30):
        server.ask(words(2 + number, 80))
    assert server.ask((*words(1, 60), *ANSWER, 5)).num_computed_tokens <= 2


def test_places_are_given_back_before_others_get_memory():
    """A free place of one kind loses its memory when another kind has grown over it."""
    server, given, most = shared((STATE, TOKENS)), [], []
    cache = server.core.cache
    plan = cache.ram.memory.plan
    cache.ram.memory.plan = lambda move: (given.append(move), plan(move))
    for number in range(30):
        server.ask(words(number, 20))
        most.append(cache.ram.memory.num_bytes)
    assert {move.group for move in given} <= {0, 1}
    for number in range(6):
        server.ask(words(100 + number, 300))
    assert any(isinstance(move, GiveBack) and move.group == 0 for move in given)
    assert max(most) <= RAM


def test_without_a_budget_every_place_has_memory():
    """Shares are as they were: nothing is given back, and no clock is shared."""
    server = fixed((STATE, TOKENS))
    assert server.core.cache.ram is None
    assert not any(arena.bare_ids for arena in server.core.cache.arenas[Tier.HOST])
    assert server.core.cache.room is not server.core.cache.states.room


def test_the_checker_notices_too_many_bytes():
    """Were the limit exceeded, it would show."""
    server = shared((STATE, TOKENS))
    for number in range(12):
        server.ask(words(number, 100))
    object.__setattr__(server.core.cache.ram.budget, "num_bytes", 100)
    with pytest.raises(InvariantError, match="one limit"):
        invariants.check(server.core)
