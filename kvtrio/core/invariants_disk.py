"""The rules of ``disk``, ``keeping`` and ``fetching``, from first principles."""

from collections import Counter
from collections.abc import Sequence

from kvtrio.core.blocks import Block
from kvtrio.core.disk import DiskTier
from kvtrio.core.fetching import Fetches
from kvtrio.core.keeping import Keeper
from kvtrio.core.rules import require
from kvtrio.core.state import State
from kvtrio.core.types import RequestState


def check_disk(state: State, cached: Sequence[Block]) -> None:
    """``cached``: all published blocks."""
    keeper = state.cache.keeper
    if keeper is None or state.fetches is None:
        require(not any(r.is_fetching for r in state.requests.values()), "nothing is on disk")
        return
    _check_tier(keeper.disk)
    _check_keeper(keeper, cached)
    _check_fetches(state, state.fetches)


def _check_tier(disk: DiskTier) -> None:
    entries = disk.entries
    require(disk.num_bytes == sum(each.size for each in entries.values()), "bytes are counted")
    require(disk.num_bytes <= disk.limit, "the disk's limit is kept")
    below = Counter(each.head.parent for each in entries.values())
    require(disk.num_below == below, "who has others behind it is known")
    listed = [each for mine in (*disk.blocks.values(), *disk.states.values()) for each in mine]
    require(Counter(map(id, listed)) == Counter(map(id, entries.values())), "all can be found")
    for siblings in disk.blocks.values():
        tokens = [each.head.token_ids for each in siblings]
        require(tokens == sorted(tokens), "siblings are sorted")
    for name, each in entries.items():
        require(each.name == name and each.used > 0, "an entry is filed under its name")


def _check_keeper(keeper: Keeper, cached: Sequence[Block]) -> None:
    queued = sum(each.size for each in keeper.disk.entries.values() if not each.is_there)
    require(keeper.num_queued_bytes == queued, "what is on its way is counted")
    require(not keeper.leaving, "what leaves is read out in front of the step that lets it go")
    blocks = {id(block) for block in cached}
    require(keeper.fresh_blocks.keys() <= blocks, "what is to be saved is in memory")
    states = {id(each) for block in cached for each in block.checkpoints}
    require(keeper.fresh_states.keys() <= states, "states to be saved are in memory")


def _check_fetches(state: State, fetches: Fetches) -> None:
    waiting = {i for i, request in state.requests.items() if request.is_fetching}
    require(fetches.jobs.keys() == waiting, "those that are fetched for are known")
    for job in fetches.jobs.values():
        require(job.request.state is RequestState.WAITING, "one that is fetched for waits")
        require(bool(job.numbers or job.todo), "it waits for something")
        require(all(number in fetches.pieces for number in job.numbers), "which will come")
    is_full = len(fetches.pieces) > 0 or not fetches.jobs
    require(is_full, "somebody's state is on its way")
