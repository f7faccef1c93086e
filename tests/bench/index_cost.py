"""What the prefix index costs a request: python tests/bench/index_cost.py

Prompts of 32,000 tokens that share a system prompt and then diverge, against a cache of 100,000
blocks: matching, publishing and letting go, without a model. Target: under 1 ms per 1,000 tokens,
whatever the number of siblings.
"""

import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.core_fakes import NumberMatcher, answer
from kvtrio.core.config import CoreConfig, Group
from kvtrio.core.events import Submit
from kvtrio.core.identity import KeyMaker
from kvtrio.core.machine import Core
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import RequestId, StateClass
from kvtrio.schedulers.fcfs import FCFS

BLOCK_SIZE, PROMPT, SYSTEM, NUM_BLOCKS = 16, 32_000, 2_000, 100_000


def make() -> Core:
    config = CoreConfig(
        groups=(Group(StateClass.TOKEN, None, 1),),
        block_size=BLOCK_SIZE,
        num_places=1,
        max_context=PROMPT + 64,
        max_waiting=0,
        max_batch_tokens=PROMPT + 64,
        num_host_blocks=NUM_BLOCKS,
    )
    return Core(config, FCFS(), KeyMaker(b"benchmark's secret", b"root"))


def one_request(core: Core, number: int, tokens: tuple[int, ...]) -> tuple[float, int]:
    """Milliseconds in the core, all calls, and tokens reused."""
    submit = Submit(
        request_id=RequestId(number),
        token_ids=tokens,
        max_new_tokens=1,
        sampling=SamplingParams(),
        matcher=NumberMatcher(),
    )
    begin = time.perf_counter()
    core.handle(submit, float(number))
    reused = 0
    while core.has_work:
        batch = core.schedule(float(number))
        assert batch is not None
        for output in core.update(batch, answer(batch), float(number)):
            reused = getattr(output, "num_cached_tokens", reused)
    return (time.perf_counter() - begin) * 1e3, reused


def main() -> None:
    core, rng = make(), random.Random(1)
    system = tuple(rng.randrange(50_000) for _ in range(SYSTEM))
    rows: list[tuple[int, float, int]] = []
    for number in range(120):
        tail = tuple(rng.randrange(50_000) for _ in range(PROMPT - SYSTEM))
        ms, reused = one_request(core, number, system + tail)
        rows.append((core.cache.index.num_blocks, ms, reused))
    print(" cached blocks  siblings  reused  ms/request  ms/1k tokens")
    for first in range(0, 120, 20):
        part = rows[first : first + 20]
        ms = statistics.median(row[1] for row in part)
        line = f"{part[-1][0]:>14,} {first + 20:>9} {part[-1][2]:>7,}"
        print(f"{line} {ms:>11.1f} {ms / (PROMPT / 1000):>13.3f}")
    again, reused = one_request(core, 1000, system + tail)
    print(f"the last prompt again: {reused:,} reused, {again / (PROMPT / 1000):.3f} ms/1k tokens")


if __name__ == "__main__":
    main()
