"""How fast scenarios are simulated: python tests/bench/simulate.py [REQUESTS]

Conversations of five turns, prompts of 2,000 tokens and answers of 100 on average. Prints seconds
and peak memory, the scenario's own making and reading apart. Goal: 100,000 requests in under three
minutes on two cores, and under 2 GiB.
"""

import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvtrio.cli.app import main as kvtrio
from kvtrio.replay.scenario import Fresh, Header, Line, Origin, Part, Ref, Request
from kvtrio.replay.scenario_file import write_scenario

TURNS = 5
REQUESTS_PER_S = 15.0
THINK_S = 20.0
FIRST, LATER, ANSWER = (1000, 1600), (100, 400), (50, 151)
"""Bounds of what is new in a first turn and in a later one, and of answers, in tokens."""
FLAGS = [
    "--machine",
    "h100-like",
    "-np",
    "64",
    "--ram-tokens",
    "1500000",
    "--max-waiting",
    "100000",
]


def lines(num_requests: int, seed: int = 1) -> Iterator[Line]:
    """Conversations that come one after the other and take turns."""
    rng, at_s = random.Random(seed), 0.0
    yield Header(origin=Origin.MADE, max_context=8192, seed=seed)
    turns: list[tuple[float, int, int]] = []
    for session in range(num_requests // TURNS):
        at_s = start_s = at_s + rng.expovariate(REQUESTS_PER_S / TURNS)
        for turn in range(TURNS):
            turns.append((start_s, session, turn))
            start_s += rng.expovariate(1 / THINK_S)
    last: dict[int, Request] = {}
    for number, (start_s, session, turn) in enumerate(sorted(turns)):
        before = last.get(session)
        prompt: tuple[Ref | Fresh, ...] = (Fresh(rng.randrange(*FIRST)),)
        if before is not None:
            parts = ((Part.PROMPT, before.prompt_tokens), (Part.OUTPUT, before.output_tokens))
            known = [Ref(before.id, part, 0, length) for part, length in parts]
            prompt = (*known, Fresh(rng.randrange(*LATER)))
        last[session] = Request(
            id=number,
            at_s=start_s,
            session=session,
            turn=turn,
            tenant=session % 7,
            output_tokens=rng.randrange(*ANSWER),
            prompt=prompt,
        )
        yield last[session]


def main() -> None:
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        scenario, log = Path(folder) / "scenario.jsonl", Path(folder) / "log.jsonl"
        write_scenario(scenario, lines(num_requests))
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        assert kvtrio(["simulate", str(scenario), *FLAGS, "--log", str(log)]) == 0
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"\n{num_requests:,} requests: {seconds:.1f} s, {cpu_s:.1f} s of processor time, ")
        print(f"{peak_mib:,.0f} MiB at most, {log.stat().st_size / 1e6:,.0f} MB of log")


if __name__ == "__main__":
    main()
