"""The compiled experts against float64, for each instruction set."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from gguf import GGMLQuantizationType as Type

from harness.cpu_matrices import SCALES, Choice, NativeStack, random_rows, rounded_inputs, values
from harness.kernel_calls import Floats, Kernels, kernels
from harness.native import isas
from kvtrio.kernels import reference, reference_experts
from kvtrio.kernels.cpu_abi import Activation, Routing, Scoring

MIXES = {
    "f32": (Type.F32, Type.F32, Type.F32),
    "bf16": (Type.BF16, Type.F16, Type.BF16),
    "k": (Type.Q4_K, Type.Q5_K, Type.Q6_K),
    "mxfp4": (Type.MXFP4, Type.Q8_0, Type.Q4_1),
}
NUM_ROWS = (1, 2, 7, 70)


@frozen(eq=False)
class Layer:
    """Stacks gate, up and down, and what they stand for."""

    stacks: tuple[NativeStack, ...]
    weights: tuple[Floats, ...]
    kinds: tuple[Type, ...]
    isa: str

    @classmethod
    def random(
        cls, kernels: Kernels, isa: str, kinds: tuple[Type, ...], shape: tuple[int, int, int]
    ) -> "Layer":
        """``shape``: experts, hidden size, size of an expert."""
        rng = np.random.default_rng(5)
        num_experts, hidden, size = shape
        stacks, weights = [], []
        for kind, (rows, cols) in zip(kinds, [(size, hidden)] * 2 + [(hidden, size)], strict=True):
            sources = [random_rows(kind, rows, cols, rng) for _ in range(num_experts)]
            stacks.append(NativeStack.pack(kernels, kind, sources, cols))
            weights.append(np.stack([values(kind, source) for source in sources]))
        return cls(tuple(stacks), tuple(weights), kinds, isa)

    def apply(self, logits: Floats, x: Floats, num_used: int, **shared: Floats) -> Floats:
        return NativeStack.apply(self.stacks, Choice(num_used=num_used), logits, x, **shared)

    def expected(self, logits: Floats, x: Floats, num_used: int) -> np.ndarray:
        """From inputs rounded as the products round them, each row by itself."""
        experts, shares = reference_experts.choose_experts(torch.from_numpy(logits), num_used)
        gate, up, down = (each.astype(np.float64) for each in self.weights)
        first, second = (rounded_inputs(kind, self.isa, x) for kind in self.kinds[:2])
        out = np.zeros((len(x), down.shape[1]))
        for row, (chosen, weights) in enumerate(zip(experts, shares, strict=True)):
            for expert, weight in zip(chosen.tolist(), weights.tolist(), strict=True):
                gates = gate[expert] @ first[row]
                hidden = gates / (1 + np.exp(-gates)) * (up[expert] @ second[row])
                rounded = rounded_inputs(self.kinds[2], self.isa, hidden[None].astype(np.float32))
                out[row] += weight * (down[expert] @ rounded[0])
        return out


@pytest.fixture(params=isas())
def native(request: pytest.FixtureRequest) -> Iterator[tuple[Kernels, str]]:
    with kernels(request.param, num_threads=3) as found:
        yield found, request.param


def ragged(num_rows: int, num_experts: int, width: int) -> tuple[Floats, Floats]:
    """Logits by which most rows use the first two experts, one row an expert of its own, and the
    last expert nobody; and inputs."""
    rng = np.random.default_rng(num_rows)
    logits = rng.standard_normal((num_rows, num_experts), np.float32)
    logits[:, :2] += 4
    logits[:, -2:] -= 50
    logits[0, -2] = 9
    return logits, rng.standard_normal((num_rows, width), np.float32)


@pytest.mark.parametrize("kinds", MIXES.values(), ids=MIXES)
def test_ragged_batches_are_the_references(native, kinds):
    """Experts with no, one and many rows, up to the rounding of what lies between the products."""
    layer = Layer.random(*native, kinds, (9, 256, 256))
    for num_rows in NUM_ROWS:
        logits, x = ragged(num_rows, 9, 256)
        out, expected = layer.apply(logits, x, 3), layer.expected(logits, x, 3)
        assert np.abs(out - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_company_changes_no_bit(native, kind):
    """A row gets the same bits alone as among others, in every type."""
    layer = Layer.random(*native, (kind,) * 3, (5, 256, 256))
    logits, x = ragged(40, 5, 256)
    out = layer.apply(logits, x, 2)
    assert np.isfinite(out).all()
    for rows in (slice(0, 1), slice(1, 2), slice(7, 14)):
        np.testing.assert_array_equal(layer.apply(logits[rows], x[rows], 2), out[rows])


def test_odd_sizes_and_all_experts(native):
    """Matrices that fill no panel; every row may use every expert."""
    layer = Layer.random(*native, (Type.F32,) * 3, (3, 41, 20))
    logits, x = ragged(11, 3, 41)
    for num_used in (1, 3):
        out, expected = layer.apply(logits, x, num_used), layer.expected(logits, x, num_used)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


def test_a_shared_expert_is_added(native):
    """What the output held counts as often as the row's factor says."""
    layer = Layer.random(*native, (Type.F32,) * 3, (3, 32, 32))
    logits, x = ragged(9, 3, 32)
    shared, factors = x[::-1].copy(), np.linspace(0, 1, 9, dtype=np.float32)
    out = layer.apply(logits, x, 2, shared=shared, factors=factors)
    expected = layer.expected(logits, x, 2) + factors[:, None] * shared
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


