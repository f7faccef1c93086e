"""Saved sessions: what is written, what comes back, what is refused, and who may."""

import io
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from attrs import evolve

from harness.file_faults import BrittleFiles, Fault, Stopped
from harness.memory_files import MemoryFiles
from harness.stored import (
    BLOCK_SIZE,
    IDENTITY,
    block_parts,
    digest,
    head_of,
    restored,
    save,
    state_parts,
)
from kvtrio.core.session import ServerIdentity
from kvtrio.core.stored import StoreError, StoreFault
from kvtrio.store.archive import export_session, import_session
from kvtrio.store.sessions import PIECES, SessionStore

SHORT, LONG, OTHER = head_of(range(5)), head_of(range(9), 2), head_of(range(50, 54))


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles.new()


@pytest.fixture
def store(files: MemoryFiles) -> SessionStore:
    return SessionStore.open_files(files)


def fault_of(act, *args) -> StoreFault:
    with pytest.raises(StoreError) as caught:
        act(*args)
    return caught.value.fault


def restore_as(store: SessionStore, identity: ServerIdentity, adapters: set[bytes]) -> None:
    with store.restoring("a", identity, adapters.__contains__, b"owner"):
        pass


def pieces(files: MemoryFiles) -> set[str]:
    return set(files.subfolder(PIECES).names())


def exported(store: SessionStore, name: str) -> bytes:
    out = io.BytesIO()
    export_session(store, name, out)
    return out.getvalue()


def test_a_session_survives_on_the_disk(tmp_path: Path):
    """Tokens, contexts, blocks and states come back byte for byte from another store's object, in
    files that only their owner may read."""
    first = SessionStore.open(tmp_path / "sessions")
    save(first, "chat", LONG)
    first.close()
    second = SessionStore.open(tmp_path / "sessions")
    assert restored(second, "chat") == LONG
    second.close()
    paths = [path for path in (tmp_path / "sessions").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}


def test_only_what_is_new_is_written(store: SessionStore):
    """A longer version of a conversation adds its own blocks; the same again adds nothing."""
    assert save(store, "a", SHORT) == 3 * 4096
    assert save(store, "a", SHORT) == 0
    assert save(store, "a", LONG) == 3 * 4096
    assert save(store, "copy", LONG) == 0
    assert store.info("a", None).num_bytes == store.info("copy", None).num_bytes


def test_info_says_what_is_there(store: SessionStore):
    """Counts of tokens, states and bytes, and whose state it is, from the manifest alone."""
    save(store, "a", LONG)
    info = store.info("a", b"owner")
    assert (info.name, info.num_tokens, info.num_states) == ("a", 9, 2)
    assert info.identity == IDENTITY
    assert info.num_bytes > 5 * 4096
    assert store.head("a", b"owner") == LONG


def test_state_without_a_session_is_removed(store: SessionStore, files: MemoryFiles):
    """Replacing or erasing a session removes what no other one needs, and nothing else."""
    save(store, "a", LONG)
    save(store, "b", SHORT)
    shared = pieces(files)
    save(store, "a", OTHER)
    assert restored(store, "b") == SHORT
    assert len(pieces(files)) == 5
    assert len(shared - pieces(files)) == 3
    store.erase("b", b"owner")
    assert len(pieces(files)) == 2
    store.erase("a", b"owner")
    assert files.names() == [PIECES]
    assert pieces(files) == set()


def test_a_known_file_is_reused_as_long_as_it_is_untouched(store: SessionStore, files: MemoryFiles):
    """What was saved needs not be given again; what has gone, or was changed, or was written by a
    save that was given up, does."""
    with store.saving("a", SHORT, IDENTITY, b"owner") as writer:
        kept = [writer.add_block(block_parts(SHORT, i)) for i in range(2)]
        state = writer.add_state(state_parts(SHORT, 0))
        writer.commit()
    with store.saving("b", SHORT, IDENTITY, b"owner") as writer:
        assert all(map(writer.reuse_block, kept))
        assert writer.reuse_state(state)
        assert writer.commit().num_new_bytes == 0
    assert restored(store, "b") == SHORT
    folder = files.subfolders[PIECES]
    folder.put(kept[0].digest.hex(), b"changed")
    with store.saving("b", LONG, IDENTITY, b"owner") as writer:
        dropped = writer.add_block(block_parts(LONG, 2))
        assert not writer.reuse_block(kept[0])
        assert writer.reuse_block(kept[1])
    with store.saving("b", LONG, IDENTITY, b"owner") as writer:
        assert not writer.reuse_block(dropped)


