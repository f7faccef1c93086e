"""What is reused, what is not, and what is said about it."""

import gc
from array import array

import pytest

from harness.core_fakes import answer
from harness.core_server import Server, words
from kvtrio.core import invariants
from kvtrio.core.events import Abort, Cached
from kvtrio.core.explain import CachePath, Found, MissReason, TurnClass
from kvtrio.core.identity import AdapterUse, KeyMaker, Segment
from kvtrio.core.types import RequestId, Retain, Tier

A = AdapterUse(adapter_id=1, digest=b"a" * 32, scale=0.5)
B = AdapterUse(adapter_id=2, digest=b"b" * 32, scale=1.0)


def under(*uses):
    return {"segments": (Segment(0, uses),)}


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_an_identical_prompt_computes_one_token(num_tokens):
    """Whatever its length against the block size, all but the last token is reused."""
    server = Server()
    first, second = (server.ask(words(1, num_tokens)) for _ in range(2))
    assert (first.num_cached_tokens, first.num_computed_tokens) == (0, num_tokens)
    assert (second.num_cached_tokens, second.num_computed_tokens) == (num_tokens - 1, 1)
    assert second.cache.reason is MissReason.NOTHING_MISSED


@pytest.mark.parametrize("cut", range(2, 13))
def test_reuse_is_exact_to_the_token(cut):
    """A prompt that leaves a known one after any token reuses exactly up to there."""
    server = Server()
    server.ask(words(1, 13))
    finished = server.ask((*words(1, cut), 7777, 7778))
    assert finished.num_cached_tokens == cut
    assert finished.cache.reason is MissReason.DIVERGED
    assert finished.cache.turn is TurnClass.REWRITE
    assert finished.cache.num_matched_tokens == cut


def test_generated_tokens_are_reused_like_prompt_tokens():
    """The next turn finds prompt and answer, but for the last token, whose state was not needed."""
    server = Server()
    server.ask(words(1, 9))
    finished = server.ask((*words(1, 9), 7, 7, 7, 500, 501))
    assert finished.num_cached_tokens == 9 + 2
    assert finished.cache.turn is TurnClass.CONTINUATION
    assert finished.cache.reason is MissReason.NEW_TOKENS


def test_equal_new_prompts_together_are_computed_once():
    """Three places get the same new prompt at once: its blocks are computed by one of them."""
    server = Server(num_places=3, max_batch_tokens=64)
    ended = server.ask_all([(words(1, 41), {})] * 3)
    assert [f.num_computed_tokens for f in ended] == [41, 1, 1]


def test_a_follower_overtakes_with_what_is_published_meanwhile():
    """A prompt whose first half was computed alone takes the rest from another's work."""
    server = Server(num_places=2, max_batch_tokens=8)
    server.send((*words(1, 30), 1))
    server.now += 1
    batch = server.core.schedule(server.now)
    server.core.update(batch, answer(batch), server.now)
    follower = server.send((*words(1, 30), 2))
    ended = server.run()
    assert ended[follower].num_computed_tokens <= 3


def test_other_adapters_never_share():
    """Another set, another scale, another namespace: nothing is reused, and the log says why."""
    server = Server(num_host_blocks=100)
    prompt = words(1, 20)
    server.ask(prompt, **under(A))
    for other in (under(), under(B), under(A, B), under(AdapterUse(1, A.digest, 0.25))):
        finished = server.ask(prompt, **other)
        assert finished.num_cached_tokens == 0
        assert finished.cache.reason is MissReason.ADAPTER_MISMATCH
        assert finished.cache.num_other_tokens == 19
    assert server.ask(prompt, namespace=b"t").cache.reason is MissReason.FIRST_TURN


