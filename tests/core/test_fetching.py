"""Requests that wait for state on disk, and what one reads for another."""

from collections import deque

from attrs import evolve

from harness.core_fakes import answer, make_core, submit
from harness.fake_disk import FakeDisk
from kvtrio.core.arrival import Arrival
from kvtrio.core.batch import NOWHERE
from kvtrio.core.config import Group
from kvtrio.core.events import Finished
from kvtrio.core.fetching import _Job, _Piece
from kvtrio.core.stored import StoredHead
from kvtrio.core.types import StateClass

WINDOWS = {
    "groups": (Group(StateClass.WINDOW, 64, 400), Group(StateClass.TOKEN, None, 8)),
    "block_size": 16,
    "max_context": 1000,
    "max_batch_tokens": 128,
    "num_places": 1,
    "num_host_blocks": 100,
    "num_host_window_blocks": 0,
}


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


def serve(core, disk, token_ids):
    """Answer one request and save all that is idle; how many tokens of the prompt it computed."""
    sizes, outputs = [group.part_bytes(16) for group in core.config.groups], []
    core.handle(submit(1, token_ids=tuple(token_ids)), 0.0)
    while disk.orders or not core.is_settled:
        if (batch := core.schedule(0.0)) is not None:
            places = [save.places for save in batch.saves]
            saved = tuple(
                tuple(b"" if at == NOWHERE else bytes(sizes[group]) for group, at in each)
                for each in places
            )
            outputs += core.update(batch, evolve(answer(batch), saved=saved), 0.0)
        disk.listen(core)
        while disk.orders:
            disk.do_one(core, 0.0)
    (finished,) = (each for each in outputs if isinstance(each, Finished))
    return finished.num_computed_tokens


def test_a_block_on_disk_gets_its_part_when_it_is_computed_again():
    """It was written without, and after a restart others compute it: the next start has it whole,
    and what lies behind it on disk is still found."""
    disk = FakeDisk(1 << 20)
    computed = []
    for num_tokens in (900, 100, 100, 900):
        core = make_core(disk_bytes=disk.limit, **WINDOWS)
        core.fill_disk(disk.heads())
        computed.append(serve(core, disk, range(num_tokens)))
    assert computed == [900, 100, 1, 1]


def test_a_block_that_is_not_read_out_again_stays_as_it_was():
    """What lies behind it on disk would be lost with it."""
    disk = FakeDisk(1 << 20)
    serve(make_core(disk_bytes=disk.limit, **WINDOWS), disk, range(900))
    core = make_core(disk_bytes=disk.limit, **WINDOWS)
    core.fill_disk(disk.heads())
    serve(core, disk, range(100))
    keeper = core.cache.keeper
    before, num_writes = set(keeper.disk.entries), disk.num_writes
    (block,) = core.cache.index.root.children
    (entry,) = keeper.disk.blocks[keeper.keys.root_key()]
    keeper.lose(entry)
    keeper.take_orders()
    keeper.disk.add(entry.head, 200, is_there=True)
    keeper.block_comes(block)
    keeper.block_goes(block)
    ((_, written),) = keeper.take_leaving()
    assert not written.is_there
    keeper.give_up(written)
    assert (set(keeper.disk.entries), disk.num_writes) == (before, num_writes)
    assert keeper.disk.entries[entry.name].is_there
    assert keeper.take_orders() == []
