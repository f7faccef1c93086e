"""Where a step of the compiled kernels spends its time, per kind of operation:

    python tests/bench/native_step.py MODEL.gguf [--rows N] [--context N] [--prompt N] [--threads N]

N rows decode at a context, or one prompt is read behind it. Per operation the smallest time of many
steps counts: it is what the operation takes when nobody disturbs it. With more than one thread,
worker 0 does whatever share of the work it gets, so times of operations say less than their sum.
"""

import argparse
import ctypes
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtrio.backends.base import BackendSettings
from kvtrio.backends.cpu_backend import CpuBackend
from kvtrio.backends.cpu_program import Kind
from kvtrio.backends.cpu_recorder import program
from kvtrio.backends.cpu_sampling import plan_rows
from kvtrio.core.batch import Batch, Chunk, SampleRow
from kvtrio.core.config import Group
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import BlockId, RequestId
from kvtrio.kernels.cpu_abi import PROFILE_COLUMNS
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.spec import ModelSpec

BLOCK_SIZE = 16
SECONDS = 5.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    for name, default in (("rows", 1), ("context", 0), ("prompt", 0), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def chunk(place: int, start: int, count: int, groups: tuple[Group, ...]) -> Chunk:
    num_blocks = (start + count) // BLOCK_SIZE + 1
    table = tuple(BlockId(place * num_blocks + i) for i in range(num_blocks))
    tokens = tuple(np.random.default_rng(place).integers(0, 1000, count).tolist())
    sample = SampleRow(SamplingParams(temperature=0.0), 0.0, ())
    tables = tuple((BlockId(place),) if group.bytes_per_state else table for group in groups)
    return Chunk(RequestId(place), start, tokens, tables, sample)


def names(spec: ModelSpec) -> list[str]:
    """Of the native operations: the two narrowings are one."""
    kinds = [op.kind for op in program(spec)]
    found = []
    for i, kind in enumerate(kinds):
        if kind is Kind.LINEAR:
            found.append("down" if kinds[i - 1] is Kind.GATED else "output")
        elif kind is not Kind.SAMPLED or kinds[i - 1] is not Kind.SAMPLED:
            found.append(kind.name.lower())
    return found


def measure(backend: CpuBackend, batch: Batch, num_ops: int) -> tuple[float, NDArray[np.int64]]:
    """Seconds of the fastest step, and the smallest nanoseconds per operation and column."""
    parts = backend._open()
    plans = plan_rows([c.sample for c in batch.chunks if c.sample], parts.info.vocab_size)
    step = parts.writer.write(batch, plans, parts.adapters.loaded)
    profile = np.zeros((num_ops, PROFILE_COLUMNS), np.int64)
    least, fastest = np.full_like(profile, np.iinfo(np.int64).max), float("inf")
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        profile[:] = 0
        step.profile = profile.ctypes.data
        begin = time.perf_counter()
        parts.native.check(parts.native.cdll.kvt_step_run(parts.model.handle, ctypes.byref(step)))
        fastest = min(fastest, time.perf_counter() - begin)
        least = np.minimum(least, profile)
    return fastest, least


def main() -> None:
    args = arguments()
    spec = read_spec(file := open_gguf(args.model))
    blocks = args.rows * ((args.context + args.prompt) // BLOCK_SIZE + 2)
    settings = BackendSettings(
        num_threads=args.threads,
        num_blocks=blocks,
        num_state_slots=args.rows,
        max_rows=max(args.rows, args.prompt),
        max_context=args.context + args.prompt + BLOCK_SIZE,
    )
    backend = CpuBackend.load(file, spec, settings)
    groups = backend.info.groups
    count = args.prompt or 1
    num_chunks = 1 if args.prompt else args.rows
    chunks = tuple(chunk(i, args.context, count, groups) for i in range(num_chunks))
    ops = names(spec)
    fastest, table = measure(backend, Batch(0, chunks), len(ops))
    print(f"fastest step {fastest * 1e3:.3f} ms; sum of the smallest {table.sum() / 1e6:.3f} ms")
    print(f"{'us':10} {'prepare':>9} {'main':>9} {'after':>9} {'wait':>9}")
    for name in dict.fromkeys(ops):
        sums = table[[i for i, op in enumerate(ops) if op == name]].sum(0) / 1e3
        print(f"{name:10}" + "".join(f"{value:10.1f}" for value in sums))
    backend.close()


if __name__ == "__main__":
    main()
