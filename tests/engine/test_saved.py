"""Places saved and restored while the engine runs: what comes back is what was there."""

from typing import Any

import pytest

from harness.virtual import SimSettings, SimStack, answer_of, sim_stack
from kvtrio.core.config import Group
from kvtrio.core.events import Conversation, Finished
from kvtrio.core.identity import AdapterUse, Segment
from kvtrio.core.session import Parts, SessionHead
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.core.types import StateClass
from kvtrio.engine.handle import EngineStopped
from kvtrio.engine.saved import SavedPlace

TOKEN = Group(StateClass.TOKEN, None, 24)
POINT = Group(StateClass.POINT, None, 0, 16)
KINDS = {
    "attention": SimSettings(groups=(TOKEN, TOKEN)),
    "apart": SimSettings(groups=(TOKEN, TOKEN), is_unified=False),
    "hybrid": SimSettings(
        groups=(POINT, TOKEN), num_state_slots=8, num_host_state_slots=8, is_unified=False
    ),
    "recurrent": SimSettings(groups=(POINT, POINT), num_state_slots=8, num_host_state_slots=8),
}
PROMPT = tuple(range(100, 130))


async def ask(stack: SimStack, token_ids: tuple[int, ...], **changes: Any) -> Finished:
    """The end of a request that ran in place 0."""
    outputs = await answer_of(stack.engine.submit(stack.request(token_ids, place=0, **changes)))
    assert isinstance(outputs[-1], Finished)
    return outputs[-1]


async def read(saved: SavedPlace) -> tuple[list[Parts], list[tuple[int, Parts]]]:
    """All of it."""
    size = 4
    blocks = await saved.read_blocks(0, saved.head.num_blocks(size))
    states = await saved.read_states(0, len(saved.head.state_positions))
    return list(blocks), list(zip(saved.head.state_positions, states, strict=True))


def conversation(head: SessionHead, **changes: Any) -> Conversation:
    return Conversation(token_ids=head.token_ids, **changes)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restored_place_goes_on_where_it_was(kind: str, autojump_clock: Any) -> None:
    """On another server with other keys the next turn computes its new tokens and what lies behind
    the last state; the simulated memory checks every token's history."""
    async with sim_stack(KINDS[kind]) as stack:
        await ask(stack, PROMPT)
        saved = await stack.engine.save_place(0)
        blocks, states = await read(saved)
        told = stack.core.places.contents[0]
        assert told is not None
    assert len(saved.head.token_ids) == len(PROMPT) + 7
    assert saved.head.token_ids[: len(PROMPT)] == PROMPT
    async with sim_stack(KINDS[kind]) as stack:
        restoring = stack.engine.restore(0, conversation(saved.head))
        await restoring.put(blocks[:3])
        await restoring.put(blocks[3:], states)
        assert await restoring.commit() == len(saved.head.token_ids)
        again = await stack.engine.save_place(0)
        assert again.head == saved.head
        assert await read(again) == (blocks, states)
        finished = await ask(stack, (*saved.head.token_ids, 1, 2, 3))
        assert finished.num_computed_tokens == 3


async def test_a_place_is_saved_while_others_are_served(autojump_clock: Any) -> None:
    """Saving a place waits for its request only, and reads while another one streams."""
    async with sim_stack(KINDS["attention"]) as stack:
        long = stack.engine.submit(stack.request((1, 2, 3), 200, place=1))
        await anext(stack.engine.submit(stack.request(PROMPT, place=0)))
        saved = await stack.engine.save_place(0)
        assert len(saved.head.token_ids) == len(PROMPT) + 7
        blocks, _ = await read(saved)
        assert len(blocks) == saved.head.num_blocks(4)
        assert not stack.engine.is_idle
        long.close()


async def test_what_others_wrote_behind_is_not_saved(autojump_clock: Any) -> None:
    """The last block holds the place's own tokens and zeros, though a longer one took its place."""
    async with sim_stack(KINDS["attention"]) as stack:
        await ask(stack, PROMPT, max_new_tokens=1)
        before = await stack.engine.save_place(0)
        kept = (await read(before))[0][-1]
        await answer_of(stack.engine.submit(stack.request((*PROMPT, 7, 8, 9), place=1)))
        saved = await stack.engine.save_place(0)
        assert saved.head == before.head
        assert (await read(saved))[0][-1] == kept


