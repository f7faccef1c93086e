"""The rules of ``machine.py``, recomputed from first principles."""

from collections import Counter
from itertools import chain

from kvtrio.core.machine import Core
from kvtrio.core.request import Request
from kvtrio.core.types import BlockId, RequestState


class InvariantError(Exception):
    """The core's state contradicts its rules: a bug of ours."""


def check(core: Core) -> None:
    """Raise ``InvariantError`` at the first broken rule; linear in blocks and requests."""
    _check_blocks(core)
    _check_queues(core)
    _check_in_flight(core)
    for request in core.requests.values():
        _check_request(core, request)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantError(rule)


def _check_blocks(core: Core) -> None:
    for group, pool in enumerate(core.pools):
        tables = (request.block_tables[group] for request in core.requests.values())
        named = Counter(chain.from_iterable(tables))
        counts = [named[BlockId(i)] for i in range(pool.num_blocks)]
        _require(counts == pool.ref_counts, "reference count = tables naming the block")
        unnamed = [block_id for block_id, count in enumerate(counts) if not count]
        _require(sorted(pool.free_ids) == unnamed, "a block is free exactly if no table names it")


def _check_queues(core: Core) -> None:
    for request_id, request in core.requests.items():
        is_waiting = request.state is RequestState.WAITING
        _require(request.request_id == request_id, "requests are filed under their id")
        _require((request_id in core.waiting) == is_waiting, "the queue agrees with the state")
        _require(request.state is not RequestState.FINISHED, "finished requests are gone")
        if request.state is RequestState.RUNNING:
            assert request.place is not None
            _require(core.places.running[request.place] is request, "a running request has a place")
    _require(core.waiting.keys() <= core.requests.keys(), "waiting requests are known")
    num_running = len(core.requests) - len(core.waiting)
    num_taken = core.config.num_places - core.places.num_free
    _require(num_taken == num_running, "every taken place holds a running request")
    limit = core.config.num_places + core.config.max_waiting
    _require(len(core.requests) <= limit, "admission is bounded")


def _check_in_flight(core: Core) -> None:
    chunks = core.in_flight.chunks if core.in_flight else ()
    named = {chunk.request_id for chunk in chunks}
    marked = {request_id for request_id, r in core.requests.items() if r.in_flight}
    _require(named == marked, "in flight exactly if the launched batch names the request")
    total = sum(len(chunk.token_ids) for chunk in chunks)
    _require(total <= core.config.max_batch_tokens, "a batch keeps to the budget")
    for chunk in chunks:
        tables = tuple(map(tuple, core.requests[chunk.request_id].block_tables))
        _require(tables == chunk.block_tables, "blocks in flight stay with their request")


def _check_request(core: Core, request: Request) -> None:
    _require(request.num_computed_tokens <= request.num_tokens, "computed <= tokens")
    _require(request.num_tokens <= core.config.max_context, "a request fits the context")
    held = request.num_computed_tokens
    if request.in_flight:
        assert core.in_flight is not None
        held = next(c.end for c in core.in_flight.chunks if c.request_id == request.request_id)
    else:
        _require(not request.is_aborted, "an aborted request lives only while in flight")
    num_blocks = -(-held // core.config.block_size)
    for table in request.block_tables:
        _require(len(table) == num_blocks, "block tables cover what is computed or in flight")
        _require(len(set(table)) == len(table), "a table names a block once")