def test_equal_sets_share_whatever_their_names_and_order():
    """Handles, order and zero scales are no part of identity."""
    server = Server()
    prompt = words(1, 20)
    server.ask(prompt, **under(A, B))
    again = AdapterUse(9, A.digest, A.scale)
    assert server.ask(prompt, **under(B, again)).num_cached_tokens == 19
    server.ask(prompt, **under())
    zero = AdapterUse(1, A.digest, 0.0)
    assert server.ask(prompt, **under(zero)).num_cached_tokens == 19


def test_state_before_an_activated_adapter_is_the_bases():
    """Until its invocation a prompt shares with the base, after it with its own kind only."""
    server = Server()
    prompt = words(1, 20)
    server.ask(prompt)
    activated = {"segments": (Segment(0), Segment(10, (A,)))}
    assert server.ask(prompt, **activated).num_cached_tokens == 10
    assert server.ask(prompt, **activated).num_cached_tokens == 19
    assert server.ask(prompt).num_cached_tokens == 19


def test_caching_can_be_switched_off_for_a_request():
    """It reuses nothing, and what it computed serves others."""
    server = Server()
    server.ask(words(1, 9))
    off = server.ask(words(1, 9), reuse=False)
    assert (off.num_cached_tokens, off.cache.reason) == (0, MissReason.CACHING_OFF)
    server.ask(words(2, 9), reuse=False)
    assert server.ask(words(2, 9)).num_cached_tokens == 8


def test_what_an_aborted_request_computed_is_kept():
    """A client that leaves does not take the work along."""
    server = Server(max_batch_tokens=8)
    request_id = server.send(words(1, 30))
    batch = server.core.schedule(0.0)
    server.core.update(batch, answer(batch), 0.0)
    server.core.handle(Abort(request_id), 0.0)
    assert server.ask(words(1, 30)).num_cached_tokens == 8


def test_auxiliary_requests_leave_nothing():
    """Their blocks are free at once; they may still use what others left."""
    server = Server()
    server.ask(words(1, 20))
    num_blocks = server.core.cache.index.num_blocks
    finished = server.ask((*words(1, 20), 5, 6), retain=Retain.AUXILIARY)
    assert finished.num_cached_tokens == 20
    assert server.core.cache.index.num_blocks == num_blocks


@pytest.mark.parametrize("is_unified", [True, False])
def test_a_pushed_out_conversation_comes_back_from_ram(is_unified):
    """One place: another prompt takes the device, the first one's state returns from RAM."""
    sizes = {"max_context": 24, "num_host_blocks": 8, "is_unified": is_unified}
    server = Server(**sizes)
    server.ask(words(1, 18))
    server.ask(words(2, 18))
    back = server.ask((*words(1, 18), 3))
    assert back.num_cached_tokens == 18
    assert back.cache.path is CachePath.RAM
    assert back.cache.num_host_tokens > 0
    assert server.core.cache.take_moves().num_promoted > 0


def test_without_ram_it_is_lost_and_the_log_says_so():
    """The reason is eviction, with the time since the state was last used."""
    server = Server(max_context=24, num_host_blocks=0)
    server.ask(words(1, 18))
    server.ask(words(2, 18))
    server.ask(words(3, 18))
    back = server.ask((*words(1, 18), 3))
    assert back.cache.reason is MissReason.EVICTED
    assert back.cache.evicted_age_s > 0
    assert back.num_cached_tokens == 0


def test_short_strangers_never_cost_a_conversation_its_state():
    """However many small requests come, a long conversation is still there, all of it."""
    sizes = {"max_context": 1024, "block_size": 16, "max_batch_tokens": 512, "num_host_blocks": 40}
    server = Server(check=lambda core: None, **sizes)
    server.ask(words(1, 900))
    for number in range(2000):
        server.ask(words(10 + number, 20), max_new_tokens=2)
    invariants.check(server.core)
    assert server.ask((*words(1, 900), 5)).num_cached_tokens == 900


