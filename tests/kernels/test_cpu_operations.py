"""Norm, rope, activations, low-rank changes and the choice of tokens, against the reference."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from harness.kernel_calls import Kernels, kernels
from harness.native import isas
from kvtrio.kernels import cpu_abi as abi
from kvtrio.kernels import reference, sampling
from kvtrio.kernels.reference_adapters import LowRankMatrix, OutputPart, add_low_rank

RNG = np.random.default_rng(5)


@pytest.fixture(params=isas())
def native(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    with kernels(request.param, num_threads=2) as found:
        yield found


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values)


# ---- norm, rope, activations


@pytest.mark.parametrize("size", [1, 15, 64, 100, 576, 640, 4096])
def test_norm_is_the_references(native: Kernels, size: int) -> None:
    """Sizes with and without a rest behind whole vectors."""
    x, weight = 3 * normal(5, size), normal(size)
    expected = reference.rms_norm(tensor(x), tensor(weight), 1e-5, torch.float32)
    np.testing.assert_allclose(native.rms_norm(x, weight, 1e-5), expected, rtol=2e-6, atol=1e-7)


def test_norm_of_zeros_is_zero(native: Kernels) -> None:
    """The epsilon keeps a row of zeros from becoming NaN."""
    out = native.rms_norm(np.zeros((1, 64), np.float32), np.ones(64, np.float32), 1e-6)
    assert not out.any()


def test_rope_angles_are_computed_in_double(native: Kernels) -> None:
    """At position 131,071 cos and sin still have all digits that a float has."""
    factors = 1 + RNG.random(32, dtype=np.float32)
    positions = np.array([0, 1, 4095, 131071])
    rope = abi.Rope(base=500000.0, scale=0.25, magnitude=1.2, num_rotated=64, factors=-1)
    cos, sin = native.rope_angles(rope, factors, positions)
    angles = reference.rope_angles(tensor(positions), 64, 500000.0, 0.25, tensor(factors))
    np.testing.assert_allclose(cos, (angles.cos() * 1.2).float(), atol=1.2e-7, rtol=0)
    np.testing.assert_allclose(sin, (angles.sin() * 1.2).float(), atol=1.2e-7, rtol=0)


@pytest.mark.parametrize("style", list(abi.RopePairs))
@pytest.mark.parametrize(("head_dim", "num_rotated"), [(64, 64), (80, 32), (6, 2)])
def test_rope_rotates_pairs(
    native: Kernels, style: abi.RopePairs, head_dim: int, num_rotated: int
) -> None:
    """Both styles; what lies behind the rotated part of a head stays."""
    x, angles = normal(3, 4, head_dim), normal(3, num_rotated // 2)
    cos, sin = np.cos(angles), np.sin(angles)
    adjacent = style is abi.RopePairs.NORM
    expected = reference.rope(tensor(x), tensor(cos), tensor(sin), adjacent)
    np.testing.assert_allclose(native.rope(x, cos, sin, style), expected, atol=5e-7, rtol=0)


@pytest.mark.parametrize("activation", list(abi.Activation))
@pytest.mark.parametrize("count", [1, 17, 1536])
def test_gates_are_the_references(native: Kernels, activation: abi.Activation, count: int) -> None:
    """All activations, far out as well, where they are 0, the identity or a constant."""
    gate = np.concatenate([normal(count) * 4, np.array([0, -100, 100, -20, 20], np.float32)])
    up = normal(count + 5)
    if activation is abi.Activation.CLAMPED:
        expected = reference.gated_clamped(tensor(gate), tensor(4 * up))
        up = 4 * up
    else:
        is_gelu = activation is abi.Activation.GELU_TANH
        expected = reference.gated(tensor(gate), tensor(up), is_gelu)
    found = native.gated(gate, up, activation)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


def test_softcap_is_the_references(native: Kernels) -> None:
    """Small values nearly stay, large ones end at the cap."""
    x = np.concatenate([normal(37) * 20, np.array([1e6, -1e6, 0, 1e-3], np.float32)])
    expected = reference.softcap(tensor(x), 30.0)
    np.testing.assert_allclose(native.softcap(x, 30.0), expected, rtol=1e-6, atol=4e-6)


# ---- low-rank changes


def change(rows: int, cols: int, rank: int) -> tuple[np.ndarray, np.ndarray, float, float]:
    return normal(rank, cols), normal(rows, rank), 0.5, 1.5


@pytest.mark.parametrize(
    ("num_rows", "rows", "cols", "rank"),
    [(1, 64, 96, 8), (7, 100, 75, 3), (40, 300, 33, 17), (1, 1, 1, 1)],
)
def test_low_rank_changes_are_the_references(
    native: Kernels, num_rows: int, rows: int, cols: int, rank: int
) -> None:
    """Several adapters in order, with sizes that fill no vector and no panel."""
    x, out = normal(num_rows, cols), normal(num_rows, rows)
    parts = [change(rows, cols, rank), change(rows, cols, rank + 4)]
    expected = tensor(out.copy())
    for a, b, scaling, scale in parts:
        factors = torch.full((len(a),), scaling)
        matrix = LowRankMatrix(tensor(a), factors, (OutputPart(tensor(b), 0, 0),))
        add_low_rank(expected, tensor(x), matrix, scale)
    np.testing.assert_allclose(native.low_rank(parts, x, out), expected, rtol=1e-4, atol=1e-4)


def test_a_rows_change_does_not_depend_on_others(native: Kernels) -> None:
    """One row has the same bits alone and among others."""
    x, out = normal(37, 50), normal(37, 70)
    parts = [change(70, 50, 9), change(70, 50, 4)]
    together = native.low_rank(parts, x, out)
    alone = [native.low_rank(parts, x[i : i + 1], out[i : i + 1]) for i in range(len(x))]
    np.testing.assert_array_equal(np.concatenate(alone), together)


# ---- choice of tokens


@pytest.mark.parametrize("size", [1, 31, 33, 1000, 8192, 20000])
def test_the_best_are_the_references(native: Kernels, size: int) -> None:
    """Few different values, so that nearly all tie: equals rank by id, cut or not."""
    logits = np.round(normal(4, size) * 2)
    logits[3] = 1.0
    counts = [min(size, count) for count in (1, 40, 1024, 3)]
    found = native.sample(logits, counts)
    values, ids = sampling.best(tensor(logits), torch.tensor(counts))
    for row, count in enumerate(counts):
        np.testing.assert_array_equal(found.top_ids[row, :count], ids[row, :count])
        np.testing.assert_array_equal(found.top_logits[row, :count], values[row, :count])
    np.testing.assert_array_equal(found.best, sampling.greedy(tensor(logits)))
    np.testing.assert_array_equal(found.best_logits, logits.max(-1))
    assert found.is_finite.all()


@pytest.mark.slow
def test_a_large_vocabulary_has_a_unique_order(native: Kernels) -> None:
    """All of 50,000 logits that differ, in order."""
    logits = RNG.permutation(50_000).astype(np.float32)[None]
    found = native.sample(logits, [50_000])
    np.testing.assert_array_equal(found.top_ids[0], np.argsort(-logits[0], kind="stable"))


@pytest.mark.parametrize("size", [1, 100, 20000])
def test_log_sums_are_exact(native: Kernels, size: int) -> None:
    """The log-sum-exp of logits from -1e4 to 1e4, to a millionth."""
    logits = np.stack([normal(size) * 5, normal(size) * 1e4, np.full(size, -50, np.float32)])
    found = native.sample(logits, [0, 0, 1])
    expected = torch.logsumexp(tensor(logits).double(), -1)
    np.testing.assert_allclose(found.log_sums, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 16, 8191, 8192, 8999])
def test_what_is_not_finite_is_reported(native: Kernels, value: float, place: int) -> None:
    """Wherever it is, and for its row alone."""
    logits = normal(3, 9000)
    logits[1, place] = value
    assert native.sample(logits, [5, 5, 5]).is_finite.tolist() == [1, 0, 1]


@pytest.mark.parametrize("isa", isas())
def test_the_number_of_threads_changes_nothing(isa: str) -> None:
    """Log-sums, candidates and changes have the same bits on one thread and on three."""
    logits, x, out = normal(3, 30000), normal(20, 40), normal(20, 300)
    parts = [change(300, 40, 6)]
    answers = []
    for num_threads in (1, 3):
        with kernels(isa, num_threads) as native:
            found = native.sample(logits, [7, 7, 7])
            changed = native.low_rank(parts, x, out)
        answers.append((found.log_sums.tolist(), found.top_ids.tolist(), changed.tolist()))
    assert answers[0] == answers[1]


def test_wrong_arguments_are_refused(native: Kernels) -> None:
    """More candidates than tokens, a rotation wider than a head: errors, not memory faults."""
    with pytest.raises(RuntimeError, match="num_top"):
        native.sample(normal(1, 10), [11])
    with pytest.raises(RuntimeError, match="rope_rotate"):
        native.rope(normal(1, 1, 4), normal(1, 3), normal(1, 3), abi.RopePairs.NEOX)
