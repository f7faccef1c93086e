"""Kill -9 of a whole server under traffic: python tests/soak/server.py [moments] [MODEL.gguf]

Conversations go on, branch, are saved and restored, with little memory, so that state moves to disk
all the time; at a random moment the server is killed, and started again on the same folders. Then
what is on the disk must be whole and within its limit, and what every conversation answers must
be, token by token, what it answers when everything is computed anew.
"""

import json
import os
import sys
import tempfile
import threading
import urllib.request
from collections import Counter
from http.client import HTTPException
from pathlib import Path
from random import Random
from typing import Any
from urllib.error import HTTPError

from attrs import define, field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.process import ServerProcess, running_server
from kvtrio.core.stored import StoreFault
from kvtrio.model.fetch import default_cache_dir, fetch
from kvtrio.store.disk import DiskStore
from kvtrio.store.sessions import SessionStore

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("KVTRIO_SHARED", ROOT / ".." / "shared"))
DISK_MIB = 2
VOCABULARY = 8000
LONGEST_S = 1.5
NUM_CLIENTS = 3
NUM_CHATS = 5
FLAGS = ("--dtype", "f32", "--parallel", "2", "-c", "2048", "--cache-ram", "1")


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, or what the server says is wrong, with its status; a broken connection raises."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return {"status": 200, **json.load(answer)}
    except HTTPError as error:
        with error:
            return {"status": error.code}


def complete(url: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 6, "temperature": 0, "ignore_eos": True}
    return post(url, "/completion", {**body, "return_tokens": True, **more})


@define(eq=False)
class Chats:
    """Token ids of conversations; an old one may be branched off half-way."""

    lists: list[list[int]] = field(factory=list)

    def next(self, rng: Random) -> list[int]:
        if len(self.lists) < NUM_CHATS or rng.random() < 0.05:
            begin = self.lists[0][:40] if self.lists else []
        else:
            begin = rng.choice(self.lists[-NUM_CHATS:])
        if rng.random() < 0.2:
            begin = begin[: rng.randrange(len(begin) + 1)]
        if len(begin) > 1200:
            begin = begin[:300]
        return [*begin, *(rng.randrange(10, VOCABULARY) for _ in range(rng.randint(5, 120)))]

    def went_on(self, tokens: list[int]) -> None:
        self.lists.append(tokens)


@define(eq=False)
class Soak:
    """One pair of folders, over all the servers that used them."""

    folder: Path
    model: Path
    chats: Chats = field(factory=Chats)
    tally: Counter[str] = field(factory=Counter)
    faults: list[Exception] = field(factory=list)
    """What ended a client other than the kill."""

    def flags(self) -> list[str]:
        disk, sessions = str(self.folder / "disk"), str(self.folder / "sessions")
        kept = ["--cache-disk", disk, "--cache-disk-size", str(DISK_MIB)]
        return ["-m", str(self.model), *FLAGS, *kept, "--slot-save-path", sessions]

    def one_kill(self, seed: int) -> None:
        with running_server(*self.flags()) as server:
            self._compare(server.url, Random(seed))
            clients = [
                threading.Thread(target=self._talk, args=(server, Random(f"{seed} {i}")))
                for i in range(NUM_CLIENTS)
            ]
            for client in clients:
                client.start()
            clients[0].join(Random(seed).uniform(0, LONGEST_S))
            assert server.process.poll() is None, "the server ended by itself"
            server.process.kill()
            server.wait()
            for client in clients:
                client.join()
        if self.faults:
            raise self.faults[0]
        self.tally["kills"] += 1
        self._check_size()
        if seed % 2:  # else the next server is the first to see what is there
            self._check_files()

    def _talk(self, server: ServerProcess, rng: Random) -> None:
        """Until the connection breaks, also in the middle of an answer."""
        try:
            while True:
                self._ask(server.url, rng)
        except (OSError, HTTPException):
            pass
        except Exception as fault:
            self.faults.append(fault)

    def _ask(self, url: str, rng: Random) -> None:
        kind = rng.randrange(8)
        if kind < 2:
            act = ("save", "restore")[kind]
            path, body = f"/slots/{rng.randrange(2)}", {"filename": f"s{rng.randrange(3)}"}
            self._count(act, post(url, f"{path}?action={act}", body))
            return
        prompt = self.chats.next(rng)
        answer = complete(url, prompt)
        self._count("complete", answer)
        self.chats.went_on(prompt + answer["tokens"])

    def _count(self, what: str, answer: dict[str, Any]) -> None:
        assert answer["status"] < 500, (what, answer)
        self.tally[f"{what}: {answer['status']}"] += 1

    def _compare(self, url: str, rng: Random) -> None:
        """Conversations after the restart, against cold."""
        restored = post(url, "/slots/0?action=restore", {"filename": f"s{rng.randrange(3)}"})
        self._count("restore after a kill", restored)
        for tokens in self.chats.lists[-NUM_CHATS:]:
            prompt = [*tokens, *(rng.randrange(10, VOCABULARY) for _ in range(5))]
            warm, cold = complete(url, prompt), complete(url, prompt, cache_prompt=False)
            assert warm["tokens"] == cold["tokens"], "another answer than cold"
            self.tally["answers equal to cold"] += 1
            self.tally["prompt tokens after kills"] += len(prompt)
            self.tally["of these reused"] += warm["timings"]["cache_n"]

    def _check_size(self) -> None:
        total = sum(path.stat().st_size for path in (self.folder / "disk").iterdir())
        assert total <= DISK_MIB << 20, f"{total} bytes after the kill"

    def _check_files(self) -> None:
        store = DiskStore.open(self.folder / "disk", DISK_MIB << 20, b"")
        for head in store.heads():
            store.read(head.key, head.state_offset)
        self.tally["entries found whole"] += len(store.heads())
        assert set(store.discarded) <= {StoreFault.TEMPORARY}, store.discarded
        store.close()
        sessions = SessionStore.open(self.folder / "sessions")
        for name in sessions.names():
            with sessions.reading(name, None) as reader:
                reader.verify()
            self.tally["sessions found whole"] += 1
        sessions.close()


def default_model() -> Path:
    """A tiny hybrid one where the golden data is, else the smallest that can be fetched."""
    tiny = SHARED / "tiny" / "models" / "qwen35.gguf"
    return tiny if tiny.is_file() else fetch("smollm2", default_cache_dir(), progress=True)


def main(num_kills: int, model: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), model)
        (soak.folder / "sessions").mkdir()
        for seed in range(num_kills):
            soak.one_kill(seed)
    for what, number in sorted(soak.tally.items()):
        print(f"{number:8,}  {what}")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]) if given else 200, Path(given[1]) if len(given) > 1 else default_model())