def test_a_pin_outlives_other_conversations():
    """Pinned state stays while unpinned goes; when the time is over it is as any other."""
    server = Server(max_context=64, num_host_blocks=12)
    server.ask(words(1, 20), retain=Retain.PIN, retain_s=1000.0)
    for number in range(2, 30):
        server.ask(words(number, 40))
    assert server.ask((*words(1, 20), 5)).num_cached_tokens == 20
    server.now += 2000.0
    for number in range(30, 60):
        server.ask(words(number, 40))
    assert server.ask((*words(1, 20), 5)).num_cached_tokens < 20


def test_a_conversation_that_rested_returns_after_a_gap():
    """The class of the turn names the rest, so that its misses can be told apart."""
    server = Server()
    server.ask(words(1, 9))
    server.now += 1000.0
    assert server.ask((*words(1, 9), 7, 7, 7, 5)).cache.turn is TurnClass.AFTER_GAP


def test_branches_live_side_by_side():
    """Two conversations with one system prompt alternate; each turn computes what is new."""
    server = Server(max_context=128, num_host_blocks=64)
    system, tails = words(1, 40), {1: (), 2: ()}
    for turn in range(6):
        for user in tails:
            tails[user] = (*tails[user], *(5000 * user + 10 * turn + i for i in range(4)))
            finished = server.ask((*system, *tails[user]))
            if turn:
                assert finished.num_computed_tokens <= 4
            elif user == 2:
                assert finished.num_cached_tokens == 40


def test_found_tokens_are_told_as_they_are_found():
    """One event per match, with the tokens in RAM counted apart."""
    server = Server()
    server.ask(words(1, 9))
    server.send((*words(1, 9), 5))
    batch = server.core.schedule(0.0)
    (first, *_) = server.core.update(batch, answer(batch), 0.0)
    assert first == Cached(RequestId(2), Found(9, 0, 0), first.report)
    assert first.report.path is CachePath.RESIDENT


def test_equal_keys_change_nothing_but_speed():
    """With a hash that always collides, reuse is the same, token for token."""

    class Colliding(KeyMaker):
        def block_key(self, parent, start, token_ids, runs):
            return b"x"

    server = Server()
    server.core.keys = Colliding(b"", b"")
    for _ in range(2):
        for seed in range(4):
            finished = server.ask(words(seed, 13))
    assert finished.num_cached_tokens == 12
    assert server.ask(words(3, 13), **under(A)).num_cached_tokens == 0


def test_limits_hold_in_every_tier():
    """Blocks never outnumber what the sizes say."""
    server = Server(max_context=24, num_host_blocks=5)
    for seed in range(1, 20):
        server.ask(words(seed, 3 + seed))
        statistics = server.core.statistics()
        for tier in Tier:
            assert statistics.num_used_blocks[tier] <= statistics.max_blocks[tier]
    assert statistics.max_blocks[Tier.HOST] == statistics.num_used_blocks[Tier.HOST] == 5


def test_matching_does_not_depend_on_the_number_of_siblings():
    """Among thousands of prompts that part ways inside one block, few are looked at."""
    sizes = {"max_context": 64, "block_size": 16, "num_host_blocks": 5000, "max_batch_tokens": 64}
    server = Server(check=lambda core: None, **sizes)
    for number in range(3000):
        server.ask((*words(1, 20), 10_000 + number), max_new_tokens=1)
    (first,) = server.core.cache.index.root.children
    assert len(first.children) == 3000
    looked_at = []
    parts = [Counting(child.tags, looked_at) for child in first.children]
    for child, tags in zip(first.children, parts, strict=True):
        child.tags = tags
    finished = server.ask((*words(1, 20), 11_500, 5), max_new_tokens=1)
    assert finished.num_cached_tokens == 21
    assert len(looked_at) < 100


class Counting(array):
    """Tags that tell when they are compared."""

    def __new__(cls, items, seen):
        self = super().__new__(cls, "Q", items)
        self.seen = seen
        return self

    def __lt__(self, other):
        self.seen.append(1)
        return array.__lt__(self, other)