def test_leaving_without_commit_changes_nothing(store: SessionStore, files: MemoryFiles):
    """A save that is given up leaves the session before it, and none of its own state."""
    save(store, "a", SHORT)
    before = pieces(files)
    with store.saving("a", LONG, IDENTITY, b"owner") as writer:
        writer.add_block(block_parts(LONG, 0))
        writer.add_block(block_parts(LONG, 1))
    assert pieces(files) == before
    assert files.names() == ["a", PIECES]
    assert restored(store, "a") == SHORT


def test_restoring_needs_the_same_server(store: SessionStore):
    """Another model, another KV format, other blocks and missing adapters are told apart."""
    save(store, "a", SHORT)
    adapters = {digest("adapter")}
    restore_as(store, IDENTITY, adapters)
    for other, fault in [
        (evolve(IDENTITY, model=b"x" * 32), StoreFault.MODEL),
        (evolve(IDENTITY, format=b"x" * 32), StoreFault.FORMAT),
        (evolve(IDENTITY, block_size=8), StoreFault.FORMAT),
    ]:
        assert fault_of(restore_as, store, other, adapters) is fault
    assert fault_of(restore_as, store, IDENTITY, {b"y" * 32}) is StoreFault.ADAPTERS


def test_sessions_of_others_are_not_there(store: SessionStore):
    """Another owner can neither restore, see nor erase a session, and cannot take its name."""
    save(store, "a", SHORT, owner=b"alice")
    for act in (
        lambda: restored(store, "a", b"bob"),
        lambda: store.info("a", b"bob"),
        lambda: store.erase("a", b"bob"),
    ):
        assert fault_of(act) is StoreFault.NOT_FOUND
    assert not store.exists("a", b"bob")
    assert fault_of(save, store, "a", OTHER, b"bob") is StoreFault.TAKEN
    assert restored(store, "a", b"alice") == SHORT
    assert restored(store, "a", None) == SHORT


def test_faults_of_a_manifest(store: SessionStore, files: MemoryFiles):
    """Shortened, changed, newer and foreign files are told apart, and named as sessions or not."""
    save(store, "a", SHORT)
    data = files.entries["a"].data
    for changed, fault in [
        (b"", StoreFault.TRUNCATED),
        (data[:10], StoreFault.TRUNCATED),
        (data[:-1], StoreFault.TRUNCATED),
        (data + b"x", StoreFault.DAMAGED),
        (data.replace(b"[0,1", b"[0,2"), StoreFault.DAMAGED),
        (data.replace(b"session 001", b"session 002"), StoreFault.NEWER),
        (b"ggsq" + data, StoreFault.FOREIGN),
    ]:
        files.put("a", changed)
        assert fault_of(restored, store, "a") is fault
        assert store.names() == ([] if fault is StoreFault.FOREIGN else ["a"])
    assert fault_of(restored, store, "nothing") is StoreFault.NOT_FOUND
    assert store.exists("a", b"owner")
    assert not store.exists("nothing", b"owner")


def test_missing_and_damaged_state_is_found_before_anything_is_read(
    store: SessionStore, files: MemoryFiles
):
    """A session whose state is gone or changed in one byte is damaged as a whole; saving it again
    repairs it."""
    save(store, "a", LONG)
    folder = files.subfolder(PIECES)
    for name in sorted(pieces(files)):
        good = folder.entries[name].data
        for bad in (good[:-1] + bytes([good[-1] ^ 1]), good[:-1], None):
            folder.remove(name) if bad is None else folder.put(name, bad)
            with pytest.raises(StoreError) as caught:
                restored(store, "a")
            assert caught.value.fault in (StoreFault.DAMAGED, StoreFault.TRUNCATED)
            save(store, "a", LONG)
            assert restored(store, "a") == LONG


def test_nothing_is_handed_out_before_all_is_verified(store: SessionStore, files: MemoryFiles):
    """Damage in the last piece keeps the first from being read."""
    save(store, "a", LONG)
    folder = files.subfolder(PIECES)
    folder.put(min(folder.names()), b"x" * 4096)
    with pytest.raises(StoreError), store.restoring("a", IDENTITY, lambda digest: True, None):
        pytest.fail("it was handed out")


