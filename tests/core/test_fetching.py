"""Requests that wait for state on disk, and what one reads for another."""

from collections import deque

from harness.core_fakes import make_core, submit
from kvtrio.core.arrival import Arrival
from kvtrio.core.fetching import _Job, _Piece
from kvtrio.core.stored import StoredHead


def entries_of(core, trail, num_blocks):
    """Blocks that follow one another on disk."""
    disk, size = core.cache.keeper.disk, trail.block_size
    parent, entries = trail.keys.root_key(), []
    for index in range(num_blocks):
        tokens = tuple(trail.tags[index * size : (index + 1) * size])
        head = StoredHead(trail.key(index), parent, index * size, tokens, ())
        entries.append(disk.add(head, 1000, is_there=True))
        parent = trail.key(index)
    return entries


def test_a_request_waits_once_for_what_another_reads_in_two_places():
    """What lies between comes with a third one's; it starts when all of it has entered."""
    core = make_core(disk_bytes=100_000)
    core.handle(submit(1, 13), 0.0)
    (request,) = core.requests.values()
    one, two, three = entries_of(core, request.trail, 3)
    fetches, trail = core.fetches, request.trail
    fetches.pieces[1] = _Piece((one, three), trail, is_read=True)
    fetches.pieces[2] = _Piece((two,), trail, is_read=True)
    fetches.jobs[request.request_id] = _Job(request, deque((one, two, three)))
    request.is_fetching = True
    for number in (2, 1):
        arrival = Arrival(number, trail, deque(), is_fetched=True, num_tokens=12)
        core.exchange.entered.append(arrival)
        fetches._advance()
        fetches._advance()
        fetches.go_on()
    fetches._advance()
    assert not request.is_fetching
    assert fetches.jobs == {}
