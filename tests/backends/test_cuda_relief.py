"""A step that runs out of memory is done in parts, and costs only what fits not even alone."""

from collections.abc import Sequence

import pytest
import torch
from attrs import define, field

from harness.cuda_models import quantised_file
from harness.devices import FakeDevice
from harness.torch_models import SHORT_CONV, Driver, layer, recurrent_layer, settings, spec
from kvtrio.backends.cuda_backend import CudaBackend
from kvtrio.backends.cuda_ops import CudaOps
from kvtrio.backends.cuda_relief import REMEMBERED_STEPS, Fitter
from kvtrio.core.batch import Batch, Chunk, Sampled, SampleRow
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import BlockId, RequestId

ROW = SampleRow(SamplingParams(temperature=0.0), 0.0, ())


@define(eq=False)
class Adder:
    """A model whose state is the sum of a request's tokens so far, which is also its next token.

    Like a recurrent layer it changes the state before it runs out of memory: beyond ``most`` tokens
    in one attempt, or for a request in ``large``.
    """

    most: int
    large: frozenset[int] = frozenset()
    with_states: bool = True
    states: dict[int, int] = field(factory=dict)
    attempts: list[int] = field(factory=list)
    num_relieved: int = 0

    def compute(self, batch: Batch) -> tuple[Sampled | None, ...]:
        self.attempts.append(batch.num_tokens)
        sums = []
        for chunk in batch.chunks:
            before = self.states.get(chunk.request_id, 0) if chunk.start else 0
            self.states[chunk.request_id] = before + sum(chunk.token_ids)
            sums.append(self.states[chunk.request_id])
        ids = {chunk.request_id for chunk in batch.chunks}
        if batch.num_tokens > self.most or ids & self.large:
            raise torch.OutOfMemoryError
        return tuple(
            Sampled(each) if chunk.sample else None
            for chunk, each in zip(batch.chunks, sums, strict=True)
        )

    def relieve(self) -> None:
        self.num_relieved += 1

    @property
    def has_states(self) -> bool:
        return self.with_states

    def keep(self, chunks: Sequence[Chunk]):
        kept = {c.request_id: self.states[c.request_id] for c in chunks if c.start}
        return lambda: self.states.update(kept)


def chunk(request: int, start: int, count: int, is_sampled: bool = True) -> Chunk:
    tokens = tuple(range(request + start, request + start + count))
    sample = ROW if is_sampled else None
    return Chunk(RequestId(request), start, tokens, ((BlockId(0),),), sample)


STEPS = (
    Batch(0, (chunk(1, 0, 5), chunk(2, 0, 9), chunk(3, 0, 1))),
    Batch(1, (chunk(1, 5, 1), chunk(2, 9, 7, is_sampled=False), chunk(3, 1, 1))),
    Batch(2, (chunk(1, 6, 1), chunk(2, 16, 1), chunk(3, 2, 1), chunk(4, 0, 12))),
)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 14])
def test_answers_in_parts_are_those_of_the_whole(most):
    """However small the parts have to be; all requests are placed, and states are as they were."""
    ours, wanted = Adder(most), Adder(100)
    for batch in STEPS:
        done = Fitter(ours.compute, ours).run(batch)
        assert done.unplaced == ()
        assert done.sampled == Fitter(wanted.compute, wanted).run(batch).sampled
        assert ours.states == wanted.states
    assert ours.num_relieved > 0


def test_memory_is_given_back_before_the_same_step_is_tried_again():
    """An allocator that kept too much: the second attempt is whole."""
    model = Adder(100)
    failures = [True]

    def compute(batch: Batch) -> tuple[Sampled | None, ...]:
        result = model.compute(batch)
        if failures.pop() if failures else False:
            raise torch.OutOfMemoryError
        return result

    done = Fitter(compute, model).run(STEPS[0])
    assert (done.unplaced, model.num_relieved) == ((), 1)
    assert model.attempts == [15, 15]


