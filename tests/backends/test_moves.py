"""State read out of a backend and written into another: every backend that computes."""

from random import Random
from typing import Any

import pytest
import torch

from harness.backends import CASES, KINDS, Kind
from harness.torch_models import PLAIN, Driver
from kvtrio.core.batch import Batch, Load, Save
from kvtrio.core.stored import StoredHead
from kvtrio.core.types import BlockId, StateClass, Tier

SIZE = 16
PROMPT = list(range(20))


def read_out(driver: Driver, request: int, num_tokens: int) -> list[Save]:
    """All blocks of a request with so many tokens, and its states."""
    groups = driver.backend.info.groups
    tables = driver.tables[request]
    saves = []
    for index in range(-(-num_tokens // SIZE)):
        tokens = tuple(range(min(SIZE, num_tokens - index * SIZE)))
        head = StoredHead(b"", b"", index * SIZE, tokens, ())
        places = tuple(
            (number, tables[number][index])
            for number, group in enumerate(groups)
            if group.state_class is not StateClass.POINT
        )
        saves.append(Save(head, places))
    states = tuple(
        (number, tables[number][0])
        for number, group in enumerate(groups)
        if group.state_class is StateClass.POINT
    )
    return [*saves, Save(StoredHead(b"", b"", 0, (1,), (), 1), states)]


def loads_of(driver: Driver, request: int, saved: tuple[tuple[bytes, ...], ...]) -> list[Load]:
    """The same into the places of another request."""
    saves = read_out(driver, request, len(PROMPT))
    return [Load(save.places, parts) for save, parts in zip(saves, saved, strict=True)]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_state_goes_on_in_another_backend(name: str, model: str) -> None:
    """A request computed by one backend goes on in another as if that had computed it, in other
    places; parts have the sizes that the groups say."""
    kind = KINDS[name]
    first = Driver(kind.make(kind.models[model]), Random(1))
    first.logprobs(first.chunk(1, 0, PROMPT))
    saved = first.backend.step(Batch(0, (), saves=tuple(read_out(first, 1, 20)))).saved
    expected = first.logprobs(first.chunk(1, 20, [3]))
    for save, parts in zip(read_out(first, 1, 20), saved, strict=True):
        sizes = [first.backend.info.groups[group].part_bytes(SIZE) for group, _ in save.places]
        assert list(map(len, parts)) == sizes
    second = Driver(kind.make(kind.models[model]), Random(2))
    chunk = second.chunk(7, 20, [3])
    loads = tuple(loads_of(second, 7, saved))
    out = torch.as_tensor(second.backend.logits(Batch(1, (chunk,), loads=loads)))
    torch.testing.assert_close(torch.log_softmax(out, -1), expected, **kind.alike)


@pytest.mark.parametrize("name", KINDS)
def test_a_part_does_not_show_what_lies_behind_its_tokens(name: str) -> None:
    """Bytes depend on the tokens that are asked for, not on whoever used the block before."""
    kind: Kind = KINDS[name]

    def parts(num_tokens: int) -> Any:
        driver = Driver(kind.make(PLAIN))
        driver.logprobs(driver.chunk(1, 0, PROMPT[:5]))
        if num_tokens > 5:
            driver.logprobs(driver.chunk(1, 5, PROMPT[5:num_tokens]))
        save = read_out(driver, 1, 5)[0]
        return driver.backend.step(Batch(0, (), saves=(save,))).saved

    assert parts(5) == parts(12)


@pytest.mark.parametrize("name", KINDS)
def test_reading_the_first_tokens_of_a_block_leaves_the_others(name: str) -> None:
    """A saved session may be a beginning of what somebody else goes on with."""
    driver = Driver(KINDS[name].make(PLAIN))
    driver.logprobs(driver.chunk(1, 0, PROMPT[:12]))
    longer = read_out(driver, 1, 12)[0]
    before = driver.backend.step(Batch(0, (), saves=(longer,))).saved
    driver.backend.step(Batch(1, (), saves=(read_out(driver, 1, 5)[0],)))
    assert driver.backend.step(Batch(2, (), saves=(longer,))).saved == before


@pytest.mark.parametrize("name", KINDS)
def test_ram_is_read_and_written_like_the_device(name: str) -> None:
    """With separate memories a place's number means another block in each."""
    backend = KINDS[name].make(PLAIN, is_unified=False, num_blocks=8, host_bytes=1 << 20)
    head = StoredHead(b"", b"", 0, tuple(range(SIZE)), ())
    size = backend.info.groups[0].part_bytes(SIZE)
    part, other = bytes(range(256)) * (size // 256), b"\1" * size
    at = ((0, BlockId(3)),)
    loads = (Load(at, (part,), Tier.HOST), Load(at, (other,), Tier.DEVICE))
    backend.step(Batch(0, (), loads=loads))
    saves = (Save(head, at, Tier.HOST), Save(head, at, Tier.DEVICE))
    assert backend.step(Batch(1, (), saves=saves)).saved == ((part,), (other,))