async def test_erasing_forgets_what_nobody_shares(autojump_clock: Any) -> None:
    """After it the prompt is computed anew, but for what another conversation has in common."""
    async with sim_stack(KINDS["hybrid"]) as stack:
        await ask(stack, PROMPT)
        await answer_of(stack.engine.submit(stack.request((*PROMPT[:8], 1, 2), place=1)))
        assert await stack.engine.erase_place(0) == len(PROMPT) + 7
        assert await stack.engine.erase_place(0) == 0
        assert (await stack.engine.save_place(0)).head.token_ids == ()
        finished = await ask(stack, PROMPT)
        assert finished.num_cached_tokens <= 8


async def test_state_under_adapters_comes_back_under_them_only(autojump_clock: Any) -> None:
    """Contexts are saved by content and scale, and restored under today's handles."""
    use = AdapterUse(3, b"a" * 32, 0.5)
    segments = (Segment(0), Segment(10, (use,)))
    async with sim_stack(KINDS["attention"]) as stack:
        await ask(stack, PROMPT, segments=segments)
        saved = await stack.engine.save_place(0)
        blocks, _ = await read(saved)
    first, second = saved.head.contexts
    assert (first.start, second.start, first.adapters) == (0, 10, ())
    assert [(each.digest, each.scale) for each in second.adapters] == [(use.digest, 0.5)]
    async with sim_stack(KINDS["attention"]) as stack:
        later = (Segment(0), Segment(10, (AdapterUse(9, b"a" * 32, 0.5),)))
        restoring = stack.engine.restore(0, conversation(saved.head, segments=later))
        await restoring.put(blocks)
        await restoring.commit()
        assert (await ask(stack, saved.head.token_ids)).num_cached_tokens == 10 - 10 % 4 + 2
        same = await ask(stack, (*saved.head.token_ids, 1), segments=later)
        assert same.num_computed_tokens == 1


async def test_parts_of_other_sizes_are_refused(autojump_clock: Any) -> None:
    """Nothing of them is taken in."""
    async with sim_stack(KINDS["attention"]) as stack:
        restoring = stack.engine.restore(0, Conversation(token_ids=PROMPT))
        with pytest.raises(StoreError) as refused:
            await restoring.put([(b"\0" * 96, b"\0" * 95)])
        assert refused.value.fault is StoreFault.FORMAT
        assert stack.core.cache.index.num_blocks == 0


async def test_a_session_longer_than_memory_is_taken_in_as_far_as_it_fits(
    autojump_clock: Any,
) -> None:
    """Restoring ends all the same, and says how much is there."""
    async with sim_stack(KINDS["attention"]) as stack:
        tokens = tuple(range(4 * 300))
        restoring = stack.engine.restore(0, Conversation(token_ids=tokens))
        await restoring.put([(b"\0" * 96, b"\0" * 96)] * 300)
        num_there = await restoring.commit()
        assert 0 < num_there < len(tokens)


async def test_what_is_all_there_comes_back_at_once(autojump_clock: Any) -> None:
    """A session that memory has whole, of more blocks than one step takes in, is restored while
    nobody asks for anything: no step is needed for it."""
    async with sim_stack(KINDS["attention"]) as stack:
        tokens = tuple(range(4 * 200))
        blocks = [(b"\0" * 96, b"\0" * 96)] * 200
        for _ in range(2):
            restoring = stack.engine.restore(0, Conversation(token_ids=tokens))
            await restoring.put(blocks)
            assert await restoring.commit() == len(tokens)


async def test_who_waits_for_state_is_told_of_the_end(autojump_clock: Any) -> None:
    """After the engine's end there is nothing to wait for."""
    async with sim_stack(KINDS["attention"]) as stack:
        await ask(stack, PROMPT)
        saved = await stack.engine.save_place(0)
    with pytest.raises(EngineStopped):
        await saved.read_blocks(0, 1)
    with pytest.raises(EngineStopped):
        await stack.engine.save_place(0)
