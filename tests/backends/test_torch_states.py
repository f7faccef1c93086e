"""States of recurrent layers: slots, checkpoints, and what a step reads and writes."""

from random import Random

import pytest
import torch
from attrs import evolve

from harness.torch_models import (
    HYBRIDS,
    MAMBA,
    Driver,
    load,
    random_backend,
    random_prompt,
)
from kvtrio.backends.base import BackendError
from kvtrio.backends.torch_states import LayerStates, StateRun, state_runs
from kvtrio.core.batch import Batch, Chunk, Copy
from kvtrio.core.types import BlockId, RequestId, StateClass, Tier

CLOSE = {"rtol": 0.0, "atol": 1e-4}
SAME = {"rtol": 0.0, "atol": 0.0}
CPU = torch.device("cpu")
FREE = BlockId(63)
"""A slot, or block, that no request here is given."""
TINY = ["qwen35", "qwen3next", "lfm2", "mamba2", "granitehybrid"]


def point_groups(driver: Driver) -> list[int]:
    groups = driver.backend.info.groups
    return [i for i, group in enumerate(groups) if group.state_class is StateClass.POINT]


def saved(driver: Driver, request: int, slot: BlockId = FREE) -> tuple[Copy, ...]:
    """Copies of the running state of a request into a slot per group."""
    tables = driver.tables[request]
    return tuple(Copy(i, tables[i][0], slot, 0) for i in point_groups(driver))


def restored(driver: Driver, request: int, slot: BlockId = FREE) -> tuple[Copy, ...]:
    return tuple(evolve(copy, source=copy.target, target=copy.source)
                 for copy in saved(driver, request, slot))  # fmt: skip


def logprobs(driver: Driver, chunk: Chunk, copies: tuple[Copy, ...] = ()) -> torch.Tensor:
    return torch.log_softmax(driver.backend.logits(Batch(0, (chunk,), copies)), -1)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_checkpoint_continues_as_if_nothing_had_been(name):
    """A copy made before a step that goes on, restored later, gives the very same bits."""
    prompt = random_prompt(Random(1), 70)
    driver = Driver(random_backend(HYBRIDS[name]))
    logprobs(driver, driver.chunk(0, 0, prompt[:40]))
    expected = logprobs(driver, driver.chunk(0, 40, prompt[40:]), saved(driver, 0))
    again = logprobs(driver, driver.chunk(0, 40, prompt[40:]), restored(driver, 0))
    torch.testing.assert_close(again, expected, **SAME)
    other = logprobs(driver, driver.chunk(0, 40, prompt[:30]), restored(driver, 0))
    assert (other - expected).abs().max() > 0.01


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_checkpoint_serves_another_request(name):
    """Its slot and the blocks of the same tokens are all that a new request needs."""
    prompt = random_prompt(Random(2), 50)
    driver = Driver(random_backend(HYBRIDS[name]))
    logprobs(driver, driver.chunk(0, 0, prompt[:32]))
    expected = logprobs(driver, driver.chunk(0, 32, prompt[32:]), saved(driver, 0))
    branch = driver.chunk(1, 32, prompt[32:])
    blocks = tuple(
        Copy(i, driver.tables[0][i][j], driver.tables[1][i][j], 16)
        for i in range(len(driver.free))
        if i not in point_groups(driver)
        for j in range(2)
    )
    out = logprobs(driver, branch, (*blocks, *restored(driver, 1)))
    torch.testing.assert_close(out, expected, **SAME)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_resume_from_a_checkpoint(shared, name):
    """The shared models give the same behind a restored state as without interruption."""
    driver = Driver(load(shared / "tiny" / "models" / f"{name}.gguf"))
    prompt = random_prompt(Random(3), 200, 8192)
    whole = logprobs(driver, driver.chunk(0, 0, prompt))
    logprobs(driver, driver.chunk(1, 0, prompt[:128]))
    expected = logprobs(driver, driver.chunk(1, 128, prompt[128:]), saved(driver, 1))
    torch.testing.assert_close(expected, whole, **CLOSE)
    again = logprobs(driver, driver.chunk(1, 128, prompt[128:]), restored(driver, 1))
    torch.testing.assert_close(again, expected, **SAME)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_do_not_depend_on_chunks(shared, name):
    """300 tokens in pieces of 1, 7 and 64 give what they give at once."""
    driver = Driver(load(shared / "tiny" / "models" / f"{name}.gguf"))
    prompt = random_prompt(Random(4), 300, 8192)
    whole = logprobs(driver, driver.chunk(0, 0, prompt))
    for size in (1, 7, 64):
        for start in range(0, 300, size):
            out = logprobs(driver, driver.chunk(size, start, prompt[start : start + size]))
        torch.testing.assert_close(out, whole, **CLOSE)


