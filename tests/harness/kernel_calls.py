"""Single operations of the compiled kernels as functions over numpy arrays."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from harness.native import library
from kvtrio.kernels import cpu_abi as abi
from kvtrio.kernels import cpu_single

Floats = NDArray[np.float32]


@frozen
class Answers:
    """What a step reports about M sampled rows; ``top_*`` [M, widest]."""

    best: NDArray[np.int32]
    best_logits: Floats
    log_sums: NDArray[np.float64]
    is_finite: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logits: Floats


@frozen(eq=False)
class Kernels:
    """One library with a team of threads."""

    cdll: ctypes.CDLL
    team: ctypes.c_void_p

    def call(self, name: str, *arguments: Any) -> int:
        """Arrays go by their address. Raises RuntimeError for an error of the library."""
        plain = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
        return abi.check(self.cdll, getattr(self.cdll, name)(*plain))

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        out = np.empty_like(x)
        self.call("kvt_rms_norm", x, weight, eps, *x.shape, out)
        return out

    def rope_angles(
        self, rope: abi.Rope, factors: Floats | None, positions: NDArray[np.int64]
    ) -> tuple[Floats, Floats]:
        """cos and sin."""
        shape = (len(positions), rope.num_rotated // 2)
        cos, sin = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.call("kvt_rope_angles", rope, factors, positions, len(positions), cos, sin)
        return cos, sin

    def rope(self, x: Floats, cos: Floats, sin: Floats, style: abi.RopePairs) -> Floats:
        """x [N, heads, head_dim]."""
        out = x.copy()
        self.call("kvt_rope_rotate", out, *x.shape, cos, sin, 2 * cos.shape[1], int(style))
        return out

    def gated(self, gate: Floats, up: Floats, activation: abi.Activation) -> Floats:
        out = np.empty_like(gate)
        self.call("kvt_gated", gate, up, gate.size, int(activation), out)
        return out

    def softcap(self, x: Floats, cap: float) -> Floats:
        out = x.copy()
        self.call("kvt_softcap", out, x.size, cap)
        return out

    def sample(self, logits: Floats, counts: Sequence[int]) -> Answers:
        """The ``counts[i]`` best of row i, and all else that a step reports."""
        num_rows, width = len(logits), max(counts)
        answers = Answers(
            best=np.zeros(num_rows, np.int32),
            best_logits=np.zeros(num_rows, np.float32),
            log_sums=np.zeros(num_rows),
            is_finite=np.zeros(num_rows, np.int32),
            top_ids=np.full((num_rows, width), -1, np.int32),
            top_logits=np.zeros((num_rows, width), np.float32),
        )
        samples = (abi.Sample * num_rows)(*((count, abi.WANT_LOG_SUM) for count in counts))
        step = abi.Step(num_sampled=num_rows, top_stride=width)
        step.samples = ctypes.addressof(samples)
        for name in ("best", "best_logits", "log_sums", "is_finite", "top_ids", "top_logits"):
            setattr(step, name, getattr(answers, name).ctypes.data)
        self.call("kvt_sample_rows", self.team, logits, logits.shape[1], step)
        return answers

    def low_rank(
        self, parts: Sequence[tuple[Floats, Floats, float, float]], x: Floats, out: Floats
    ) -> Floats:
        """``out`` with the changes (a [R, I], b [O, R], scaling, scale) of x [N, I] added."""
        changes = (abi.LowRank * len(parts))(
            *(
                abi.LowRank(a=a.ctypes.data, b=b.ctypes.data, rank=len(a), scaling=scaling)
                for a, b, scaling, _ in parts
            )
        )
        scales = np.array([scale for *_, scale in parts], np.float32)
        changed = out.copy()
        sizes = (*x.shape, out.shape[1], changed)
        self.call("kvt_low_rank_add", self.team, changes, scales, len(parts), x, *sizes)
        return changed


@contextmanager
def kernels(isa: str, num_threads: int = 1) -> Iterator[Kernels]:
    """The kernels of an instruction set; skips (in CI: fails) where they are not built."""
    cdll = library(isa).cdll
    abi.declare(cdll)
    cpu_single.declare(cdll)
    team = ctypes.c_void_p()
    abi.check(cdll, cdll.kvt_team_new(num_threads, ctypes.byref(team)))
    try:
        yield Kernels(cdll, team)
    finally:
        cdll.kvt_team_free(team)