def test_the_same_bytes_under_new_handles_find_their_state_for_good():
    """However often handles change, and whatever is asked in between, the state is found."""
    server = Server(num_host_blocks=50)
    prompt = words(1, 20)
    reloaded = AdapterUse(9, A.digest, A.scale)
    server.ask(prompt, **under(A))
    server.ask(prompt, **under(reloaded))
    for _ in range(3):
        server.ask(prompt, **under(B))
    gc.collect()
    assert server.ask(prompt, **under(A)).num_cached_tokens == 19
    assert server.ask(prompt, **under(reloaded)).num_cached_tokens == 19


def test_pins_leave_room_for_others():
    """Pinned conversations take half of the blocks at most, counted in blocks."""
    server = Server(max_context=64, num_host_blocks=60)
    total = sum(server.core.cache.limits.values())
    for number in range(30):
        server.ask(words(100 + number, 40), retain=Retain.PIN, retain_s=1e6)
    pinned = [b for b in invariants._walk(server.core.cache.index.root) if b.pinned_until_s]
    assert len(pinned) == server.core.cache.pins.num_pinned <= total // 2
    for _ in range(3):
        hits = [server.ask(words(200 + number, 40)).num_cached_tokens for number in range(2)]
    assert hits == [39, 39]


def test_a_new_conversation_behind_a_known_system_prompt_is_a_first_turn():
    """Sharing a beginning is not rewriting; naming the conversation settles it."""
    server = Server(max_context=128)
    server.ask((*words(1, 20), *words(2, 40)))
    assert server.ask((*words(1, 20), *words(3, 40))).cache.turn is TurnClass.FIRST
    server.ask((*words(1, 20), *words(4, 40)), session=b"s")
    again = server.ask((*words(1, 20), *words(5, 40)), session=b"s")
    assert again.cache.turn is TurnClass.REWRITE
    assert again.cache.reason is MissReason.DIVERGED


def test_a_lost_conversation_is_not_a_first_turn():
    """What was evicted is told apart from what was never seen."""
    server = Server(max_context=24, num_host_blocks=0)
    for seed in (1, 2, 3):
        server.ask(words(seed, 18))
    back = server.ask((*words(1, 18), 3))
    assert (back.cache.reason, back.cache.turn) == (MissReason.EVICTED, TurnClass.CONTINUATION)


def test_who_never_started_has_no_miss():
    """A request that left the queue says so."""
    server = Server()
    request_id = server.send(words(1, 9))
    (finished,) = server.core.handle(Abort(request_id), 0.0)
    assert finished.cache.reason is MissReason.NOT_STARTED


def test_a_mismatch_is_found_among_many_sets():
    """Twenty adapter sets with other prompts do not hide the one with this prompt."""
    server = Server(num_host_blocks=200)
    prompt = words(1, 20)
    server.ask(prompt, **under(A))
    for number in range(20):
        use = AdapterUse(3, bytes([number]) * 32, 1.0)
        server.ask(words(2, 20), **under(use))
    assert server.ask(prompt, **under(B)).cache.num_other_tokens == 19


def test_a_first_block_under_two_sets_is_no_start():
    """An adapter that is activated inside the first block makes no entry for explanations, and
    losing such blocks harms none."""
    server = Server(max_context=24, num_host_blocks=2)
    for seed in range(1, 8):
        server.ask(words(1, 6 + seed), segments=(Segment(0), Segment(2, (A,))))
        server.ask(words(1, 6 + seed))
        server.ask(words(seed, 20))


def test_a_pin_on_a_prefix_of_what_is_there_counts_no_block_twice():
    """A pinned request whose tail a longer block covers pins what is in the index only."""
    server = Server()
    server.ask(words(1, 11))
    server.ask(words(1, 9), max_new_tokens=1, retain=Retain.PIN, retain_s=100.0)
    server.now += 1000.0
    server.core.cache.pins.expire(server.now)
    assert server.core.cache.pins.num_pinned == 0
