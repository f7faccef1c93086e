"""How fast state is saved and restored, against copying a file: python tests/bench/store.py [MiB]

Blocks of 384 KiB, 16 tokens of a small model; the default of 256 MiB is a conversation of 11,000.
Everything is read from the system's page cache, as it is after a restart of the server alone.
Files are made in a folder below the current one, since the usual one for temporary files may be
memory. Each line is the median of three runs, taken in turns: time on the clock, and of processors,
which other work on the machine does not change as much.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.stored import SECRET, digest
from kvtrio.core.session import Parts, Piece, SavedContext, ServerIdentity, SessionHead
from kvtrio.core.stored import RunOfContext, Stored, StoredHead
from kvtrio.store.archive import export_session, import_session
from kvtrio.store.disk import DiskStore
from kvtrio.store.sessions import SessionStore

BLOCK_BYTES = 384 << 10
BLOCK_SIZE = 16
IDENTITY = ServerIdentity(b"m" * 32, b"f" * 32, BLOCK_SIZE)
CHUNK = 1 << 20
ROUNDS = 3


class Bench:
    """One folder, and the state that is written there again and again."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self.folder = folder
        raw = os.urandom(num_blocks * BLOCK_BYTES)
        self.blocks: list[Parts] = [
            (raw[i : i + BLOCK_BYTES],) for i in range(0, len(raw), BLOCK_BYTES)
        ]
        self.num_bytes = len(raw)
        self.pieces: list[Piece] = []
        self.head = SessionHead(
            token_ids=tuple(range(num_blocks * BLOCK_SIZE)), contexts=(SavedContext(0),)
        )
        (folder / "file").write_bytes(raw)
        self.sessions = SessionStore.open(folder / "sessions")
        self.others = SessionStore.open(folder / "others")
        self.disk = DiskStore.open(folder / "disk", 4 * len(raw) + CHUNK, SECRET)
        self.entries = [self._entry(i) for i in range(num_blocks)]

    def _entry(self, i: int) -> Stored:
        tokens = self.head.token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
        runs = (RunOfContext(0, digest("base")),)
        head = StoredHead(digest(i), digest(i - 1), i * BLOCK_SIZE, tokens, runs)
        return Stored(head, self.blocks[i])

    def copy_file(self) -> None:
        with (self.folder / "file").open("rb") as source, self._new("copy") as target:
            while chunk := source.read(CHUNK):
                target.write(chunk)

    def copy_file_and_sync(self) -> None:
        self.copy_file()
        with (self.folder / "copy").open("rb") as copied:
            os.fsync(copied.fileno())

    def write_tier(self) -> None:
        for entry in self.entries:
            self.disk.write(entry)

    def read_tier(self) -> None:
        for entry in self.entries:
            self.disk.read(entry.head.key, 0)

    def start_tier(self) -> None:
        self.disk.close()
        self.disk = DiskStore.open(self.folder / "disk", self.disk.limit_bytes, SECRET)

    def save(self) -> None:
        with self.sessions.saving("a", self.head, IDENTITY, b"") as writer:
            self.pieces = [writer.add_block(parts) for parts in self.blocks]
            writer.commit()

    def save_known(self) -> None:
        with self.sessions.saving("a", self.head, IDENTITY, b"") as writer:
            assert all(map(writer.reuse_block, self.pieces))
            writer.commit()

    def restore(self) -> None:
        with self.sessions.restoring("a", IDENTITY, lambda digest: True, b"") as reader:
            for i in range(len(self.blocks)):
                reader.block(i)

    def export(self) -> None:
        with self._new("archive") as target:
            export_session(self.sessions, "a", target)

    def import_(self) -> None:
        with (self.folder / "archive").open("rb") as source:
            import_session(self.others, "a", source)

    def begin_anew(self) -> None:
        for entry in self.entries:
            self.disk.remove(entry.head.key, 0)
        for store in (self.sessions, self.others):
            for name in store.names():
                store.erase(name, None)
        os.sync()

    def _new(self, name: str):
        (self.folder / name).unlink(missing_ok=True)
        return (self.folder / name).open("wb")


def seconds(act: Callable[[], None]) -> tuple[float, float]:
    """On the clock, and of processors."""
    begin, worked = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - begin, time.process_time() - worked


def main(num_mib: int) -> None:
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-store-") as folder:
        bench = Bench(Path(folder), max(1, (num_mib << 20) // BLOCK_BYTES))
        rows: dict[str, Callable[[], None]] = {
            "copy of one file": bench.copy_file,
            "copy of one file, synced": bench.copy_file_and_sync,
            "disk tier: write": bench.write_tier,
            "disk tier: read, verified": bench.read_tier,
            "disk tier: look through at start": bench.start_tier,
            "session: save, synced": bench.save,
            "session: save again, nothing new": bench.save,
            "session: save again, files known": bench.save_known,
            "session: restore, verified first": bench.restore,
            "session: export": bench.export,
            "session: import, synced": bench.import_,
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
        for _ in range(ROUNDS):
            bench.begin_anew()
            for name, act in rows.items():
                times[name].append(seconds(act))
    print(f"{bench.num_bytes / 1e6:,.0f} MB in {len(bench.blocks)} blocks")
    for name, measured in times.items():
        middle, worked = map(statistics.median, zip(*measured, strict=True))
        print(
            f"{name:34} {middle * 1e3:8.0f} ms {bench.num_bytes / middle / 1e6:8,.0f} MB/s"
            f" {worked * 1e3:8.0f} ms of processors"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 256)
