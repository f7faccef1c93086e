"""Every operation on files fails once, and once is the last before a crash or a power cut."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random

import pytest

from harness.file_faults import BrittleFiles, Stopped, Trouble, cases
from harness.memory_files import MemoryFiles
from harness.stored import SECRET, chain, head_of, restored, save, state
from kvtrio.core.session import SessionHead
from kvtrio.core.stored import Stored, StoreError, StoreFault
from kvtrio.store.archive import export_session, import_session
from kvtrio.store.disk import DiskStore
from kvtrio.store.scan import KEY_FILE, entry_name
from kvtrio.store.sessions import PIECES, SessionStore

LIMIT = 6 * 4096
BLOCKS = chain(0, 6)
ENTRIES = [*BLOCKS, state(BLOCKS[1])]
BY_NAME = {entry_name(each.head.key, each.head.state_offset): each for each in ENTRIES}
NAMES = ("a", "b", "c")
SHORT, LONG, OTHER = head_of(range(5)), head_of(range(9), 2), head_of(range(50, 54))


@contextmanager
def suppress_faults(*faults: StoreFault) -> Iterator[None]:
    """Any other error is the test's failure."""
    try:
        yield
    except StoreError as error:
        if error.fault not in faults:
            raise AssertionError(f"unexpected fault: {error}") from error


def use_disk_store(files: BrittleFiles) -> None:
    """Everything that a server does with it, two starts included; LIMIT is reached."""
    for start in (0, 3):
        store = DiskStore.open_files(files, LIMIT, SECRET)
        for each in ENTRIES[start : start + 4]:
            with suppress(StoreError):
                store.write(each)
            assert files.files.total_bytes <= store.used_bytes <= LIMIT
        for each in ENTRIES[:2]:
            with suppress(StoreError):
                assert store.read(each.head.key, each.head.state_offset).parts == each.parts
            with suppress(StoreError):
                store.touch(each.head.key, each.head.state_offset, 1.0)
        with suppress(StoreError):
            store.remove(ENTRIES[0].head.key, 0)
        with suppress(StoreError):
            store.write(ENTRIES[-1])
        assert files.files.total_bytes <= store.used_bytes <= LIMIT
        store.close()


def readable(store: DiskStore) -> list[Stored]:
    found = []
    for head in store.heads():
        with suppress(StoreError):
            found.append(store.read(head.key, head.state_offset))
    return found


@pytest.mark.slow
def test_disk_tier_after_any_fault():
    """After a failed or last operation, whatever it was, every entry found by the next start is
    whole, nothing else is left, and the limit held throughout."""
    for at, fault in cases(use_disk_store, MemoryFiles.new()):
        files = BrittleFiles(MemoryFiles.new(), Trouble(at, fault))
        with suppress(StoreError, Stopped):
            use_disk_store(files)
        left = files.files.after_stop()
        with_new_start = DiskStore.open_files(left, LIMIT, SECRET)
        heads = with_new_start.heads()
        assert len(readable(with_new_start)) == len(heads)
        assert {entry_name(h.key, h.state_offset) for h in heads} | {KEY_FILE} == set(left.names())
        assert left.disk.peak_bytes <= LIMIT
        for each in readable(with_new_start):
            assert BY_NAME[entry_name(each.head.key, each.head.state_offset)].parts == each.parts


def test_disk_tier_after_a_power_cut():
    """Nothing of the tier is synced: afterwards an entry is found damaged, or is right."""
    for at, fault in cases(use_disk_store, MemoryFiles.new()):
        if not fault.stops:
            continue
        files = BrittleFiles(MemoryFiles.new(), Trouble(at, fault))
        with suppress(StoreError, Stopped):
            use_disk_store(files)
        left = files.files.after_power_cut(Random(at))
        store = DiskStore.open_files(left, LIMIT, SECRET)
        assert left.total_bytes <= store.used_bytes <= LIMIT
        for each in readable(store):
            assert BY_NAME[entry_name(each.head.key, each.head.state_offset)].parts == each.parts


def exported() -> bytes:
    store, out = SessionStore.open_files(MemoryFiles.new()), io.BytesIO()
    save(store, "c", OTHER)
    export_session(store, "c", out)
    return out.getvalue()


ARCHIVE = exported()


class History:
    """What may be under each name: what was done last, and what was being done since."""

    def __init__(self) -> None:
        self.possible: dict[str, set[SessionHead | None]] = {name: {None} for name in NAMES}

    def do(self, name: str, after: SessionHead | None, act) -> None:
        self.possible[name].add(after)
        with suppress_faults(StoreFault.IO, StoreFault.NO_SPACE):
            act()
            self.possible[name] = {after}


def use_session_store(files: BrittleFiles, history: History) -> None:
    """Save, save more under the same name, share, import, erase."""
    store = SessionStore.open_files(files)
    history.do("a", SHORT, lambda: save(store, "a", SHORT))
    history.do("b", SHORT, lambda: save(store, "b", SHORT))
    history.do("a", LONG, lambda: save(store, "a", LONG))
    history.do("c", OTHER, lambda: import_session(store, "c", io.BytesIO(ARCHIVE)))
    with suppress(StoreError):
        restored(store, "a")
    if store.exists("b", None):
        history.do("b", None, lambda: store.erase("b", b"owner"))
    store.close()


def session_cases():
    return cases(lambda files: use_session_store(files, History()), MemoryFiles.new())


def found(store: SessionStore, name: str) -> SessionHead | None:
    with suppress_faults(StoreFault.NOT_FOUND):
        return restored(store, name)
    return None


def check_sessions(left: MemoryFiles, history: History) -> None:
    store = SessionStore.open_files(left)
    sessions = {name: found(store, name) for name in NAMES}
    assert all(head in history.possible[name] for name, head in sessions.items())
    assert set(left.names()) - {PIECES} == {name for name, head in sessions.items() if head}
    needed = {
        piece.digest.hex()
        for name, head in sessions.items()
        if head
        for piece in store._manifest(name, None).pieces()
    }
    assert set(left.subfolder(PIECES).names()) == needed


@pytest.mark.slow
def test_sessions_after_any_fault():
    """After a failed or last operation each name has its old session or its new one, whole, and
    no other file is left after the next start; what was reported as saved is there."""
    for at, fault in session_cases():
        files, history = BrittleFiles(MemoryFiles.new(), Trouble(at, fault)), History()
        with suppress(StoreError, Stopped):
            use_session_store(files, history)
        check_sessions(files.files.after_stop(), history)


@pytest.mark.slow
def test_sessions_after_a_power_cut():
    """The same when all is lost that was not synced: a session that was reported as saved is there,
    and none is there by halves."""
    for at, fault in session_cases():
        if not fault.stops:
            continue
        files, history = BrittleFiles(MemoryFiles.new(), Trouble(at, fault)), History()
        with suppress(StoreError, Stopped):
            use_session_store(files, history)
        check_sessions(files.files.after_power_cut(Random(at)), history)
