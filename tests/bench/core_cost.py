"""What a step costs the scheduler itself: python tests/bench/core_cost.py

256 requests decode, 2,000 wait; every policy. Target: schedule + update under 1 ms.
"""

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
from kvtrio.schedulers.fair import Fair
from kvtrio.schedulers.fcfs import FCFS
from kvtrio.schedulers.priority import Priority
from kvtrio.schedulers.stall_free import StallFree

NUM_RUNNING, NUM_WAITING, PROMPT = 256, 2000, 500


def make(policy) -> Core:
    config = CoreConfig(
        groups=(Group(StateClass.TOKEN, None, 1),),
        block_size=16,
        num_places=NUM_RUNNING,
        max_context=4096,
        max_waiting=2 * NUM_WAITING,
        max_batch_tokens=8192,
    )
    core = Core(config, policy, KeyMaker(b"benchmark's secret", b"root"))
    for number in range(NUM_RUNNING + NUM_WAITING):
        submit = Submit(
            request_id=RequestId(number),
            token_ids=tuple(number * 1000 + i for i in range(PROMPT)),
            max_new_tokens=2000,
            sampling=SamplingParams(),
            matcher=NumberMatcher(),
            tenant=b"%d" % (number % 8),
            priority=0,
        )
        core.handle(submit, 0.0)
    return core


def main() -> None:
    print("policy         schedule    update      both       p99   (ms)")
    for policy in (FCFS(), StallFree(), Fair(), Priority()):
        core, now = make(policy), 0.0
        times: list[tuple[float, float]] = []
        while len(times) < 300:
            now += 0.02
            begin = time.perf_counter()
            batch = core.schedule(now)
            middle = time.perf_counter()
            result = answer(batch)
            resumed = time.perf_counter()
            core.update(batch, result, now + 0.01)
            end = time.perf_counter()
            if batch.num_tokens == NUM_RUNNING == len(batch.chunks):
                times.append(((middle - begin) * 1e3, (end - resumed) * 1e3))
        schedule, update = zip(*times, strict=True)
        both = sorted(a + b for a, b in times)
        name = type(policy).__name__
        medians = [statistics.median(x) for x in (schedule, update, both)]
        cells = "".join(f"{value:>10.2f}" for value in (*medians, both[-3]))
        print(f"{name:<12} {cells}")


if __name__ == "__main__":
    main()
