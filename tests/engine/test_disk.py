"""The disk tier under the engine: what one server leaves, the next one finds."""

from typing import Any

import pytest
import trio
from attrs import evolve

from harness.fake_disk import MemoryFiles
from harness.virtual import SimSettings, SimStack, answer_of, sim_stack
from kvtrio.core import fetching
from kvtrio.core.config import Group
from kvtrio.core.events import Finished
from kvtrio.core.explain import CachePath
from kvtrio.core.keeping import LEAST_BYTES
from kvtrio.core.stored import StoreFault
from kvtrio.core.types import FinishReason, StateClass

TOKEN = Group(StateClass.TOKEN, None, 24)
POINT = Group(StateClass.POINT, None, 0, 16)
LIMIT: dict[str, Any] = {"disk_bytes": 1 << 24}
SLOTS: dict[str, Any] = {"num_state_slots": 8, "num_host_state_slots": 8}
KINDS = {
    "attention": SimSettings(groups=(TOKEN, TOKEN), **LIMIT),
    "apart": SimSettings(groups=(TOKEN, TOKEN), is_unified=False, **LIMIT),
    "hybrid": SimSettings(groups=(POINT, TOKEN), **SLOTS, **LIMIT),
    "recurrent": SimSettings(groups=(POINT, POINT), **SLOTS, **LIMIT),
}
PROMPT = tuple(range(100, 150))


async def ask(
    stack: SimStack, token_ids: tuple[int, ...], **changes: Any
) -> tuple[tuple[int, ...], Finished]:
    return await answer_of(stack.engine.submit(stack.request(token_ids, **changes)))


@pytest.mark.parametrize("kind", KINDS)
async def test_the_next_server_goes_on_where_this_one_was(kind: str, autojump_clock: Any) -> None:
    """Nobody saves anything: a later turn computes its new tokens only, and says where the rest
    was."""
    files = MemoryFiles()
    async with sim_stack(KINDS[kind], files=files) as stack:
        answer, _ = await ask(stack, PROMPT)
        await stack.engine.settle()
        assert len(files.files) == stack.engine.statistics().num_disk_entries
    known = (*PROMPT, *answer[:-1])
    async with sim_stack(KINDS[kind], files=files) as stack:
        _, finished = await ask(stack, (*known, 1, 2, 3))
        assert finished.num_computed_tokens == 3
        assert finished.cache.num_disk_tokens == len(known)
        assert finished.cache.path is CachePath.DISK
        _, again = await ask(stack, (*known, 1, 2, 3))
        assert again.cache.num_disk_tokens == 0


