"""Kill -9 while state is written: python tests/soak/stores.py [moments]

A process writes to the disk tier on one thread and saves, replaces, imports and erases sessions on
another, and is killed at a random moment; then all that it left is looked at, and the next process
goes on there. Looked for: entries or sessions with other bytes, files that are neither valid nor
removed, a session that was reported as saved and is not there, sizes over the limit.
"""

import io
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random

from attrs import define, field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.stored import SECRET, entry, head_of, restored, save, state
from kvtrio.core.session import SessionHead
from kvtrio.core.stored import Stored, StoreError, StoreFault
from kvtrio.store.archive import export_session, import_session
from kvtrio.store.disk import DiskStore
from kvtrio.store.scan import KEY_FILE, entry_name
from kvtrio.store.sessions import PIECES, SessionStore

LIMIT = 1 << 22
NUM_ENTRIES = 60
MAX_PART = 300_000
LONGEST_S = 0.25
NAMES = ("a", "b", "c")
NOTHING = 0


def stored(number: int) -> Stored:
    """Entries from 0 on are blocks, with a state for every third."""
    block = entry(number, num_bytes=Random(number).randrange(MAX_PART))
    return state(block) if number % 3 == 2 else block


def head(version: int) -> SessionHead:
    """Even versions are beginnings of one conversation, odd ones of another."""
    start = 1000 * (version % 2)
    return head_of(range(start, start + 20 + version % 37), version % 4)


def write_entries(folder: Path, rng: Random) -> None:
    """As a server would: room for the next entry is made by removing another."""
    store = DiskStore.open(folder, LIMIT, SECRET)
    say("ready")
    while True:
        wanted = rng.choice(ENTRIES)
        try:
            store.write(wanted)
        except StoreError as error:
            if error.fault is not StoreFault.LIMIT:
                raise
            victim = rng.choice(store.heads())
            store.remove(victim.key, victim.state_offset)


def change_sessions(folder: Path, rng: Random) -> None:
    store = SessionStore.open(folder)
    for version in count(rng.randrange(1, 1000)):
        name, act = rng.choice(NAMES), rng.randrange(6)
        after = NOTHING if act == 0 else version
        say(f"begin {name} {after}")
        if act == 0:
            with suppress(StoreError):
                store.erase(name, None)
        elif act == 1:
            import_session(store, name, archive(store, version))
        else:
            save(store, name, head(version))
        say(f"done {name} {after}")


def archive(store: SessionStore, version: int) -> io.BytesIO:
    out = io.BytesIO()
    save(store, "exported", head(version))
    export_session(store, "exported", out)
    out.seek(0)
    return out


LINES = threading.Lock()


def say(line: str) -> None:
    """To the parent, at once and whole."""
    with LINES:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def child(folder: Path, seed: int) -> None:
    change = threading.Thread(
        target=change_sessions, args=(folder / "sessions", Random(seed)), daemon=True
    )
    change.start()
    write_entries(folder / "disk", Random(seed + 1))


@define
class Soak:
    """What is expected of one folder, over all the processes that worked in it."""

    folder: Path
    possible: dict[str, set[int]] = field(factory=lambda: {name: {NOTHING} for name in NAMES})
    """Versions that may be there under each name."""
    tally: Counter[str] = field(factory=Counter)

    def one_kill(self, seed: int) -> None:
        command = [sys.executable, "-P", __file__, "--child", str(self.folder), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line == "ready\n":
                    break
            with suppress(subprocess.TimeoutExpired):
                process.wait(Random(seed).uniform(0, LONGEST_S))
            assert process.poll() is None, "the writer ended by itself"
            process.kill()
            lines += process.stdout
        self.tally["kills"] += 1
        self.tally["while a session changed"] += sum(
            line.startswith("begin") for line in lines
        ) > sum(line.startswith("done") for line in lines)
        self._learn(lines)
        self._check_disk()
        self._check_sessions()

    def _learn(self, lines: list[str]) -> None:
        for line in lines:
            if line.endswith("\n") and line != "ready\n":
                what, name, version = line.split()
                if what == "begin":
                    self.possible[name].add(int(version))
                else:
                    self.possible[name] = {int(version)}
                    self.tally["session changes"] += 1

    def _check_disk(self) -> None:
        folder = self.folder / "disk"
        total = sum(path.stat().st_size for path in folder.iterdir())
        assert total <= LIMIT, f"{total} bytes after the kill"
        originals = {entry_name(s.head.key, s.head.state_offset): s for s in ENTRIES}
        store = DiskStore.open(folder, LIMIT, SECRET)
        for one in store.heads():
            found = store.read(one.key, one.state_offset)
            assert found.parts == originals[entry_name(one.key, one.state_offset)].parts
            self.tally["entries found whole"] += 1
        names = {entry_name(one.key, one.state_offset) for one in store.heads()}
        assert {path.name for path in folder.iterdir()} == names | {KEY_FILE}
        self.tally.update({f"discarded: {f.value}": n for f, n in store.discarded.items()})
        assert set(store.discarded) <= {StoreFault.TEMPORARY}
        store.close()

    def _check_sessions(self) -> None:
        store = SessionStore.open(self.folder / "sessions")
        for name in NAMES:
            heads = {version: head(version) for version in self.possible[name] if version}
            there = restored(store, name) if name in store.names() else None
            versions = {version for version, one in heads.items() if one == there}
            assert versions or (there is None and NOTHING in self.possible[name]), name
            self.possible[name] = versions or {NOTHING}
            self.tally["sessions found whole"] += there is not None
        if "exported" in store.names():
            restored(store, "exported")
        needed = {
            piece.digest.hex()
            for name in store.names()
            for piece in store._manifest(name, None).pieces()
        }
        folder = self.folder / "sessions"
        assert {path.name for path in (folder / PIECES).iterdir()} == needed
        assert {path.name for path in folder.iterdir()} == {*store.names(), PIECES}
        store.close()


ENTRIES = [stored(number) for number in range(NUM_ENTRIES)]


def main(num_kills: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder))
        for seed in range(num_kills):
            soak.one_kill(seed)
    for what, number in soak.tally.items():
        print(f"{number:8,}  {what}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
