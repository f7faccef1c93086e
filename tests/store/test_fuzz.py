"""Thousands of files changed at random: a typed fault or what was there, never anything else."""

import io
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random

import pytest
from blake3 import blake3

from harness.memory_files import MemoryFiles
from harness.stored import SECRET, chain, head_of, restored, save, state
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.store.archive import export_session, import_session
from kvtrio.store.disk import DiskStore
from kvtrio.store.entries import sealed
from kvtrio.store.files import write_file
from kvtrio.store.manifest import read_manifest
from kvtrio.store.scan import entry_name
from kvtrio.store.sessions import PIECES, SessionStore

LIMIT = 1 << 20
HEAD = head_of(range(9), 2)
BLOCKS = chain(0, 3)
ENTRIES = [*BLOCKS, state(BLOCKS[0])]
BY_NAME = {entry_name(each.head.key, each.head.state_offset): each for each in ENTRIES}
WORDS = (
    b"0",
    b"9",
    b"-1",
    b"1e9",
    b"null",
    b"[]",
    b"{}",
    b'"',
    b"18446744073709551616",
    b"\xff",
    b"",
)


def mutated(data: bytes, rng: Random) -> bytes:
    """One to three changes: bits, pieces cut out, doubled or shuffled, and words of JSON."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed) + 1)
        # Headers are where decisions are made: half of the changes go there.
        at = min(at, rng.randrange(700)) if rng.random() < 0.5 else at
        size = rng.choice((1, 2, 8, 64, 4096))
        kind = rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + size]
        elif kind == 2:
            changed[at:at] = changed[at : at + size]
        elif kind == 3:
            changed[at : at + size] = rng.randbytes(size)
        elif kind == 4:
            del changed[at:]
        else:
            changed[at : at + rng.randrange(4)] = rng.choice(WORDS)
    return bytes(changed)


def mutations(data: bytes, count: int, seed: str) -> Iterator[bytes]:
    """``count`` different files that are not ``data``."""
    rng, seen = Random(seed), {data}
    while len(seen) <= count:
        changed = mutated(data, rng)
        if changed not in seen:
            seen.add(changed)
            yield changed


@contextmanager
def counted(outcomes: Counter[StoreFault]) -> Iterator[None]:
    """Counts the fault that its block raises; any other error is the test's failure."""
    try:
        yield
    except StoreError as error:
        outcomes[error.fault] += 1


def saved() -> MemoryFiles:
    files = MemoryFiles.new()
    save(SessionStore.open_files(files), "a", HEAD)
    return files


@pytest.mark.slow
def test_changed_entries_are_discarded_or_right():
    """2,000 changed files of the disk tier: gone at start or refused when read, never different."""
    files = MemoryFiles.new()
    store = DiskStore.open_files(files, LIMIT, SECRET)
    for each in ENTRIES:
        store.write(each)
    store.close()
    whole, outcomes = {name: files.entries[name].data for name in BY_NAME}, Counter()
    for name, data in whole.items():
        for changed in mutations(data, 500, name):
            files.put(name, changed)
            again = DiskStore.open_files(files, LIMIT, SECRET)
            outcomes += again.discarded
            for head in again.heads():
                with counted(outcomes):
                    stored = again.read(head.key, head.state_offset)
                    original = BY_NAME[entry_name(head.key, head.state_offset)]
                    assert (stored.parts, stored.head.token_ids) == (
                        original.parts,
                        original.head.token_ids,
                    )
            assert len(again.heads()) >= len(ENTRIES) - 1
            again.close()
        files.put(name, data)
    assert sum(outcomes.values()) == 2000


@pytest.mark.slow
def test_changed_sessions_are_refused():
    """2,000 changed manifests and pieces: each is one typed fault, and nothing else is changed by
    it."""
    files = saved()
    store, outcomes = SessionStore.open_files(files), Counter()
    folder = files.subfolder(PIECES)
    places = [(files, "a", 1000), *((folder, name, 200) for name in folder.names())]
    for place, name, count in places:
        data = place.entries[name].data
        for changed in mutations(data, count, name):
            place.put(name, changed)
            with counted(outcomes):
                restored(store, "a")
        place.put(name, data)
    assert sum(outcomes.values()) == 2000
    assert restored(store, "a") == HEAD


