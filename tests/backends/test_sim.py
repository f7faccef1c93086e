"""The sim backend finds what a wrong core would do to a real one."""

import pytest
from attrs import evolve

from harness.virtual import SimSettings
from kvtrio.backends.sim import HashTokens, Moment, SimBackend, SimMismatch, StepCost
from kvtrio.core.batch import Batch, Chunk, Copy, SampleRow
from kvtrio.core.config import Group
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import BlockId, RequestId, StateClass

GREEDY = SampleRow(SamplingParams(temperature=0.0), 0.0, ())
SETTINGS = SimSettings(block_size=4, num_places=2, max_context=64)


def tables(*blocks: int) -> tuple[tuple[BlockId, ...], ...]:
    """The same blocks in both groups."""
    table = tuple(map(BlockId, blocks))
    return (table, table)


def chunk(
    number: int, start: int, tokens: tuple[int, ...], blocks: tuple[int, ...], is_last: bool = True
) -> Chunk:
    row = GREEDY if is_last else None
    return Chunk(RequestId(number), start, tokens, tables(*blocks), row)


def step(backend: SimBackend, *chunks: Chunk, copies: tuple[Copy, ...] = ()) -> list[int | None]:
    result = backend.step(Batch(0, chunks, copies))
    return [sampled.token_id if sampled else None for sampled in result.sampled]


def test_chunks_batches_and_blocks_do_not_change_the_token() -> None:
    """The same history gives the same token in pieces, in company and in other blocks."""
    backend = SETTINGS.backend()
    (whole,) = step(backend, chunk(1, 0, (1, 2, 3, 4, 5), (0, 1)))
    assert step(backend, chunk(2, 0, (1, 2, 3), (5,), is_last=False)) == [None]
    pieces = step(backend, chunk(2, 3, (4, 5), (5, 2)), chunk(3, 0, (9,), (7,)))
    assert pieces[0] == whole
    assert pieces[1] != whole


def test_another_order_or_length_gives_another_token() -> None:
    """The digest is over the history, not over the set of its tokens."""
    backend = SETTINGS.backend()
    histories = [(1, 2), (2, 1), (1, 2, 2), (2,), (1,)]
    found = [step(backend, chunk(n, 0, h, (n,)))[0] for n, h in enumerate(histories)]
    assert len(set(found)) == len(histories)


def test_a_foreign_block_is_found() -> None:
    """A table that names another request's block is an error where it is read."""
    backend = SETTINGS.backend()
    step(backend, chunk(1, 0, (1, 2, 3, 4, 5), (0, 1)), chunk(2, 0, (6, 7, 8, 9), (2,)))
    with pytest.raises(SimMismatch, match="request 1"):
        step(backend, chunk(1, 5, (7,), (2, 1)))


def test_a_history_of_somebody_else_is_found_even_if_consistent() -> None:
    """Two whole tables mixed up: each request remembers what it wrote last."""
    backend = SETTINGS.backend()
    step(backend, chunk(1, 0, (1, 2), (0,)), chunk(2, 0, (6, 7), (2,)))
    with pytest.raises(SimMismatch, match="another history"):
        step(backend, chunk(1, 2, (3,), (2,)))


def test_a_write_into_anothers_block_is_found_in_its_step() -> None:
    """A block given away too early: its reader sees the new owner's write."""
    backend = SETTINGS.backend()
    step(backend, chunk(1, 0, (1, 2, 3, 4), (0,)))
    with pytest.raises(SimMismatch, match="request 1"):
        step(backend, chunk(1, 4, (5,), (0, 1)), chunk(2, 0, (9, 9), (0,)))


def test_two_chunks_in_one_place_are_found() -> None:
    """The later write wins, and the earlier chunk's check fails."""
    backend = SETTINGS.backend()
    with pytest.raises(SimMismatch, match="same step"):
        step(backend, chunk(1, 0, (1,), (0,)), chunk(2, 0, (2,), (0,)))


@pytest.mark.parametrize("blocks", [(0,), (0, 99), (0, -1)])
def test_a_table_that_is_short_or_wild_is_found(blocks: tuple[int, ...]) -> None:
    """Too few blocks, or one that does not exist."""
    with pytest.raises(SimMismatch, match="does not cover"):
        step(SETTINGS.backend(), chunk(1, 0, (1, 2, 3, 4, 5), blocks))


def test_a_skipped_position_is_found() -> None:
    """A chunk that starts behind what was computed reads a hole."""
    backend = SETTINGS.backend()
    step(backend, chunk(1, 0, (1, 2), (0,)))
    with pytest.raises(SimMismatch):
        step(backend, chunk(1, 3, (4,), (0,)))


def test_groups_that_disagree_are_found() -> None:
    """The second group's table is another request's."""
    backend = SETTINGS.backend()
    step(backend, chunk(1, 0, (1, 2), (0,)), chunk(2, 0, (6, 7), (2,)))
    wrong = Chunk(RequestId(1), 2, (3,), ((BlockId(0),), (BlockId(2),)), GREEDY)
    with pytest.raises(SimMismatch, match="another history"):
        step(backend, wrong)