def test_a_damaged_session_can_be_replaced_and_erased(store: SessionStore, files: MemoryFiles):
    """What is left of a session is in nobody's way."""
    save(store, "a", SHORT)
    files.put("a", files.entries["a"].data[:-5])
    save(store, "a", LONG)
    assert restored(store, "a") == LONG
    files.put("a", files.entries["a"].data[:-5])
    store.erase("a", b"owner")
    assert store.names() == []
    assert pieces(files) == set()


@pytest.mark.parametrize("content", [b"a thesis", b"kvtrio session 002 of the future"])
def test_files_that_are_no_sessions_stay(store: SessionStore, files: MemoryFiles, content: bytes):
    """Neither saving nor erasing touches what this version did not write."""
    files.put("a", content.ljust(200, b"."))
    assert fault_of(save, store, "a", SHORT) in (StoreFault.FOREIGN, StoreFault.NEWER)
    assert fault_of(store.erase, "a", b"owner") in (StoreFault.FOREIGN, StoreFault.NEWER)
    assert files.entries["a"].data.startswith(content)
    assert pieces(files) == set()


def test_state_that_a_newer_version_may_need_stays(store: SessionStore, files: MemoryFiles):
    """While there is a manifest that cannot be understood, no state is removed."""
    save(store, "a", SHORT)
    files.put("b", files.entries["a"].data.replace(b"session 001", b"session 002"))
    before = pieces(files)
    store.erase("a", b"owner")
    assert pieces(files) == before
    files.remove("b")
    SessionStore.open_files(files)
    assert pieces(files) == set()


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".blocks", ".a", "a/b", "/a", "a\\b", "a:b", "a*", "a?", 'a"', "a<", "a>"),
        *(
            "a|",
            "a\0",
            "a\n",
            "a\x7f",
            "a\x85",
            " a",
            "a ",
            "a.",
            "a..b",
            "x" * 256,
            "\u00e4" * 128,
        ),
        *("a\uff0eb", "a\u2215b", "a\u2216b", "a\ufffd", "\ufeffa", "a\ud800"),
    ],
)
def test_bad_names_are_refused(store: SessionStore, files: MemoryFiles, name: str):
    """A name is one part of a path that no system takes for something else."""
    assert fault_of(save, store, name, SHORT) is StoreFault.NAME
    assert fault_of(restored, store, name) is StoreFault.NAME
    assert fault_of(store.erase, name, None) is StoreFault.NAME
    assert files.names() == [PIECES]


@pytest.mark.parametrize(
    "name", ["a", "x" * 255, "my chat 7", "caf\u00e9", "a.b-c_d", "~", "a=1;b"]
)
def test_good_names_are_taken(tmp_path: Path, name: str):
    """Whatever else a file system holds."""
    store = SessionStore.open(tmp_path)
    save(store, name, SHORT)
    assert store.names() == [name]
    assert restored(store, name) == SHORT
    store.close()


def test_another_process_at_work(tmp_path: Path):
    """Who changes the folder is alone with it; readers share it; nobody waits."""
    mine, theirs = SessionStore.open(tmp_path), SessionStore.open(tmp_path)
    save(mine, "a", SHORT)
    with mine.saving("b", OTHER, IDENTITY, b"owner"):
        assert fault_of(restored, theirs, "a") is StoreFault.LOCKED
        assert fault_of(save, theirs, "c", SHORT) is StoreFault.LOCKED
        assert theirs.info("a", None).num_tokens == 5
    with mine.reading("a", None):
        assert restored(theirs, "a") == SHORT
        assert fault_of(theirs.erase, "a", None) is StoreFault.LOCKED
    save(theirs, "c", SHORT)
    mine.close()
    theirs.close()


def test_what_another_process_left_is_not_relied_upon(files: MemoryFiles):
    """State of a saver that died is removed before the next save: it may be lost in a power cut."""
    mine, brittle = SessionStore.open_files(files), BrittleFiles(files)
    theirs = SessionStore.open_files(brittle)
    brittle.trouble.strike(14, Fault.STOPS)
    with suppress(Stopped):
        save(theirs, "a", LONG)
    files.after_stop()
    assert pieces(files)
    save(mine, "b", OTHER)
    assert len(pieces(files)) == 2
    assert files.names() == ["b", PIECES]