def test_only_what_fits_not_even_alone_is_named():
    """The others' answers and states are those without it."""
    ours, wanted = Adder(100, frozenset({2})), Adder(100)
    fitter = Fitter(ours.compute, ours)
    done = fitter.run(STEPS[0])
    whole = wanted.compute(STEPS[0])
    assert done.unplaced == (2,)
    assert done.sampled == (whole[0], None, whole[2])
    assert {n: ours.states[n] for n in (1, 3)} == {n: wanted.states[n] for n in (1, 3)}
    ours.attempts.clear()
    assert fitter.run(Batch(1, (chunk(1, 5, 9), chunk(3, 1, 8)))).unplaced == ()
    assert ours.attempts == [17], "it was no matter of size"


def test_a_size_that_failed_is_not_tried_again_for_a_while():
    """Later steps of that size begin in parts; smaller ones are tried, and in time all are."""
    model = Adder(5)
    fitter = Fitter(model.compute, model)
    wanted = fitter.run(STEPS[0])
    model.attempts.clear()
    assert fitter.run(STEPS[0]) == wanted
    assert model.attempts
    assert max(model.attempts) <= 5
    fitter.run(Batch(1, (chunk(1, 5, 4),)))
    assert model.attempts[-1] == 4
    for _ in range(REMEMBERED_STEPS):
        fitter.run(Batch(1, (chunk(5, 0, 1),)))
    assert fitter.run(STEPS[0]) == wanted
    assert 15 in model.attempts


def test_rows_whose_state_may_be_spoilt_end():
    """Single rows keep nothing on the first attempt; those that had no state yet go on."""
    model = Adder(2, states={1: 10, 2: 20})
    batch = Batch(0, (chunk(1, 4, 1), chunk(2, 7, 1), chunk(3, 0, 1)))
    done = Fitter(model.compute, model).run(batch)
    assert done.unplaced == (1, 2)
    assert done.sampled == (None, None, Sampled(3))
    model = Adder(2, with_states=False)
    assert Fitter(model.compute, model).run(batch).unplaced == ()


def test_a_step_that_only_moves_is_done():
    """Without chunks there is nothing to place."""
    done = Fitter(lambda batch: (), Adder(1)).run(Batch(0, ()))
    assert (done.sampled, done.unplaced) == ((), ())


MIXED = spec(recurrent_layer(0, SHORT_CONV), layer(1), recurrent_layer(2, SHORT_CONV))


@pytest.mark.slow
def test_a_short_device_answers_as_a_large_one(monkeypatch):
    """The last layer fits two rows: a prompt beside a stream is read in parts, states of the layers
    before are put back; where it fits none the step ends its requests, and later ones go on."""
    most, linear = [100], CudaOps.linear

    def scarce(self, step, x, weight, bias):
        if weight.startswith("blk.2.") and len(x) > most[0]:
            raise torch.OutOfMemoryError
        return linear(self, step, x, weight, bias)

    monkeypatch.setattr(CudaOps, "linear", scarce)
    results = []
    for limit in (100, 2):
        device = FakeDevice(has_own_memory=False)
        backend = CudaBackend.load_on((device,), quantised_file(MIXED), MIXED, settings())
        driver = Driver(backend)
        most[0] = 100
        told = driver.tokens(driver.chunk(1, 0, [3, 4]), driver.chunk(2, 0, [5, 6]))
        most[0] = limit
        told += driver.tokens(driver.chunk(1, 2, [7]), driver.chunk(2, 2, [8, 9, 10]))
        told += driver.tokens(driver.chunk(1, 3, [11]), driver.chunk(2, 5, [12]))
        results.append(told)
        assert (device.num_relieved > 0) is (limit == 2)
    assert results[0] == results[1]
    most[0] = 0
    done = backend.step(Batch(0, (driver.chunk(1, 4, [13]), driver.chunk(3, 0, [14, 15]))))
    assert (done.sampled, done.unplaced) == ((None, None), (1, 3))
    most[0] = 100
    assert None not in driver.tokens(driver.chunk(2, 6, [16]))