def test_a_window_group_is_read_no_further_than_it_sees() -> None:
    """Blocks behind the window may be anything; the last one inside may not."""
    window = SETTINGS.groups[1].window
    assert window == 16
    backend = SETTINGS.backend()
    prompt = tuple(range(20))
    step(backend, chunk(1, 0, prompt, (0, 1, 2, 3, 4)))
    step(backend, chunk(2, 0, (50, 51, 52, 53), (9,)))
    full, short = tables(0, 1, 2, 3, 4, 5)[0], tables(9, 1, 2, 3, 4, 5)[0]
    step(backend, Chunk(RequestId(1), 20, (7,), (full, short), GREEDY))
    with pytest.raises(SimMismatch, match="group 0"):
        step(backend, Chunk(RequestId(1), 21, (7,), (short, full), GREEDY))
    too_short = tables(0, 9, 2, 3, 4, 5)[0]
    with pytest.raises(SimMismatch, match="group 1"):
        step(backend, Chunk(RequestId(1), 21, (7,), (full, too_short), GREEDY))


def test_copies_run_first_and_copy_no_more_than_they_say() -> None:
    """A shared beginning by copy: right with the copy, an error without or cut short."""
    prompt = (1, 2, 3)
    backend = SETTINGS.backend()
    expected = step(backend, chunk(1, 0, (*prompt, 8), (0,)))
    other = chunk(2, 3, (8,), (5,))
    with pytest.raises(SimMismatch):
        step(backend, other)
    for num_tokens, is_enough in ((2, False), (3, True)):
        copies = tuple(Copy(group, BlockId(0), BlockId(5), num_tokens) for group in range(2))
        if is_enough:
            assert step(backend, other, copies=copies) == expected
        else:
            with pytest.raises(SimMismatch):
                step(SETTINGS.backend(), other, copies=copies)


def test_seeds_matter_only_to_those_who_draw() -> None:
    """Greedy requests agree whatever the seed; sampled ones differ by it."""
    choose = HashTokens(1000)

    def token(**params: float) -> int:
        row = SampleRow(SamplingParams(**params), 0.0, ())  # type: ignore[arg-type]
        return choose(Moment(RequestId(1), 0, 3, 12345, row))

    assert token(temperature=0.0, seed=1) == token(temperature=0.0, seed=2)
    assert token(temperature=1.0, seed=1) != token(temperature=1.0, seed=2)
    assert token(temperature=1.0, seed=1) == token(temperature=1.0, seed=1)


HYBRID = SimSettings(
    block_size=4,
    num_places=1,
    max_context=64,
    num_state_slots=2,
    groups=(Group(StateClass.POINT, None, 0, 16), Group(StateClass.TOKEN, None, 24)),
)


def with_slot(slot: int, start: int, tokens: tuple[int, ...], number: int = 1) -> Chunk:
    tables = ((BlockId(slot),), (BlockId(0), BlockId(1)))
    return Chunk(RequestId(number), start, tokens, tables, GREEDY)


def test_a_state_is_that_of_its_history() -> None:
    """A slot that was copied in time does, one of another position or history does not."""
    backend = HYBRID.backend()
    step(backend, with_slot(0, 0, (1, 2, 3)))
    kept = Copy(0, BlockId(0), BlockId(1), 0)
    (right,) = step(backend, with_slot(0, 3, (4,)), copies=(kept,))
    back = Copy(0, BlockId(1), BlockId(0), 0)
    assert step(backend, with_slot(0, 3, (4,), 2), copies=(back,)) == [right]
    with pytest.raises(SimMismatch, match="behind position 3"):
        step(backend, with_slot(0, 3, (4,), 3))
    with pytest.raises(SimMismatch, match="one slot"):
        step(backend, with_slot(7, 4, (5,), 2))


def test_two_chunks_cannot_share_a_slot() -> None:
    """What the first left is gone."""
    chunks = with_slot(0, 0, (1, 2)), with_slot(0, 0, (1, 2, 3), 2)
    with pytest.raises(SimMismatch, match="same step"):
        step(HYBRID.backend(), *chunks)


def test_banned_tokens_are_never_chosen() -> None:
    """By the function's own list, or by the request's bias."""
    params = SamplingParams(logit_bias=((1, float("-inf")), (2, -1.0)))
    row = SampleRow(params, 0.0, ())
    choose = HashTokens(4, avoid=frozenset({0}))
    found = {choose(Moment(RequestId(1), 0, 3, digest, row)) for digest in range(100)}
    assert found == {2, 3}


def test_log_probabilities_are_given_where_asked() -> None:
    """As many as asked, the chosen token's first, all different."""
    backend = SETTINGS.backend()
    row = evolve(GREEDY, params=SamplingParams(temperature=0.0, num_logprobs=3))
    asked = evolve(chunk(1, 0, (1,), (0,)), sample=row)
    sampled = backend.step(Batch(0, (asked, chunk(2, 0, (1,), (1,))), ())).sampled
    first, second = sampled
    assert first is not None
    assert second is not None
    assert (first.top[0], len(first.top)) == ((first.token_id, first.logprob), 3)
    assert len({token for token, _ in first.top}) == 3
    assert (second.token_id, second.logprob, second.top) == (first.token_id, None, ())


def test_the_cost_is_affine_in_tokens_and_chunks() -> None:
    """Base, tokens and rows are charged apart."""
    cost = StepCost(base_s=1.0, per_token_s=0.1, per_row_s=0.01)
    batch = Batch(0, (chunk(1, 0, (1, 2, 3), (0,)), chunk(2, 0, (1,), (1,))))
    assert cost(batch) == pytest.approx(1.0 + 0.4 + 0.02)
