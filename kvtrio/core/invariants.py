"""The rules of ``machine``, ``blocks``, ``index`` and ``tiers``, from first principles."""

from collections import Counter
from collections.abc import Iterator

from kvtrio.core.blocks import Block, Slot
from kvtrio.core.checkpoints import Checkpoints
from kvtrio.core.cost import load_of
from kvtrio.core.invariants_disk import check_disk
from kvtrio.core.invariants_ram import check_ram
from kvtrio.core.invariants_windows import check_parts, check_seen
from kvtrio.core.machine import Core
from kvtrio.core.policy import Streams
from kvtrio.core.queue import Held
from kvtrio.core.request import Request
from kvtrio.core.rules import InvariantError as InvariantError
from kvtrio.core.rules import require
from kvtrio.core.tiers import TieredCache
from kvtrio.core.types import BlockId, RequestState, Tier
from kvtrio.core.views import request_view


def check(core: Core) -> None:
    """Raise ``InvariantError`` at the first broken rule; linear in blocks and requests."""
    _check_queues(core)
    _check_streams(core)
    _check_in_flight(core)
    for request in core.requests.values():
        _check_request(core, request)
    cached = list(_walk(core.cache.index.root))
    _check_index(core.cache, cached)
    _check_references(core, cached)
    _check_tiers(core, cached)
    pinned = sum(block.pinned_until_s > 0.0 for block in cached)
    require(pinned == core.cache.pins.num_pinned, "pinned blocks are counted")
    require(pinned <= core.cache.pins.limit, "pins leave room")
    for block in cached:
        _check_standing(core.cache, block)
    _check_states(core, cached)
    check_parts(core, cached)
    check_ram(core, cached)
    check_disk(core, cached)


# --- requests ---


def _check_queues(core: Core) -> None:
    waiting = {request.request_id: request for request in core.waiting}
    require(len(waiting) == len(core.waiting), "nobody waits twice")
    require(not waiting.keys() & core.running.keys(), "nobody waits and runs")
    require(waiting | core.running == core.requests, "a request waits or runs")
    for request_id, request in core.requests.items():
        is_waiting = request.state is RequestState.WAITING
        require(request.request_id == request_id, "requests are filed under their id")
        require((request_id in waiting) == is_waiting, "the queue agrees with the state")
        require(request.state is not RequestState.FINISHED, "finished requests are gone")
        if not is_waiting:
            assert request.place is not None
            require(core.places.running[request.place] is request, "a running request has a place")
    free = {place for place, request in enumerate(core.places.running) if request is None}
    require(core.places.free == free, "free places hold nobody")
    num_taken = core.config.num_places - core.places.num_free
    require(num_taken == len(core.running), "every taken place holds a running request")
    limit = core.config.num_places + core.config.max_waiting
    require(len(core.requests) <= limit, "admission is bounded")
    total = sum(request.num_tokens for request in core.waiting)
    require(core.waiting.num_tokens == total, "the queue counts its tokens")
    held = dict[tuple[bytes, int], Held]()
    for request in core.waiting:
        key = request.submit.tenant, request.submit.priority
        held.setdefault(key, Held()).add(1, request.num_tokens)
    require(core.waiting.held == held, "the queue counts for each tenant and class")
    tenants = {request.submit.tenant for request in core.requests.values()}
    require(core.service.counters.keys() == tenants, "service is counted for those here")


def _check_streams(core: Core) -> None:
    rows = core.streams.rows
    decoding = {request_id for request_id, r in core.running.items() if r.is_decoding}
    require(rows.keys() <= decoding, "streams decode")
    # One that came back with all that it had finds so while its step is planned.
    late = [core.requests[request_id] for request_id in decoding - rows.keys()]
    require(all(request.in_flight for request in late), "those that decode are streams")
    require(all(rows[i] is core.requests[i] for i in rows), "streams are filed under their id")
    views = [request_view(request) for request in rows.values()]
    summary = Streams(
        num_rows=len(views),
        decode_context=sum(view.num_computed_tokens for view in views),
        adapters=frozenset(view.adapters for view in views),
        lowest_priority=min((view.priority for view in views), default=None),
    )
    require(core.streams.summary() == summary, "the group's sums are those of its rows")


