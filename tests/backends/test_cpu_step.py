"""Batches as flat arrays, read back as the native side would."""

import ctypes
from itertools import pairwise

import pytest
from attrs import evolve

from kvtrio.backends import cpu_step
from kvtrio.backends.cpu_model import Limits
from kvtrio.backends.cpu_sampling import plan_rows
from kvtrio.backends.cpu_step import StepWriter
from kvtrio.core.batch import Batch, Chunk, Copy, SampleRow
from kvtrio.core.identity import AdapterUse
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import BlockId, RequestId, Tier
from kvtrio.kernels import cpu_abi as abi

LIMITS = Limits(max_rows=64, max_sampled=8, max_context=2048)
VOCAB = 1000


def chunk(request: int, start: int, tokens: tuple[int, ...], *tables: tuple[int, ...]) -> Chunk:
    blocks = tuple(tuple(map(BlockId, table)) for table in tables)
    row = SampleRow(SamplingParams(), 0.5, ())
    return Chunk(RequestId(request), start, tokens, blocks, row)


def written(writer: StepWriter, *chunks: Chunk, copies: tuple[Copy, ...] = ()) -> abi.Step:
    rows = [each.sample for each in chunks if each.sample is not None]
    return writer.write(Batch(0, chunks, copies), plan_rows(rows, VOCAB), {7: 0x70, 8: 0x80})


def ints(address: int, count: int, kind: type = ctypes.c_int32) -> list[int]:
    return list((kind * count).from_address(address))


def tables(step: abi.Step, num_groups: int) -> list[list[int]]:
    """Each table, group by group."""
    borders = ints(step.tables, num_groups * step.num_chunks + 1, ctypes.c_int64)
    blocks = ints(step.blocks, step.num_blocks)
    return [blocks[a:b] for a, b in pairwise(borders)]


def structures(address: int, kind: type, count: int, names: str) -> list[tuple[float, ...]]:
    items = (kind * count).from_address(address)
    return [tuple(getattr(item, name) for name in names.split()) for item in items]


def test_chunks_become_rows_and_tables():
    """Tokens lie one behind the other, tables by group and then by chunk."""
    writer = StepWriter((0, 0), LIMITS)
    longer = chunk(1, 14, (5, 6, 7), (3, 4), (9, 8))
    prompt = evolve(chunk(2, 0, (1, 2), (6,), (7,)), sample=None)
    step = written(writer, longer, prompt, chunk(3, 3, (4,), (5,), (2,)))
    assert (step.num_chunks, step.num_rows, step.num_sampled) == (3, 6, 2)
    assert ints(step.token_ids, 6) == [5, 6, 7, 1, 2, 4]
    found = structures(step.chunks, abi.Chunk, 3, "start num_rows is_sampled")
    assert found == [(14, 3, 1), (0, 2, 0), (3, 1, 1)]
    assert tables(step, 2) == [[3, 4], [6], [5], [9, 8], [7], [2]]


def test_tables_follow_their_requests():
    """A table may grow, stay, change in the middle or belong to somebody else the next time."""
    writer = StepWriter((0,), LIMITS)
    for table in ((3, 4), (3, 4, 5, 6), (3, 4, 5, 6), (3, 9, 5, 6), (3,), ()):
        step = written(writer, chunk(1, 0, (1,), table), chunk(2, 0, (1,), (8,)))
        assert tables(step, 1) == [list(table), [8]]


def test_long_tables_and_many_chunks_find_room(monkeypatch: pytest.MonkeyPatch):
    """The arrays grow, and tables of long gone requests are forgotten."""
    monkeypatch.setattr(cpu_step, "MAX_TABLES", 10)
    writer = StepWriter((0,), evolve(LIMITS, max_sampled=64))
    for first in (0, 40):
        lists = [tuple(range(i, i + 100)) for i in range(first, first + 40)]
        step = written(writer, *(chunk(i, 0, (i,), table) for i, table in enumerate(lists)))
        assert tables(step, 1) == [list(table) for table in lists]
        assert ints(step.token_ids, 40) == list(range(40))


@pytest.mark.parametrize(("offset", "place"), [(0, 3), (100, 103)])
def test_copies_name_places_of_the_arena(offset, place):
    """Blocks in RAM lie behind the device's where the two tiers count apart."""
    copy = Copy(1, BlockId(3), BlockId(5), 7, Tier.HOST, Tier.DEVICE)
    writer = StepWriter((offset, offset), LIMITS)
    step = written(writer, chunk(1, 0, (1,), (0,), (0,)), copies=(copy,))
    names = "group source target num_tokens"
    assert structures(step.copies, abi.Copy, step.num_copies, names) == [(1, place, 5, 7)]


def test_adapters_become_segments_of_chunks():
    """Each use once, in the order of digests, with runs of chunks; scale 0 is left out."""
    a, b = AdapterUse(7, b"b", 0.5), AdapterUse(8, b"a", 2.0)
    sets = [(a,), (a, b), (), (b,), (b, a), (evolve(a, scale=0.0),)]
    chunks = [evolve(chunk(i, 0, (1,), (0,)), adapters=uses) for i, uses in enumerate(sets)]
    writer = StepWriter((0,), LIMITS)
    step = written(writer, *chunks)
    names = "adapter scale first_segment num_segments"
    assert structures(step.uses, abi.Use, step.num_uses, names) == [
        (0x80, 2.0, 0, 2),
        (0x70, 0.5, 2, 2),
    ]
    names = "first_chunk num_chunks"
    assert structures(step.segments, abi.Segment, step.num_segments, names) == [
        (1, 1),
        (3, 2),
        (0, 2),
        (4, 1),
    ]
    assert written(writer, chunk(9, 0, (1,), (0,))).num_uses == 0
    with pytest.raises(KeyError):
        written(writer, evolve(chunks[0], adapters=(AdapterUse(9, b"c", 1.0),)))


def test_rows_ask_for_what_they_need():
    """The widest row sets the stride; where the best token is enough, nobody gets a list."""
    writer = StepWriter((0,), LIMITS)
    greedy = SampleRow(SamplingParams(temperature=0.0), 0.5, ())
    reporting = SampleRow(SamplingParams(temperature=0.0, num_logprobs=3), 0.5, ())
    chunks = [
        evolve(chunk(i, 0, (1,), (0,)), sample=row)
        for i, row in enumerate((greedy, reporting, SampleRow(SamplingParams(), 0.5, ())))
    ]
    step = written(writer, *chunks)
    assert step.top_stride == 40
    found = structures(step.samples, abi.Sample, 3, "num_top wants")
    assert found == [(1, 0), (3, abi.WANT_LOG_SUM), (40, 0)]
    step = written(writer, chunks[0])
    assert step.top_stride == 0
    assert structures(step.samples, abi.Sample, 1, "num_top wants") == [(0, 0)]


def test_more_than_a_step_may_have_is_refused():
    """Before anything is written beyond an array's end."""
    writer = StepWriter((0,), LIMITS)
    with pytest.raises(ValueError, match="more tokens"):
        written(writer, chunk(1, 0, tuple(range(65)), (0, 1, 2, 3, 4)))
    with pytest.raises(ValueError, match="more requests"):
        written(writer, *(chunk(i, 0, (1,), (0,)) for i in range(9)))