def test_changed_archives_are_refused():
    """400 changed archives: each is one typed fault, and nothing of it stays."""
    out, files, outcomes = io.BytesIO(), MemoryFiles.new(), Counter()
    export_session(SessionStore.open_files(saved()), "a", out)
    store = SessionStore.open_files(files)
    for changed in mutations(out.getvalue(), 400, "archive"):
        with counted(outcomes):
            import_session(store, "b", io.BytesIO(changed))
        assert files.names() == [PIECES]
        assert files.subfolder(PIECES).names() == []
    assert sum(outcomes.values()) == 400


def test_changed_fields_with_right_checksums_are_refused():
    """200 headers that somebody made, checksums included: impossible fields are damage."""
    fields = {
        "key": "11" * 32,
        "parent": "22" * 32,
        "start": "4",
        "tokens": "1 2 3 4",
        "runs": "0:" + "33" * 32,
        "state_offset": "0",
    }
    rng, outcomes = Random(5), Counter()
    for _ in range(200):
        files = MemoryFiles.new()
        DiskStore.open_files(files, LIMIT, SECRET).close()
        name = rng.choice(list(fields))
        text = mutated(fields[name].encode(), rng).decode("latin-1")
        if text == fields[name]:
            text += " "
        header = sealed(fields | {name: text}, ())
        write_file(files, "11" * 32 + ".block", [header.encoded()])
        store = DiskStore.open_files(files, LIMIT, SECRET)
        outcomes += store.discarded
        for head in store.heads():
            assert head.start >= 0
            assert all(0 <= token < 1 << 32 for token in head.token_ids)
            assert all(0 <= run.offset < len(head.token_ids) for run in head.runs)
    assert outcomes[StoreFault.DAMAGED] > 150
    assert set(outcomes) == {StoreFault.DAMAGED}


def with_checksum(body: bytes) -> bytes:
    return b"kvtrio session 001 %s %08d\n%s" % (blake3(body).hexdigest().encode(), len(body), body)


def test_changed_manifests_with_right_checksums_are_refused():
    """800 manifests that somebody made, checksums included, and what they say of sizes and places
    is possible, or they are refused; as archives they bring nothing either."""
    body = saved().entries["a"].data.partition(b"\n")[2]
    files = MemoryFiles.new()
    store = SessionStore.open_files(files)
    num_read = 0
    for changed in mutations(body, 800, "body"):
        data = with_checksum(changed)
        with suppress(StoreError):
            manifest = read_manifest(io.BytesIO(data).read)
            num_read += 1
            head = manifest.head
            positions = (*head.state_positions, *(context.start for context in head.contexts))
            assert all(0 <= position <= len(head.token_ids) for position in positions)
            assert len(manifest.blocks) == head.num_blocks(manifest.identity.block_size)
            assert len(manifest.states) == len(head.state_positions)
        with pytest.raises(StoreError):
            import_session(store, "b", io.BytesIO(data))
        assert files.names() == [PIECES]
    assert num_read > 20


@pytest.mark.parametrize("size", [1 << 30, (1 << 30) + 1, 1 << 62, -1, 0])
def test_claimed_sizes_allocate_nothing(size: int):
    """A manifest that claims a gigabyte takes the memory of what comes; an impossible claim is
    refused before that is looked at."""
    body = saved().entries["a"].data.partition(b"\n")[2]
    claim = with_checksum(re.sub(rb'"size":\d+', b'"size":%d' % size, body)) + bytes(16 << 20)
    store = SessionStore.open_files(MemoryFiles.new())
    source = io.BytesIO(claim)
    tracemalloc.start()
    with pytest.raises(StoreError):
        import_session(store, "b", source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert source.tell() < 1 << 16 or size == 1 << 30