def _check_in_flight(core: Core) -> None:
    chunks = core.in_flight.chunks if core.in_flight else ()
    named = {chunk.request_id for chunk in chunks}
    marked = {request_id for request_id, r in core.requests.items() if r.in_flight}
    require(named == marked, "in flight exactly if the launched batch names the request")
    if core.in_flight:
        require(core.load == load_of(core.in_flight), "what the step does was counted")
    total = sum(len(chunk.token_ids) for chunk in chunks)
    require(total <= core.config.max_batch_tokens, "a batch keeps to the budget")
    for chunk in chunks:
        request = core.requests[chunk.request_id]
        for group, table in zip(core.config.token_groups, _columns(request.blocks), strict=False):
            require(chunk.block_tables[group] == table, "blocks in flight stay with their request")
        for group, place in request.slot.places if request.slot else ():
            require(chunk.block_tables[group] == (place,), "and so does its state")
        check_seen(request, chunk, core)
    moves = [*core.cache.copies, *core.cache.loads]
    require(not core.in_flight or not moves, "moves travel with the batch")


def _check_request(core: Core, request: Request) -> None:
    require(request.num_computed_tokens <= request.num_tokens, "computed <= tokens")
    require(request.num_tokens <= core.config.max_context, "a request fits the context")
    require(len(request.trail.tags) == request.num_tokens, "the trail follows the tokens")
    held = request.num_computed_tokens
    if request.in_flight:
        assert core.in_flight is not None
        held = next(c.end for c in core.in_flight.chunks if c.request_id == request.request_id)
    else:
        require(not request.is_aborted, "an aborted request lives only while in flight")
        require(request.source is None, "a copy's source is held only while in flight")
    num_blocks = -(-held // core.config.block_size)
    require(len(request.blocks) == num_blocks, "a table covers what is computed or in flight")
    used = request.num_computed_here + request.num_cached_tokens
    require(used == request.num_accounted_tokens, "prompt tokens = computed + reused")
    done = min(request.num_computed_tokens, request.num_prompt_tokens)
    require(done <= used <= request.num_prompt_tokens, "each prompt token is accounted for once")
    if not request.num_preemptions:
        require(used == done, "nothing is accounted for ahead of time")
    for group, table in zip(core.config.token_groups, _columns(request.blocks), strict=False):
        require(tuple(request.tables[group]) == table, "tables name the blocks")
    for index, block in enumerate(request.blocks):
        _check_entry(core, request, index, block)


def _check_entry(core: Core, request: Request, index: int, block: Block) -> None:
    is_published = index < request.num_published
    require((block.key is not None) == is_published, "published blocks come first")
    require(is_published or block.num_refs == 1, "an unpublished block has one holder")
    require(block.tier is Tier.DEVICE, "held blocks lie on the device")
    if is_published:
        start = index * core.config.block_size
        tags = request.trail.tags[start : start + core.config.block_size]
        require(block.tags == tags and block.start == start, "held blocks hold these tokens")


def _columns(blocks: list[Block]) -> list[tuple[BlockId, ...]]:
    """Per group with all tokens, their places."""
    return list(zip(*(block.ids for block in blocks), strict=True))


# --- blocks ---


def _walk(parent: Block) -> Iterator[Block]:
    stack = list(parent.children)
    while stack:
        block = stack.pop()
        yield block
        stack += block.children


def _check_index(cache: TieredCache, cached: list[Block]) -> None:
    filed = Counter(id(block) for bucket in cache.index.by_key.values() for block in bucket)
    require(filed == Counter(map(id, cached)), "the tree and the keys hold the same blocks")
    require(cache.index.num_blocks == len(cached), "the index counts its blocks")
    for block in [cache.index.root, *cached]:
        tags = [tuple(child.tags) for child in block.children]
        require(tags == sorted(set(tags)), "children are sorted and distinct")
        is_full = block is cache.index.root or len(block.tags) == cache.config.block_size
        require(is_full or not block.children, "only a full block has children")
        for child in block.children:
            require(child.parent is block, "children know their parent")
            require(child.start == block.end, "children start where their parent ends")
            require(bool(child.tags), "a published block holds tokens")


def _check_references(core: Core, cached: list[Block]) -> None:
    held = [block for request in core.requests.values() for block in request.blocks]
    held += [r.source for r in core.requests.values() if r.source is not None]
    counts = Counter(map(id, held))
    for block in {id(b): b for b in [*held, *cached]}.values():
        require(block.num_refs == counts[id(block)], "references = tables naming the block")


def _check_tiers(core: Core, cached: list[Block]) -> None:
    cache = core.cache
    blocks = {id(block): block for block in cached}
    blocks |= {id(block): block for r in core.requests.values() for block in r.blocks}
    for tier in Tier:
        used = [block for block in blocks.values() if block.tier is tier]
        require(cache.num_used[tier] == len(used), "a tier counts its blocks")
        require(len(used) <= cache.limits[tier], "no limit is exceeded")
    for tier in [Tier.DEVICE] if cache.config.is_unified else Tier:
        for group, arena in enumerate(cache.arenas[tier]):
            mine = [b for b in blocks.values() if cache.config.is_unified or b.tier is tier]
            ids = [block.ids[group] for block in mine] + arena.free_ids + arena.bare_ids
            require(sorted(ids) == list(range(arena.num_blocks)), "every place is used once")


def _check_standing(cache: TieredCache, block: Block) -> None:
    near = sum(child.tier is Tier.DEVICE for child in block.children)
    require(block.num_device_children == near, "a block counts its children on the device")
    assert block.parent is not None
    is_rooted = block.parent is cache.index.root or block.parent.tier is Tier.DEVICE
    require(block.tier is Tier.HOST or is_rooted, "a block's parent is as near as the block")
    require(not block.num_refs or block.tier is Tier.DEVICE, "held blocks lie on the device")
    has_child = near if block.tier is Tier.DEVICE else block.children
    may_go = not block.num_refs and not has_child
    require(block.is_candidate == may_go, "candidates are the blocks that may go")


# --- states of recurrent layers ---


def _check_states(core: Core, cached: list[Block]) -> None:
    states = core.cache.states
    for request in core.requests.values():
        is_running = request.state is RequestState.RUNNING
        has_slot = states is not None and is_running
        require((request.slot is not None) == has_slot, "those that run have a slot")
    for block in [core.cache.index.root, *cached]:
        offsets = [each.offset for each in block.checkpoints]
        require(offsets == sorted(set(offsets)), "checkpoints are sorted and distinct")
        require(all(0 < each <= len(block.tags) for each in offsets), "tokens before checkpoints")
        require(all(each.block is block for each in block.checkpoints), "they know their block")
        behind = sum(child.num_states for child in block.children)
        require(block.num_states == len(offsets) + behind, "a block counts its checkpoints")
    if states is None:
        require(not any(block.checkpoints for block in cached), "checkpoints are of states")
        return
    kept = [each for block in cached for each in block.checkpoints]
    slots = [each.slot for each in kept]
    slots += [request.slot for request in core.requests.values() if request.slot is not None]
    _check_slots(states, slots)
    for each in kept:
        entries = states.heaps[each.slot.tier]
        found = sum(entry[1] == each.entry and entry[2] is each for entry in entries)
        require(found == 1, "a checkpoint stands in its tier's order once")


def _check_slots(states: Checkpoints, slots: list[Slot]) -> None:
    for tier in Tier:
        num = sum(slot.tier is tier for slot in slots)
        require(states.num_used[tier] == num, "a tier counts its slots")
        require(num <= states.limits[tier], "no limit on slots is exceeded")
    for tier in [Tier.DEVICE] if states.config.is_unified else Tier:
        for number, arena in enumerate(states.arenas[tier]):
            mine = [s for s in slots if states.config.is_unified or s.tier is tier]
            ids = [slot.places[number][1] for slot in mine] + arena.free_ids + arena.bare_ids
            require(sorted(ids) == list(range(arena.num_blocks)), "every slot is used once")
