"""The disk tier's files: what is found again, what is thrown away, and how much there ever is."""

import os
import stat
from collections import Counter
from pathlib import Path

import pytest
from attrs import evolve

from harness.file_faults import BrittleFiles, Fault
from harness.memory_files import MemoryFiles
from harness.stored import SECRET, chain, entry, state
from kvtrio.core.stored import Stored, StoreError, StoreFault
from kvtrio.store.disk import DiskStore
from kvtrio.store.files import TEMPORARY
from kvtrio.store.scan import KEY_FILE, entry_name

GRAIN = 4096
LIMIT = 8 * GRAIN


def open_memory(files: MemoryFiles, limit: int = LIMIT) -> DiskStore:
    return DiskStore.open_files(files, limit, SECRET)


def filled(entries: list[Stored]) -> MemoryFiles:
    files = MemoryFiles.new()
    store = open_memory(files)
    for each in entries:
        store.write(each)
    store.close()
    return files


def name_of(stored: Stored) -> str:
    return entry_name(stored.head.key, stored.head.state_offset)


def fault_of(act, *args) -> StoreFault:
    with pytest.raises(StoreError) as caught:
        act(*args)
    return caught.value.fault


def test_entries_survive_a_restart(tmp_path: Path):
    """Blocks and states come back byte for byte under the same secret, found by key and offset."""
    block = entry(1, num_bytes=300_000)
    entries = [block, state(block), entry(2, block)]
    store = DiskStore.open(tmp_path / "cache", 1 << 20, SECRET)
    sizes = [store.write(each).size for each in entries]
    store.close()
    again = DiskStore.open(tmp_path / "cache", 1 << 20, b"another secret")
    assert again.secret == SECRET
    assert {head.key for head in again.heads()} == {each.head.key for each in entries}
    for each, size in zip(entries, sizes, strict=True):
        expected = Stored(evolve(each.head, size=size), each.parts)
        assert again.read(each.head.key, each.head.state_offset) == expected
    again.close()


def test_files_are_their_owners_only(tmp_path: Path):
    """Nobody else may read conversations or the key: 0600 below 0700."""
    store = DiskStore.open(tmp_path / "cache", LIMIT, SECRET)
    store.write(entry(1))
    store.close()
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (tmp_path / "cache").iterdir()]
    assert modes == [0o600, 0o600]
    assert stat.S_IMODE(os.stat(tmp_path / "cache").st_mode) == 0o700


def test_a_file_is_safetensors(tmp_path: Path):
    """Other tools can open an entry: the project's own reader of hostile files does."""
    from kvtrio.model.paths import open_path
    from kvtrio.model.safetensors_file import read_safetensors

    store = DiskStore.open(tmp_path, LIMIT, SECRET)
    store.write(entry(1))
    store.close()
    with open_path(tmp_path / name_of(entry(1))) as file:
        tensors = read_safetensors(file.read(1 << 20)).tensors
    assert [tensor.shape for tensor in tensors.values()] == [(100,), (0,), (7,)]


def test_one_server_at_a_time(tmp_path: Path):
    """A second store on the same folder is refused until the first is closed."""
    store = DiskStore.open(tmp_path, LIMIT, SECRET)
    assert fault_of(DiskStore.open, tmp_path, LIMIT, SECRET) is StoreFault.LOCKED
    store.close()
    DiskStore.open(tmp_path, LIMIT, SECRET).close()


def test_sizes_are_what_the_disk_gives_out(tmp_path: Path):
    """Sizes are multiples of 4 KiB and add up to what the folder takes, the key included."""
    store = DiskStore.open(tmp_path, 1 << 20, SECRET)
    heads = [store.write(entry(i, num_bytes=i * 3001)) for i in range(5)]
    assert all(head.size % GRAIN == 0 for head in heads)
    assert store.used_bytes == sum(head.size for head in heads) + GRAIN
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir() if path.name != KEY_FILE)
    assert on_disk == sum(head.size for head in heads)
    store.close()


def test_nothing_is_written_over_the_limit():
    """What does not fit is refused before a byte is written; after a removal it fits."""
    files = MemoryFiles.new()
    store = open_memory(files, 3 * GRAIN)
    first, second, third = chain(0, 3)
    store.write(first)
    store.write(second)
    assert fault_of(store.write, third) is StoreFault.LIMIT
    assert name_of(third) not in files.names()
    store.remove(first.head.key, 0)
    assert store.write(third).size == GRAIN
    assert store.used_bytes == 3 * GRAIN == files.disk.peak_bytes - 32 + GRAIN


def test_writing_twice_is_writing_once():
    """An entry that is there is not written again, and takes no more room."""
    store = open_memory(MemoryFiles.new())
    assert store.write(entry(1)) is store.write(entry(1))
    assert store.used_bytes == 2 * GRAIN


def test_what_is_removed_is_gone():
    """Removing is final, and removing what is not there does nothing."""
    store = open_memory(MemoryFiles.new())
    store.write(entry(1))
    for _ in range(2):
        store.remove(entry(1).head.key, 0)
        assert store.heads() == ()
        assert store.used_bytes == GRAIN
    assert fault_of(store.read, entry(1).head.key, 0) is StoreFault.NOT_FOUND