BIASES = tuple(
    np.random.default_rng(8).standard_normal(shape, np.float32)
    for shape in ((6, 33), (6, 33), (6, 40), (6,))
)


@pytest.mark.parametrize("activation", Activation)
def test_biases_are_each_experts_own(native, activation):
    """Added before the activation, and before the weight; activations as the reference has them."""
    layer = Layer.random(*native, (Type.F32,) * 3, (6, 40, 33))
    logits, x = ragged(20, 6, 40)
    choice = Choice(num_used=3, activation=activation, biases=(*BIASES[:3], None))
    out = NativeStack.apply(layer.stacks, choice, logits, 4 * x)
    gate, up, down, *biases = (torch.from_numpy(each) for each in (*layer.weights, *BIASES[:3]))
    expected = reference_experts.apply_experts(
        torch.from_numpy(4 * x),
        reference_experts.choose_experts(torch.from_numpy(logits), 3),
        reference_experts.Matrices(gate, up, down, tuple(biases)),
        reference.gated_clamped
        if activation is Activation.CLAMPED
        else partial(reference.gated, gelu_tanh=activation is Activation.GELU_TANH),
    )
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3)


ROUTINGS = {
    "sigmoid": reference_experts.Scores(is_sigmoid=True, normalised=True, scale=2.5),
    "softmax": reference_experts.Scores(is_sigmoid=False, normalised=False, scale=1.0),
    "groups": reference_experts.Scores(True, True, 1.5, num_groups=3, num_groups_used=2),
}


@pytest.mark.parametrize("bias", [None, BIASES[3]], ids=["", "biased"])
@pytest.mark.parametrize("scores", ROUTINGS.values(), ids=ROUTINGS)
def test_experts_are_chosen_by_their_scores(native, scores, bias):
    """As the reference does it; a bias counts for the choice alone."""
    layer = Layer.random(*native, (Type.F32,) * 3, (6, 32, 32))
    logits, x = np.random.default_rng(1).standard_normal((50, 6), np.float32), ragged(50, 6, 32)[1]
    out = NativeStack.apply(layer.stacks, choice_of(scores, bias), logits, x)
    biased = None if bias is None else torch.from_numpy(bias)
    expected = reference_experts.apply_experts(
        torch.from_numpy(x),
        reference_experts.choose_scored(torch.from_numpy(logits), biased, 2, scores),
        reference_experts.Matrices(*map(torch.from_numpy, layer.weights)),
        partial(reference.gated, gelu_tanh=False),
    )
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def choice_of(scores: reference_experts.Scores, bias: Floats | None) -> Choice:
    """Two experts of each row."""
    routing = Routing(
        scoring=Scoring.SIGMOID if scores.is_sigmoid else Scoring.SOFTMAX,
        is_normalised=scores.normalised,
        scale=scores.scale,
        num_groups=scores.num_groups,
        num_groups_used=scores.num_groups_used,
    )
    return Choice(num_used=2, routing=routing, biases=(None, None, None, bias))


def test_groups_that_do_not_fit_are_refused(native):
    """Groups have two experts at least, and those used have enough of them."""
    layer = Layer.random(*native, (Type.F32,) * 3, (6, 32, 32))
    logits, x = ragged(2, 6, 32)
    for groups, used in ((4, 1), (6, 1), (3, 0), (3, 4)):
        scores = reference_experts.Scores(True, True, 1.0, groups, used)
        with pytest.raises(RuntimeError, match="experts: groups"):
            NativeStack.apply(layer.stacks, choice_of(scores, None), logits, x)
    few = evolve(choice_of(ROUTINGS["groups"], None), num_used=5)
    with pytest.raises(RuntimeError, match="too few in the groups"):
        NativeStack.apply(layer.stacks, few, logits, x)


def test_of_equal_logits_the_first_are_chosen(native):
    """So that ties are decided alike everywhere."""
    layer = Layer.random(*native, (Type.F32,) * 3, (6, 32, 32))
    x = ragged(1, 6, 32)[1]
    logits = np.array([[1, 2, 2, 2, 0, 2]], np.float32)
    clear = np.array([[0, 2, 2, 0, 0, 0]], np.float32)
    np.testing.assert_array_equal(layer.apply(logits, x, 2), layer.apply(clear, x, 2))


def test_a_row_that_is_no_number_stays_alone(native):
    """It chooses experts all the same, and changes nothing for others."""
    layer = Layer.random(*native, (Type.Q8_0,) * 3, (4, 32, 32))
    logits, x = ragged(8, 4, 32)
    expected = layer.apply(logits, x, 2)
    logits[3], x[5] = np.nan, np.inf
    out = layer.apply(logits, x, 2)
    rest = [0, 1, 2, 4, 6, 7]
    np.testing.assert_array_equal(out[rest], expected[rest])
    assert not np.isfinite(out[[3, 5]]).any()


def test_stacks_that_do_not_fit_are_refused(native):
    """Before anything is computed."""
    layer = Layer.random(*native, (Type.F32,) * 3, (4, 32, 32))
    logits, x = ragged(2, 4, 32)
    for num_used in (0, 5):
        with pytest.raises(RuntimeError, match="experts: num_used"):
            layer.apply(logits, x, num_used)
    layer.stacks[1].struct.stack = 3
    with pytest.raises(RuntimeError, match="another number of bytes"):
        layer.apply(logits, x, 2)
