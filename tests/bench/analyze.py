"""Time and peak memory of `kvtrio analyze` on a large log:
python tests/bench/analyze.py [--gigabytes 5] [--keep FILE]

The log is made first (a few minutes; it needs that much room in the folder of temporary files):
requests in sessions with adapters, hits and misses, steps, evictions, as a server writes them at
level info.
"""

import argparse
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import BinaryIO

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.logs import DONE, START_S, log_bytes, made
from kvtrio.core.explain import CachePath, MissReason, TurnClass
from kvtrio.core.types import GapCause, RequestId
from kvtrio.obs.events import CacheEvict, CacheMatch, RequestDone, SchedStep, TierUsage
from kvtrio.obs.schema import Digest

NUM_TEMPLATES, NUM_SESSIONS, SECONDS_PER_REQUEST = 400, 50_000, 0.02
SESSION, REQUEST = Digest(0x5E55105E55105E55), RequestId(123_454_321)
CLASSES = (
    (TurnClass.FIRST, MissReason.FIRST_TURN, 0.0),
    (TurnClass.CONTINUATION, MissReason.NEW_TOKENS, 0.9),
    (TurnClass.CONTINUATION, MissReason.NEW_TOKENS, 0.95),
    (TurnClass.CONTINUATION, MissReason.EVICTED, 0.3),
    (TurnClass.CONTINUATION, MissReason.ADAPTER_MISMATCH, 0.0),
    (TurnClass.REGENERATE, MissReason.NOTHING_MISSED, 0.99),
    (TurnClass.REWRITE, MissReason.DIVERGED, 0.4),
    (TurnClass.AFTER_GAP, MissReason.EVICTED, 0.0),
)


def request(rng: Random) -> RequestDone:
    """One of many: lengths, times and reuse are drawn."""
    turn, reason, share = rng.choice(CLASSES)
    num_prompt = int(rng.lognormvariate(7.5, 1.0)) + 8
    num_cached, num_answer = int(num_prompt * share), rng.randint(2, 600)
    is_ram, gap_s = rng.random() < 0.3, rng.lognormvariate(-3, 1)
    path = CachePath.NONE if not num_cached else CachePath.RAM if is_ram else CachePath.RESIDENT
    num_adapters = rng.choice((0, 0, 1, 2))
    return attrs.evolve(
        DONE,
        request_id=REQUEST,
        place=rng.randrange(16),
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_computed_tokens=num_prompt - num_cached,
        num_generated_tokens=num_answer,
        queue_s=rng.expovariate(20),
        prefill_s=(num_prompt - num_cached) * rng.uniform(1e-4, 1e-3),
        decode_s=num_answer * 0.03,
        session=SESSION,
        tenant=Digest(rng.randrange(40)),
        purpose=rng.randrange(4),
        num_adapters=num_adapters,
        adapters=Digest(rng.randrange(1, 30)) if num_adapters else None,
        path=path,
        miss_reason=reason,
        turn=turn,
        num_device_tokens=0 if is_ram else num_cached,
        num_host_tokens=num_cached if is_ram else 0,
        num_matched_tokens=num_cached,
        evicted_age_s=rng.expovariate(1 / 200) if reason is MissReason.EVICTED else None,
        gap_max_s=gap_s,
        longest_gap_s=gap_s,
        longest_gap_cause=rng.choice(list(GapCause)),
        longest_gap_prefill_tokens=256,
        longest_gap_at=num_prompt + num_answer // 2,
        longest_gap_request_id=RequestId(9),
        longest_gap_prompt_tokens=int(rng.lognormvariate(8, 1)),
        longest_gap_prompt_at=rng.randrange(4096),
    )


def others(rng: Random, done: RequestDone) -> list[object]:
    """What else a server logs for a request or so."""
    match = made(
        CacheMatch,
        request_id=REQUEST,
        num_tokens=done.num_cached_tokens,
        num_host_tokens=done.num_host_tokens,
        path=done.path,
        miss_reason=done.miss_reason,
        turn=done.turn,
        num_matched_tokens=done.num_matched_tokens,
    )
    step = SchedStep(
        step=rng.randrange(10**7),
        num_chunks=16,
        num_prefill_tokens=rng.choice((0, 0, 256)),
        num_decode_rows=rng.randrange(16),
        num_running=16,
        num_waiting=rng.randrange(9),
        duration_s=rng.uniform(0.02, 0.09),
        predicted_s=0.05,
        limit_s=0.1,
        is_breach=False,
        breach=None,
        is_slow=False,
    )
    evict = CacheEvict(
        num_demoted_blocks=rng.randrange(99),
        num_dropped_blocks=rng.randrange(99),
        num_dropped_tokens=rng.randrange(1600),
        longest_idle_s=rng.expovariate(1 / 300),
    )
    usage = made(
        TierUsage,
        num_device_blocks=rng.randrange(4000),
        num_host_blocks=rng.randrange(30000),
        num_running=16,
        num_waiting=3,
        num_waiting_tokens=9000,
    )
    return [
        match,
        step,
        *([evict] if rng.random() < 0.2 else []),
        *([usage] * (rng.random() < 0.05)),
    ]


def templates(rng: Random) -> list[list[bytes]]:
    """Lines without their number and time, cut where the request's id and session go."""
    found = []
    for _ in range(NUM_TEMPLATES):
        done = request(rng)
        text = log_bytes((0.0, event) for event in (done, *others(rng, done)))
        marked = text.replace(str(REQUEST).encode(), b"\0R\0").replace(
            str(SESSION).encode(), b"\0S\0"
        )
        found.append([line[line.index(b',"ts_mono_ns"') :] for line in marked.splitlines()])
    return found


def write(file: BinaryIO, num_bytes: int) -> int:
    """Number of requests that were written."""
    rng = Random(1)
    made, written, number, seq = templates(rng), 0, 0, 0
    while written < num_bytes:
        now = START_S + number * SECONDS_PER_REQUEST
        stamp = datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds")[:26] + "Z"
        session = f"{number % NUM_SESSIONS:016x}".encode()
        lines = []
        for tail in made[rng.randrange(NUM_TEMPLATES)]:
            seq += 1
            head = f'{{"schema":"kvtrio.decision/1","seq":{seq},"timestamp":"{stamp}"'
            lines.append(head.encode() + tail)
        text = b"\n".join(lines) + b"\n"
        text = text.replace(b"\0R\0", b"%d" % number).replace(b"\0S\0", session)
        file.write(text)
        written, number = written + len(text), number + 1
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--keep", type=Path, help="write the log here, or use it if it is there")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        path = arguments.keep or Path(folder) / "log.jsonl"
        if not path.exists():
            with path.open("wb") as file:
                num_requests = write(file, int(arguments.gigabytes * 1e9))
            print(f"{num_requests:,} requests in {path.stat().st_size / 1e9:.2f} GB")
        start = time.perf_counter()
        command = [sys.executable, "-P", "-m", "kvtrio", "analyze", str(path)]
        out = [
            f"--html={folder}/report.html",
            f"--json={folder}/report.json",
            f"--csv={folder}/csv",
        ]
        subprocess.run([*command, *out], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor_s, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
        print(f"{seconds:.1f} s, {processor_s:.1f} s of processors, {peak:,.0f} MiB at the peak")


if __name__ == "__main__":
    main()
