"""What is found of a sequence, in memory and on disk, for a saved session."""

from kvtrio.core.disk import DiskTier
from kvtrio.core.identity import ContextTable, KeyMaker, TokenTrail
from kvtrio.core.index import Match
from kvtrio.core.lying import found
from kvtrio.core.stored import RunOfContext, StoredHead

KEYS = KeyMaker(b"secret of the tests", b"root")
CONTEXT = ContextTable().intern(b"", ())
NOTHING = Match((), None, 0, 0)


def trail_of(*token_ids):
    trail = TokenTrail(KEYS, 4, ((0, CONTEXT),))
    trail.extend_prompt(token_ids)
    return trail


def disk_with(trail, *sizes):
    """The trail's blocks, of so many tokens each."""
    disk, start, parent = DiskTier(1 << 20), 0, KEYS.root_key()
    runs = (RunOfContext(0, CONTEXT.identity.digest),)
    for index, num_tokens in enumerate(sizes):
        key = trail.key_of(index, num_tokens)
        tokens = tuple(trail.tags[start : start + num_tokens])
        disk.add(StoredHead(key, parent, start, tokens, runs), 1000, is_there=True)
        start, parent = start + num_tokens, key
    return disk


def test_looking_for_a_sequence_settles_no_key_of_a_block_that_it_does_not_fill():
    """The request whose sequence it is may run on: its blocks have the keys of all their tokens."""
    disk = disk_with(trail_of(1, 2, 3, 4, 5, 6, 7, 8), 4, 4)
    trail = trail_of(1, 2, 3, 4, 5, 6, 7)
    assert found(NOTHING, trail, disk).num_tokens == 4
    trail.append(8)
    assert trail.key(1) == trail_of(1, 2, 3, 4, 5, 6, 7, 8).key(1)


def test_a_block_that_ends_with_the_sequence_is_found():
    """Also a short one."""
    trail = trail_of(1, 2, 3, 4, 5, 6)
    assert found(NOTHING, trail, disk_with(trail, 4, 2)).num_tokens == 6