def test_existing_files_are_brought_under_the_limit():
    """A smaller limit at the next start keeps what was used last, and the way to it: never a block
    without its parent."""
    old, new = chain(0, 3), chain(10, 3)
    files = filled([*old, *new])
    store = open_memory(files)
    for i, each in enumerate((*old, *new)):
        store.touch(each.head.key, 0, float(i))
    store.touch(old[2].head.key, 0, 100.0)
    store.close()
    smaller = open_memory(files, 5 * GRAIN)
    assert [head.key for head in smaller.heads()] == [
        each.head.key for each in (new[0], old[2], old[1], old[0])
    ]
    assert smaller.discarded == {StoreFault.LIMIT: 2}
    assert files.total_bytes <= smaller.used_bytes <= 5 * GRAIN


def test_what_is_not_whole_is_removed_at_start():
    """Unfinished, short, changed, renamed and newer files go, each with its reason."""
    entries = [entry(i) for i in range(6)]
    files = filled(entries)
    names = [name_of(each) for each in entries]
    data = {name: files.entries[name].data for name in names}
    files.put(names[0] + TEMPORARY, data[names[0]][:50])
    files.put(names[1], data[names[1]][:-1])
    files.put(names[2], data[names[2]] + b"x")
    files.put(names[3], data[names[4]])
    files.put(names[4], data[names[4]].replace(b'"version":"1"', b'"version":"2"'))
    files.put(entry_name(b"\0" * 32, 0), b"")
    store = open_memory(files)
    assert {head.key for head in store.heads()} == {entries[0].head.key, entries[5].head.key}
    assert store.discarded == Counter(
        {
            StoreFault.TEMPORARY: 1,
            StoreFault.TRUNCATED: 2,
            StoreFault.DAMAGED: 2,
            StoreFault.NEWER: 1,
        }
    )
    assert set(files.names()) == {KEY_FILE, names[0], names[5]}


def test_a_changed_byte_is_found_when_it_is_read():
    """The start reads heads only; damage in the bytes behind shows as an error, never as other
    bytes."""
    files = filled([entry(1)])
    data = bytearray(files.entries[name_of(entry(1))].data)
    data[-3] ^= 1
    files.put(name_of(entry(1)), bytes(data))
    store = open_memory(files)
    assert fault_of(store.read, entry(1).head.key, 0) is StoreFault.DAMAGED
    store.remove(entry(1).head.key, 0)
    assert store.used_bytes == GRAIN


def test_another_entry_under_its_name_is_damage():
    """A file with the right key and other tokens, whole in itself, is not what was stored."""
    stored = entry(1)
    other = Stored(evolve(stored.head, token_ids=(1, 2, 3, 4)), stored.parts)
    store, files = open_memory(files := MemoryFiles.new()), files
    store.write(stored)
    forged = filled([other]).entries[name_of(other)].data
    files.put(name_of(stored), forged)
    assert fault_of(store.read, stored.head.key, 0) is StoreFault.DAMAGED


def test_a_folder_of_somebody_is_left_alone():
    """A folder with other files and no key is refused and untouched; with a key, only files that
    are named as ours are looked at."""
    files = MemoryFiles.new()
    files.put("thesis.txt", b"years of work")
    assert fault_of(open_memory, files) is StoreFault.FOREIGN
    assert files.names() == ["thesis.txt"]
    ours = filled([])
    ours.put("thesis.txt", b"years of work")
    open_memory(ours)
    assert set(ours.names()) == {KEY_FILE, "thesis.txt"}


def test_entries_without_their_key_are_removed():
    """Names are keyed hashes: with another secret nothing could be found again."""
    files = filled([entry(1)])
    files.remove(KEY_FILE)
    store = DiskStore.open_files(files, LIMIT, b"n" * 32)
    assert store.secret == b"n" * 32
    assert store.heads() == ()
    assert store.discarded == {StoreFault.FOREIGN: 1}


def test_a_damaged_key_is_not_replaced():
    """It may be somebody else's file; the operator decides."""
    files = filled([entry(1)])
    files.put(KEY_FILE, b"short")
    assert fault_of(open_memory, files) is StoreFault.DAMAGED
    assert name_of(entry(1)) in files.names()


@pytest.mark.parametrize("fault", [Fault.FAILS, Fault.FAILS_HALF_DONE, Fault.FAILS_DONE])
def test_a_failed_write_leaves_nothing(fault: Fault):
    """The server goes on with all the room it had, and the entry can be written later."""
    files = BrittleFiles(MemoryFiles.new())
    store = DiskStore.open_files(files, LIMIT, SECRET)
    num_failures = 0
    for after in range(8):
        files.trouble.strike(after, fault)
        try:
            store.write(entry(1))
        except StoreError:
            num_failures += 1
        names = [name_of(entry(1))] if store.heads() else []
        assert files.files.names() == [KEY_FILE, *names]
        assert store.used_bytes == GRAIN * (1 + len(names))
        files.trouble.at = None
        store.remove(entry(1).head.key, 0)
    assert num_failures >= 4


def test_room_of_what_cannot_be_removed_stays_taken():
    """While a half-written file cannot be removed its room is nobody's; afterwards it is."""
    files = BrittleFiles(MemoryFiles.new())
    store = DiskStore.open_files(files, 3 * GRAIN, SECRET)
    files.trouble.strike(1, Fault.FAILS_ON)
    assert fault_of(store.write, entry(1)) in (StoreFault.IO, StoreFault.NO_SPACE)
    assert store.used_bytes == 2 * GRAIN
    assert files.files.names() == [KEY_FILE, name_of(entry(1)) + TEMPORARY]
    files.trouble.strike(0, Fault.FAILS)
    assert fault_of(store.write, entry(1)) is StoreFault.IO
    store.write(entry(1))
    store.write(entry(2))
    assert store.used_bytes == 3 * GRAIN
    assert store.read(entry(1).head.key, 0).parts == entry(1).parts
