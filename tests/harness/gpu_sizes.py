"""What is measured on a GPU, and how long something takes there."""

import time
from collections.abc import Callable, Sequence

import gguf
import numpy as np
import torch
from attrs import evolve, frozen

from harness.cpu_matrices import random_rows

TRAFFIC = 200 << 20
"""Bytes that runs of a kernel read in turn, so that no cache holds them."""


@frozen(kw_only=True)
class Sizes:
    """Of all that is measured."""

    device: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    rows: tuple[int, ...]
    prompt: int
    far: int
    """Position of the prompt beside which a gap is measured."""
    copied: int
    """Bytes of the copy that all is compared with."""
    square: int
    """Side of the matrices that all is compared with."""
    moves: int
    repeats: int

    @property
    def dim(self) -> int:
        return self.hidden // self.heads


EIGHT_B = Sizes(
    device="cuda", layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, vocab=128256,
    context=4096, rows=(1, 8, 32, 128), prompt=2048, far=30000, copied=1 << 30, square=8192,
    moves=256, repeats=10,
)  # fmt: skip
TOY = Sizes(
    device="cpu", layers=1, hidden=256, inner=256, heads=4, kv_heads=2, vocab=96, context=20,
    rows=(1, 2), prompt=20, far=40, copied=1 << 16, square=32, moves=4, repeats=1,
)  # fmt: skip


def fitting(sizes: Sizes, free: int) -> Sizes:
    """With as many rows as have room for their K and V in 60 % of ``free`` bytes."""
    per_row = 4 * sizes.context * sizes.layers * sizes.kv_heads * sizes.dim
    return evolve(sizes, rows=tuple(n for n in sizes.rows if n * per_row <= 0.6 * free))


@frozen
class Speed:
    """One line of the table."""

    name: str
    value: float
    unit: str
    part: float | None = None
    """Of what the device can."""


def seconds(sizes: Sizes, run: Callable[[], object]) -> float:
    """Of one run, the mean of several behind one that warms up."""
    run()
    synchronise(sizes)
    begin = time.perf_counter()
    for _ in range(sizes.repeats):
        run()
    synchronise(sizes)
    return (time.perf_counter() - begin) / sizes.repeats


def kernel_seconds(sizes: Sizes, runs: Sequence[Callable[[], object]]) -> float:
    """Of one of ``runs``, without what launching it from Python takes."""
    for run in runs:
        run()
    if sizes.device != "cuda":
        return seconds(sizes, runs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return seconds(sizes, graph.replay) / len(runs)


def turns(sizes: Sizes, num_bytes: int) -> range:
    """As many as read ``TRAFFIC`` together, each so many bytes."""
    return range(min(16, -(-TRAFFIC // num_bytes)) if sizes.device == "cuda" else 1)


def synchronise(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


def random_matrix(name: str, rows: int, cols: int) -> np.ndarray:
    """A few random rows, repeated: no speed depends on their values."""
    kind = gguf.GGMLQuantizationType[name]
    own = random_rows(kind, min(rows, 64), cols, np.random.default_rng(1))
    return np.resize(own, (rows, own.shape[1]))
