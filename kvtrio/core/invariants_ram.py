"""The rules of ``room``, from first principles."""

from collections.abc import Iterable

from kvtrio.core.blocks import Block, Part, Slot
from kvtrio.core.machine import Core
from kvtrio.core.room import SharedRam
from kvtrio.core.rules import require
from kvtrio.core.types import Tier


def check_ram(core: Core, cached: Iterable[Block]) -> None:
    """``cached``: all published blocks."""
    ram, config = core.cache.ram, core.config
    if ram is None:
        return
    blocks, parts, slots = _kept(core, cached)
    num_parts = sum(part.tier is Tier.HOST for part in parts)
    if config.is_unified:
        num_parts = max(0, len(parts) - config.num_window_blocks)
    num_bytes = (
        ram.budget.block_bytes * sum(block.tier is Tier.HOST for block in blocks)
        + ram.budget.part_bytes * num_parts
        + ram.budget.state_bytes * sum(slot.tier is Tier.HOST for slot in slots)
    )
    require(ram.room.num_bytes == num_bytes, "the room counts what lies in it")
    require(num_bytes <= ram.budget.num_bytes, "one limit for all kinds in RAM")
    for order in ram.room.orders:
        require(order.level == ram.room.level, "one clock for all kinds in RAM")
    _check_memory(ram)


def _kept(core: Core, cached: Iterable[Block]) -> tuple[list[Block], list[Part], list[Slot]]:
    blocks = {id(block): block for block in cached}
    blocks |= {id(block): block for r in core.requests.values() for block in r.blocks}
    parts = [block.part for block in blocks.values() if block.part is not None]
    slots = [each.slot for block in blocks.values() for each in block.checkpoints]
    slots += [request.slot for request in core.requests.values() if request.slot is not None]
    return list(blocks.values()), parts, slots


def _check_memory(ram: SharedRam) -> None:
    """That every place is used once is checked with each kind."""
    total = 0
    for shelf in ram.memory.shelves:
        bare = [len(arena.bare_ids) for arena in shelf.arenas]
        require(len(set(bare)) == 1, "groups of a kind are lent memory together")
        total += max(0, shelf.arenas[0].num_blocks - bare[0] - shelf.num_own) * shelf.item_bytes
    require(total == ram.memory.num_bytes, "memory is counted")
    require(total <= ram.budget.num_bytes, "no more memory than the limit")
