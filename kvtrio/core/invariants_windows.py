"""The rules of ``parts`` and ``windows``, from first principles."""

from collections import Counter
from collections.abc import Iterable

from kvtrio.core.batch import Chunk
from kvtrio.core.blocks import Block, Part
from kvtrio.core.machine import Core
from kvtrio.core.parts import Parts
from kvtrio.core.request import Request
from kvtrio.core.rules import require
from kvtrio.core.types import Tier


def check_parts(core: Core, cached: Iterable[Block]) -> None:
    """``cached``: all published blocks."""
    parts, requests = core.cache.parts, core.requests.values()
    blocks = {id(block): block for block in cached}
    blocks |= {id(block): block for request in requests for block in request.blocks}
    present = [block.part for block in blocks.values() if block.part is not None]
    if parts is None:
        require(not present, "parts are of windows")
        return
    counts = Counter(id(part) for request in requests for part in _held(request, core))
    for block in blocks.values():
        require(block.part is None or block.part.block is block, "a part knows its block")
        if block.is_candidate and not block.children and block.part is None:
            order = core.cache.candidates[block.tier]
            require(block.value <= order.level, "a leaf without its part is worth nothing")
    for part in present:
        require(part.num_refs == counts[id(part)], "references = requests that see the part")
        require(bool(part.num_refs) or part.block.key is not None, "what nobody sees is published")
        require(not part.num_refs or part.tier is Tier.DEVICE, "seen parts lie on the device")
        require(part.is_candidate == (not part.num_refs), "candidates are those that may go")
    _check_places(parts, present)


def check_seen(request: Request, chunk: Chunk, core: Core) -> None:
    """What a chunk in flight sees is held, and named by its tables."""
    if core.tables.windows is None:
        return
    first = core.tables.windows.first_seen(chunk.start)
    require(request.first_part <= first, "what a chunk sees is held")
    for number, group in enumerate(core.config.window_groups):
        table, blocks = chunk.block_tables[group], request.blocks
        require(len(table) == len(blocks), "a table names each block")
        for index in range(request.first_part, len(blocks)):
            part = blocks[index].part
            assert part is not None
            require(table[index] == part.ids[number], "parts in flight stay with their request")


def _held(request: Request, core: Core) -> list[Part]:
    windows = core.tables.windows
    assert windows is not None
    blocks = request.blocks[request.first_part :]
    if request.source is not None:
        blocks.append(request.source)
    for block in blocks:
        require(block.part is not None, "what is seen is there")
    if request.blocks and not request.in_flight:
        first = windows.first_seen(request.num_computed_tokens)
        is_late = first - request.first_part
        require(0 <= is_late <= 1, "what is not seen is let go of, a block late at most")
    return [block.part for block in blocks if block.part is not None]


def _check_places(parts: Parts, present: list[Part]) -> None:
    for tier in Tier:
        mine = [part for part in present if part.tier is tier]
        require(parts.num_used[tier] == len(mine), "a tier counts its parts")
        require(len(mine) <= parts.limits[tier], "no limit on parts is exceeded")
        for number, arena in enumerate(parts.arenas[tier]):
            ids = [part.ids[number] for part in mine] + arena.free_ids + arena.bare_ids
            require(sorted(ids) == list(range(arena.num_blocks)), "every place is used once")