@pytest.mark.parametrize("name", HYBRIDS)
def test_requests_in_one_batch_keep_their_own_states(name):
    """Two prompts that take turns, and share steps, get what each gets alone."""
    rng = Random(5)
    prompts = [random_prompt(rng, 45), random_prompt(rng, 45)]
    backend = random_backend(HYBRIDS[name])
    alone = [logprobs(driver := Driver(backend), driver.chunk(0, 0, prompt)) for prompt in prompts]
    driver = Driver(backend, rng)
    logprobs(driver, driver.chunk(0, 0, prompts[0][:20]))
    logprobs(driver, driver.chunk(1, 0, prompts[1][:1]))
    pieces = [driver.chunk(1, 1, prompts[1][1:44]), driver.chunk(0, 20, prompts[0][20:44])]
    driver.logprobs(*pieces)
    out = driver.logprobs(*(driver.chunk(i, 44, prompts[i][44:]) for i in (0, 1)))
    torch.testing.assert_close(out, torch.cat(alone), **CLOSE)


def test_a_first_chunk_reads_no_state():
    """Whatever its slot held before is of no consequence."""
    driver = Driver(random_backend(MAMBA))
    prompt = random_prompt(Random(6), 20)
    expected = logprobs(driver, driver.chunk(0, 0, prompt))
    logprobs(driver, driver.chunk(0, 20, random_prompt(Random(7), 99)))
    torch.testing.assert_close(logprobs(driver, driver.chunk(0, 0, prompt)), expected, **SAME)


def test_a_fresh_chunk_reads_zeros_where_another_left_what_is_no_number():
    """Only fresh chunks do; a state is written where it was read."""
    states = LayerStates(0, torch.full((4, 2, 3), torch.nan), torch.ones(4, 1, 2, 2))
    run = StateRun(
        torch.tensor([[0], [1]]), torch.tensor([3, 1]), torch.tensor([True, False]), (1,)
    )
    history, matrices = states.read(run)
    assert history[0].eq(0).all()
    assert history[1].isnan().all()
    assert matrices.sum((1, 2, 3)).tolist() == [0, 4]
    states.write(run, torch.zeros(2, 2, 3), torch.full((2, 1, 2, 2), 7.0))
    assert states.history.isnan().any((1, 2)).tolist() == [True, False, True, False]
    assert states.matrices.sum((1, 2, 3)).tolist() == [4, 28, 4, 28]


def test_states_travel_between_memories():
    """Where RAM is a memory of its own, a state goes there and comes back unchanged."""
    backend = random_backend(MAMBA, is_unified=False, num_host_state_slots=2)
    driver, prompt = Driver(backend), random_prompt(Random(8), 40)
    logprobs(driver, driver.chunk(0, 0, prompt[:30]))
    slot = driver.tables[0][0][0]
    away = Copy(0, slot, BlockId(1), 0, Tier.DEVICE, Tier.HOST)
    back = Copy(0, BlockId(1), slot, 0, Tier.HOST, Tier.DEVICE)
    expected = logprobs(driver, driver.chunk(0, 30, prompt[30:]), (away,))
    again = logprobs(driver, driver.chunk(0, 30, prompt[30:]), (back,))
    torch.testing.assert_close(again, expected, **SAME)


def test_slots_in_ram_follow_those_of_the_device():
    """Where both are one memory, they are one row of slots."""
    backend = random_backend(MAMBA, num_state_slots=3, num_host_state_slots=2)
    info = backend.info
    assert (info.num_state_slots, info.num_host_state_slots) == (3, 2)
    assert info.pool_bytes == 5 * info.groups[0].bytes_per_state
    driver, prompt = Driver(backend), random_prompt(Random(9), 8)
    logprobs(driver, driver.chunk(0, 0, prompt[:4]))
    copies = saved(driver, 0, BlockId(4))
    expected = logprobs(driver, driver.chunk(0, 4, prompt[4:]), copies)
    copies = restored(driver, 0, BlockId(4))
    again = logprobs(driver, driver.chunk(0, 4, prompt[4:]), copies)
    torch.testing.assert_close(again, expected, **SAME)


def test_a_recurrent_model_needs_slots():
    """Without one it could not run a single request."""
    with pytest.raises(BackendError, match="no slot for their state"):
        random_backend(MAMBA, num_state_slots=0)


def test_chunks_become_runs():
    """Single rows run together; a longer chunk goes alone, cut where positions say."""
    chunks = [
        Chunk(RequestId(0), 9, (1,), ((BlockId(5),),)),
        Chunk(RequestId(1), 60, tuple(range(80)), ((BlockId(2),),)),
        Chunk(RequestId(2), 0, (1,), ((BlockId(7),),)),
    ]
    singles, longer = state_runs(chunks, 0, CPU)
    assert singles.rows.tolist() == [[0], [81]]
    assert singles.slots.tolist() == [5, 7]
    assert singles.is_fresh.tolist() == [False, True]
    assert longer.rows.tolist() == [list(range(1, 81))]
    assert longer.pieces == (4, 64, 12)


def test_a_chunk_without_a_slot_is_an_error():
    """Found before anything is computed."""
    with pytest.raises(IndexError):
        state_runs([Chunk(RequestId(0), 0, (1,), ((),))], 0, CPU)
