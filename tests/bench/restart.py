"""Time to first token of a conversation that comes back after the server was started again:
python tests/bench/restart.py [--model MODEL.gguf] [--tokens N] [--peer "llama-server ... {port}"]

Three ways: nothing kept (cold), found again in --cache-disk, and saved and restored as a session;
with --peer the first and the last of llama-server, too, whose command gets --slot-save-path. A
server that keeps something reads the conversation, is stopped with SIGTERM and started again; it
has given one short answer before anything is measured. Files are read from the system's page cache.
Each row is the median of the rounds, which take turns; "first token" has the restoring in it.
"""

import argparse
import statistics
import sys
import tempfile
from enum import Enum, auto
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from kvtrio.bench.completion import tokenise
from kvtrio.bench.http import OK, Client
from kvtrio.bench.prompts import text
from kvtrio.bench.servers import Server, Target, open_server
from kvtrio.model.fetch import default_cache_dir, fetch

PATIENCE_S = 300.0
OURS = "{python} -P -m kvtrio serve {model} -np 1 -c {context} --port {{port}}"
NEXT = " And what came of it then, in the end, for all of them?"
FILE = {"filename": "bench"}


class Keeping(Enum):
    """What is left of a conversation when its server stops."""

    NOTHING = auto()
    FOUND = auto()
    """By the next server, unasked."""
    SAVED = auto()
    """By a request, and restored by one."""


@frozen(kw_only=True)
class Way:
    """How a conversation outlives its server."""

    label: str
    command: str
    keeping: Keeping


@frozen
class Measured:
    """Of the first request after the restart. Times in milliseconds."""

    first_token_ms: float
    restore_ms: float
    num_reused: int
    num_computed: int


async def call(client: Client, path: str, body: dict[str, Any]) -> tuple[float, Any]:
    """Milliseconds, and the answer."""
    begun_s = trio.current_time()
    reply = await client.post(path, body)
    taken_ms = (trio.current_time() - begun_s) * 1e3
    if reply.status != OK:
        sys.exit(f"{client.name}{path}: status {reply.status}: {reply.body[:200]!r}")
    return taken_ms, reply.json()


async def ask(server: Server, token_ids: list[int]) -> tuple[float, Any]:
    """One token, so that the answer is whole when its first token is there."""
    body = {"prompt": token_ids, "n_predict": 1, "temperature": 0, "cache_prompt": True}
    return await call(server.client, "/completion", {**body, "id_slot": 0})


async def chat_of(server: Server, num_tokens: int, round_number: int) -> list[int]:
    words = text(f"Story {round_number}", num_tokens)
    return (await tokenise(server.client, words))[:num_tokens]


async def leave(way: Way, num_tokens: int, round_number: int) -> None:
    """What the server before the restart does."""
    server = await open_server(Target(way.label, way.command), PATIENCE_S)
    try:
        await ask(server, await chat_of(server, num_tokens, round_number))
        if way.keeping is Keeping.SAVED:
            await call(server.client, "/slots/0?action=save", FILE)
    finally:
        await server.stop()


async def measure(way: Way, num_tokens: int, round_number: int) -> Measured:
    if way.keeping is not Keeping.NOTHING:
        await leave(way, num_tokens, round_number)
    server = await open_server(Target(way.label, way.command), PATIENCE_S)
    try:
        restore_ms = 0.0
        chat = await chat_of(server, num_tokens, round_number)
        more = await tokenise(server.client, NEXT)
        if way.keeping is Keeping.SAVED:
            restore_ms, _ = await call(server.client, "/slots/0?action=restore", FILE)
        first_ms, answer = await ask(server, chat + more)
    finally:
        await server.stop()
    timings = answer["timings"]
    return Measured(restore_ms + first_ms, restore_ms, timings["cache_n"], timings["prompt_n"])


def ways(args: argparse.Namespace, folder: Path) -> list[Way]:
    model = args.model or fetch("smollm2", default_cache_dir(), progress=True)
    context = args.tokens + 512
    ours = OURS.format(python=sys.executable, model=model, context=context)
    sessions, disk = f" --slot-save-path {folder}/ours", f" --cache-disk {folder}/disk"
    (folder / "ours").mkdir()
    found = [
        Way(label="cold", command=ours, keeping=Keeping.NOTHING),
        Way(label="disk tier", command=ours + disk, keeping=Keeping.FOUND),
        Way(label="saved session", command=ours + sessions, keeping=Keeping.SAVED),
    ]
    if args.peer:
        (folder / "peers").mkdir()
        saving = f"{args.peer} --slot-save-path {folder}/peers"
        found.append(Way(label="peer, cold", command=args.peer, keeping=Keeping.NOTHING))
        found.append(Way(label="peer, saved session", command=saving, keeping=Keeping.SAVED))
    return found


def show(rows: dict[str, list[Measured]]) -> None:
    print("after a restart        first token ms   restore ms    reused   computed   of cold")
    cold = statistics.median(each.first_token_ms for each in rows["cold"])
    for label, measured in rows.items():
        first = statistics.median(each.first_token_ms for each in measured)
        restore = statistics.median(each.restore_ms for each in measured)
        last = measured[-1]
        print(
            f"{label:<22} {first:>14.1f} {restore:>12.1f} {last.num_reused:>9}"
            f" {last.num_computed:>10} {first / cold:>9.2%}"
        )


async def bench(args: argparse.Namespace) -> None:
    rows: dict[str, list[Measured]] = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        chosen = ways(args, Path(await trio.Path(folder).resolve()))
        for number in range(args.rounds):
            for way in chosen:
                rows.setdefault(way.label, []).append(await measure(way, args.tokens, number))
    show(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: smollm2")
    parser.add_argument("--tokens", type=int, default=6000, help="of the conversation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="llama-server's command, with {port} where the port goes")
    trio.run(bench, parser.parse_args())


if __name__ == "__main__":
    main()
