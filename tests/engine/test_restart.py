"""Restarts with a real folder, real threads and models that compute: answers are those of cold."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from harness.backends import KINDS
from harness.core_fakes import NumberMatcher
from harness.virtual import Records, answer_of
from kvtrio.core.config import CoreConfig
from kvtrio.core.events import Conversation, Finished, Submit
from kvtrio.core.identity import KeyMaker
from kvtrio.core.machine import Core
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.stored import StoreFault
from kvtrio.engine import Engine, open_engine
from kvtrio.engine.executor import open_thread_executor
from kvtrio.engine.mover import Disk
from kvtrio.engine.offload import ThreadOffload
from kvtrio.engine.saved import StateGone
from kvtrio.schedulers.fcfs import FCFS
from kvtrio.store.disk import DiskStore
from kvtrio.store.scan import KEY_ROOM

CONTEXT, SIZE, PLACES = 128, 16, 2
MODELS = [
    ("torch", "windowed"),
    ("torch", "delta"),
    ("torch", "mamba"),
    ("cpu", "plain"),
    ("cpu", "latent"),
]
PROMPT = tuple(7 * i % 90 for i in range(70))


@asynccontextmanager
async def server(
    kind: str, model: str, folder: Path | None, limit: int = 1 << 24
) -> AsyncIterator[tuple[Engine, Records]]:
    """An engine on the folder; None: without a disk tier."""
    sizes = {
        "block_size": SIZE,
        "num_blocks": PLACES * (CONTEXT // SIZE + 1),
        "max_context": CONTEXT,
        "num_state_slots": 2 * PLACES,
        "num_host_state_slots": 4,
    }
    chosen = KINDS[kind]
    async with open_thread_executor(lambda: chosen.make(chosen.models[model], **sizes)) as executor:
        info, records = executor.info, Records()
        config = CoreConfig(
            groups=info.groups,
            block_size=SIZE,
            num_places=PLACES,
            max_context=CONTEXT,
            max_waiting=8,
            max_batch_tokens=64,
            num_host_blocks=info.num_host_blocks,
            num_state_slots=info.num_state_slots,
            num_host_state_slots=info.num_host_state_slots,
            disk_bytes=limit - KEY_ROOM if folder else 0,
        )
        store = DiskStore.open(folder, limit, b"s" * 32) if folder else None
        core = Core(config, FCFS(), KeyMaker(store.secret if store else b"s" * 32, model.encode()))
        disk = None
        if store is not None:
            core.fill_disk(store.heads())
            disk = Disk(store, ThreadOffload(2), lambda: 1.0)
        async with open_engine(core, executor, records, paranoid=True, disk=disk) as engine:
            yield engine, records
            await engine.settle()
        if store is not None:
            store.close()


async def ask(engine: Engine, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], Finished]:
    submit = Submit(
        request_id=engine.new_id(),
        token_ids=token_ids,
        max_new_tokens=6,
        sampling=SamplingParams(temperature=0.0),
        matcher=NumberMatcher(),
    )
    return await answer_of(engine.submit(submit))


async def cold(kind: str, model: str, token_ids: tuple[int, ...]) -> Any:
    async with server(kind, model, None) as (engine, _):
        return (await ask(engine, token_ids))[0]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model"), MODELS)
async def test_a_conversation_goes_on_after_a_restart(
    kind: str, model: str, tmp_path: Path
) -> None:
    """Three servers one after the other, each with the next turn: the answers are those of cold,
    and of what was said before only what lies behind the last state is computed."""
    tokens = PROMPT
    for turn in range(3):
        async with server(kind, model, tmp_path) as (engine, _):
            answer, finished = await ask(engine, tokens)
        assert answer == await cold(kind, model, tokens)
        if turn:
            assert finished.num_computed_tokens <= 4
            assert finished.cache.num_disk_tokens == finished.num_cached_tokens > 60
        tokens = (*tokens, *answer, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model"), [*MODELS, ("torch", "plain")])
async def test_what_only_the_disk_has_is_saved(kind: str, model: str, tmp_path: Path) -> None:
    """On the next server nothing of a conversation is in memory: all is read from its files, and
    what is damaged ends what is saved; restored elsewhere, the next turn's answer is that of
    cold."""
    async with server(kind, model, tmp_path) as (engine, _):
        said, _ = await ask(engine, PROMPT)
        tokens = (*PROMPT, *said)
        whole = engine.save(Conversation(token_ids=tokens))
    async with server(kind, model, tmp_path) as (engine, _):
        saved = engine.save(Conversation(token_ids=tokens))
        assert saved.head == whole.head
        assert [name.key for name in saved.block_names] == [name.key for name in whole.block_names]
        blocks = await saved.read_blocks(0, 5)
        states = await saved.read_states(0, len(saved.head.state_positions))
        assert not any(engine.statistics().num_used_blocks.values())
        damage_every_other(tmp_path)
        with pytest.raises(StateGone):
            await saved.read_blocks(0, 5)
        assert len(engine.save(Conversation(token_ids=tokens)).head.token_ids) < len(PROMPT)
    async with server(kind, model, None) as (engine, _):
        restoring = engine.restore(None, Conversation(token_ids=saved.head.token_ids))
        await restoring.put(blocks, list(zip(saved.head.state_positions, states, strict=True)))
        answer, finished = await ask(engine, (*tokens, 3, 4))
        assert finished.num_cached_tokens > 60
    assert answer == await cold(kind, model, (*tokens, 3, 4))


def damage_every_other(folder: Path) -> None:
    for file in sorted(folder.glob("*.block"))[::2]:
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)


def num_bytes(folder: Path) -> int:
    """Of files that are still there when they are looked at: others come and go meanwhile."""
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@pytest.mark.slow
async def test_damaged_files_are_dropped_one_by_one(tmp_path: Path) -> None:
    """Each costs its own tokens and those behind it, is told, and is gone afterwards."""
    async with server("torch", "plain", tmp_path) as (engine, _):
        answer, _ = await ask(engine, PROMPT)
    damage_every_other(tmp_path)
    async with server("torch", "plain", tmp_path) as (engine, records):
        again, finished = await ask(engine, PROMPT)
        assert again == answer
        assert finished.num_computed_tokens + finished.num_cached_tokens == len(PROMPT)
        assert set(records.faults) == {StoreFault.DAMAGED}
    async with server("torch", "plain", tmp_path) as (engine, records):
        again, finished = await ask(engine, PROMPT)
        assert again == answer
        assert finished.cache.num_disk_tokens > 60
        assert not records.faults


@pytest.mark.slow
async def test_the_limit_holds_whatever_is_asked(tmp_path: Path) -> None:
    """With more conversations than the folder may hold the last ones are there."""
    limit = 1 << 17
    async with server("torch", "plain", tmp_path, limit) as (engine, _):
        for i in range(12):
            await ask(engine, (i, *PROMPT))
            assert num_bytes(tmp_path) <= limit
    async with server("torch", "plain", tmp_path, limit) as (engine, _):
        _, finished = await ask(engine, (11, *PROMPT))
        assert finished.cache.num_disk_tokens > 60