@pytest.mark.parametrize("fault", [Fault.FAILS, Fault.FAILS_DONE])
def test_a_failed_save_leaves_nothing(files: MemoryFiles, fault: Fault):
    """The same server goes on: the session before is there with all it needs and nothing more."""
    brittle = BrittleFiles(files)
    store = SessionStore.open_files(brittle)
    save(store, "a", SHORT)
    before, num_failures = pieces(files), 0
    for after in range(60):
        brittle.trouble.strike(after, fault)
        try:
            save(store, "a", LONG)
        except StoreError:
            num_failures += 1
            is_new = restored(store, "a") == LONG
            assert (pieces(files) == before) is not is_new
            assert set(files.names()) == {"a", PIECES}
        brittle.trouble.at = None
        save(store, "a", SHORT)
    assert num_failures > 25


@pytest.mark.parametrize("gone", ["", PIECES])
def test_a_folder_that_was_removed_is_a_fault_of_the_disk(tmp_path: Path, gone: str):
    """Nobody is told that the session that is being saved, or imported, is not there."""
    folder = tmp_path / "sessions"
    store = SessionStore.open(folder)
    save(store, "chat", SHORT)
    archive = exported(store, "chat")
    shutil.rmtree(folder / gone)
    assert fault_of(save, store, "other", LONG) is StoreFault.IO
    assert fault_of(import_session, store, "new", io.BytesIO(archive)) is StoreFault.IO
    store.close()


def test_one_file_holds_a_whole_session(store: SessionStore):
    """An exported session imported elsewhere, under another name, is the same session."""
    save(store, "a", LONG)
    there = SessionStore.open_files(MemoryFiles.new())
    info = import_session(there, "b", io.BytesIO(exported(store, "a")))
    assert info.num_new_bytes == 5 * 4096
    assert restored(there, "b") == LONG
    assert exported(there, "b") == exported(store, "a")
    import_session(there, "c", io.BytesIO(exported(store, "a")), b"somebody")
    assert restored(there, "c", b"somebody") == LONG


def test_importing_shares_and_replaces(store: SessionStore, files: MemoryFiles):
    """What is there is not added again, and state of a replaced session goes."""
    save(store, "a", SHORT)
    archive = exported(store, "a")
    save(store, "b", LONG)
    assert import_session(store, "b", io.BytesIO(archive)).num_new_bytes == 0
    assert restored(store, "b") == SHORT
    assert len(pieces(files)) == 3


def test_a_broken_archive_leaves_nothing(store: SessionStore, files: MemoryFiles):
    """Cut anywhere, followed by anything, or with any byte changed: the session before stays, and
    nothing of the archive is kept."""
    save(store, "a", LONG)
    archive = exported(store, "a")
    target_files = MemoryFiles.new()
    target = SessionStore.open_files(target_files)
    save(target, "a", OTHER)
    save(target, "b", SHORT)
    before = pieces(target_files)
    broken = [archive[:size] for size in range(0, len(archive), 997)]
    broken += [archive + b"x", b"x" + archive]
    broken += [
        archive[:at] + bytes([archive[at] ^ 4]) + archive[at + 1 :]
        for at in range(0, len(archive), 61)
    ]
    for data in broken:
        fault = fault_of(import_session, target, "a", io.BytesIO(data))
        assert fault in BROKEN
        assert pieces(target_files) == before
    assert restored(target, "a") == OTHER
    assert restored(target, "b") == SHORT


BROKEN = (StoreFault.TRUNCATED, StoreFault.DAMAGED, StoreFault.FOREIGN, StoreFault.NEWER)


def test_exporting_verifies(store: SessionStore, files: MemoryFiles):
    """A damaged session is not handed on, and not a byte of it is written."""
    save(store, "a", SHORT)
    name = min(pieces(files))
    files.subfolder(PIECES).put(name, b"x" * 4096)
    out = io.BytesIO()
    with pytest.raises(StoreError):
        export_session(store, "a", out)
    assert out.getvalue() == b""


def test_models_without_attention_have_empty_blocks(store: SessionStore):
    """A session may consist of states alone: its blocks are nodes without bytes."""
    head = head_of(range(6), 2)
    with store.saving("a", head, IDENTITY, b"") as writer:
        for _ in range(head.num_blocks(BLOCK_SIZE)):
            writer.add_block(())
        for i in range(2):
            writer.add_state(state_parts(head, i))
        writer.commit()
    with store.restoring("a", IDENTITY, lambda digest: True, b"") as reader:
        assert [reader.block(i) for i in range(2)] == [(), ()]
        assert reader.state(1) == state_parts(head, 1)