async def test_long_conversations_are_read_in_pieces(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece is read while another enters, and nothing is left out between them."""
    monkeypatch.setattr(fetching, "PIECE_BYTES", 3 * LEAST_BYTES)
    files, prompt = MemoryFiles(), tuple(range(200))
    async with sim_stack(KINDS["attention"], files=files) as stack:
        await ask(stack, prompt)
        await stack.engine.settle()
    async with sim_stack(KINDS["attention"], files=files) as stack:
        _, finished = await ask(stack, prompt)
        assert finished.cache.num_disk_tokens == len(prompt) - 1


async def test_what_leaves_memory_is_found_again(autojump_clock: Any) -> None:
    """With more conversations than memory holds, each goes on from the disk."""
    settings = SimSettings(
        groups=(TOKEN,), num_places=1, max_context=80, num_host_blocks=8, **LIMIT
    )
    async with sim_stack(settings, files=MemoryFiles()) as stack:
        prompts = [tuple(range(1000 * i, 1000 * i + 50)) for i in range(6)]
        for prompt in prompts:
            await ask(stack, prompt)
        for prompt in prompts:
            _, finished = await ask(stack, prompt)
            assert finished.num_computed_tokens <= 2


async def test_equal_prompts_are_read_once(autojump_clock: Any) -> None:
    """Requests that arrive together wait for the same reading."""
    files = MemoryFiles()
    async with sim_stack(KINDS["attention"], files=files) as stack:
        await ask(stack, PROMPT)
        await stack.engine.settle()
    async with sim_stack(KINDS["attention"], files=files) as stack, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask, stack, PROMPT)
    assert files.num_reads <= len(files.files)


@pytest.mark.parametrize("failing", ["write", "read"])
async def test_a_broken_disk_costs_only_time(failing: str, autojump_clock: Any) -> None:
    """Each answer is what it would be without a disk, and what could not be read is gone there."""
    files = MemoryFiles(lambda name: name == failing)
    async with sim_stack(KINDS["hybrid"], files=files) as stack:
        answer, _ = await ask(stack, PROMPT)
        await stack.engine.settle()
    async with sim_stack(KINDS["hybrid"], files=files) as stack:
        same, finished = await ask(stack, PROMPT)
        assert same == answer
        assert finished.cache.num_disk_tokens == 0
        faults = set(stack.records.faults)
        assert faults == ({StoreFault.IO} if failing == "read" else set())


async def test_who_leaves_while_state_is_read_holds_nobody_up(autojump_clock: Any) -> None:
    """An aborted request ends at once, and the next one finds what was read for it."""
    files = MemoryFiles()
    async with sim_stack(KINDS["attention"], files=files) as stack:
        await ask(stack, PROMPT)
        await stack.engine.settle()
    async with sim_stack(KINDS["attention"], files=files) as stack:
        handle = stack.engine.submit(stack.request(PROMPT))
        assert stack.core.requests[handle.request_id].is_fetching
        stack.engine.abort(handle.request_id)
        _, finished = await answer_of(handle)
        assert finished.reason is FinishReason.ABORT
        _, finished = await ask(stack, PROMPT)
        assert finished.cache.num_disk_tokens > 40


@pytest.mark.parametrize("is_written", [True, False], ids=["written", "being_written"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_erased_goes_from_the_disk_too(
    kind: str, is_written: bool, autojump_clock: Any
) -> None:
    """All of the conversation that no other one has, and what is just being written; the beginning
    that another shares stays."""
    files, other = MemoryFiles(), (*PROMPT[:32], 7, 8, 9)
    async with sim_stack(KINDS[kind], files=files) as stack:
        await ask(stack, other, place=1)
        await stack.engine.settle()
        shared = set(files.files)
        answer, _ = await ask(stack, PROMPT, place=0)
        if is_written:
            await stack.engine.settle()
            assert set(files.files) > shared
        await stack.engine.erase_place(0)
        await stack.engine.settle()
    assert set(files.files) >= shared
    assert all(files.files[name].head.end <= 32 for name in set(files.files) - shared)
    async with sim_stack(KINDS[kind], files=files) as stack:
        same, finished = await ask(stack, PROMPT)
        assert same == answer
        assert finished.cache.num_disk_tokens <= 32


@pytest.mark.parametrize("is_state", [True, False], ids=["state", "block"])
async def test_a_lost_checkpoint_costs_what_lies_behind_the_one_before(
    is_state: bool, autojump_clock: Any
) -> None:
    """Where the last state, or a block before it, cannot be read, a request goes on from the
    latest state that can, in the same turn."""
    files = MemoryFiles()
    async with sim_stack(KINDS["hybrid"], files=files) as stack:
        answer, _ = await ask(stack, PROMPT)
        await stack.engine.settle()
    ends = sorted(head.end for head in files.heads() if head.state_offset)
    lost = [head for head in files.heads() if bool(head.state_offset) is is_state]
    last = max(lost, key=lambda head: head.end)
    broken = (last.key, last.state_offset)
    files.files[broken] = evolve(files.files[broken], parts=())
    async with sim_stack(KINDS["hybrid"], files=files) as stack:
        _, finished = await ask(stack, (*PROMPT, *answer, 1))
        assert finished.num_cached_tokens == ends[-2]
    assert broken not in files.files or files.files[broken].parts
