"""Every policy on the same traffic, in made-up time: python tests/bench/policies.py

Two machines. Chats stream while documents are pasted, one tenant floods, some requests are of a
higher class. Times in seconds but for gaps.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.simulation import (
    H100_LIKE,
    TWO_CORES_LIKE,
    Arrival,
    Run,
    Simulation,
    affine,
    make_core,
)
from kvtrio.schedulers.fair import Fair
from kvtrio.schedulers.fcfs import FCFS
from kvtrio.schedulers.priority import Priority
from kvtrio.schedulers.stall_free import StallFree

POLICIES = (FCFS, StallFree, Fair, Priority)
MACHINES = {
    "H100-like, 64 places": (H100_LIKE, 64, 40, 30_000, 400),
    "two cores, 4 places": (TWO_CORES_LIKE, 4, 1, 3000, 60),
}


def traffic(num_chats: float, num_paste: int, num_output: int) -> list[Arrival]:
    """Two minutes: chats all along, a paste every eight seconds, a flood in between."""
    rng = random.Random(11)
    arrivals = [
        Arrival(
            at_s=rng.uniform(0, 120),
            num_prompt=rng.randrange(20, 400),
            num_output=rng.randrange(num_output // 2, num_output),
            tenant=b"%d" % rng.randrange(1, 8),
            priority=int(rng.random() < 0.1),
        )
        for _ in range(int(30 * num_chats))
    ]
    arrivals += [
        Arrival(at_s=5.0 + 8.0 * i, num_prompt=num_paste, num_output=20, tenant=b"paste")
        for i in range(14)
    ]
    arrivals += [
        Arrival(at_s=rng.uniform(40, 50), num_prompt=200, num_output=30, tenant=b"flood")
        for _ in range(int(30 * num_chats))
    ]
    return arrivals


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def first_tokens(run: Run, wanted: bytes | None) -> list[float]:
    return [
        run.first_token_s(number)
        for number, arrival in enumerate(run.arrivals)
        if number in run.tokens_s and (wanted is None or arrival.tenant == wanted)
    ]


def row(run: Run) -> str:
    chats = [
        run.first_token_s(number)
        for number, arrival in enumerate(run.arrivals)
        if arrival.tenant not in (b"paste", b"flood") and number in run.tokens_s
    ]
    high = [
        run.first_token_s(number)
        for number, arrival in enumerate(run.arrivals)
        if arrival.priority and number in run.tokens_s
    ]
    gaps = run.gaps()
    over = sum(step.seconds > step.limit_s for step in run.steps if step.load.num_decode_rows)
    values = (
        quantile(chats, 0.5),
        quantile(chats, 0.99),
        quantile(high, 0.99),
        quantile(first_tokens(run, b"paste"), 0.5),
        quantile(first_tokens(run, b"flood"), 0.5),
        1e3 * quantile(gaps, 0.99),
        1e3 * max(gaps),
        over,
        sum(f.num_preemptions for f in run.finished.values()),
        run.steps[-1].start_s,
    )
    return "".join(
        f"{value:>11.2f}" if isinstance(value, float) else f"{value:>11}" for value in values
    )


def main() -> None:
    heads = "chat p50,chat p99,high p99,paste p50,flood p50,gap99 ms,gapmax ms,over,preempt,end"
    for name, (machine, places, chats, paste, output) in MACHINES.items():
        print(f"\n{name}\n{'':<11}" + "".join(f"{head:>11}" for head in heads.split(",")))
        for policy in POLICIES:
            core = make_core(policy(), num_places=places)
            run = Simulation(core, affine(machine, noise=0.05)).run(
                traffic(chats, paste, output), 1000.0
            )
            print(f"{policy.__name__:<11}{row(run)}")


if __name__ == "__main__":
    main()
