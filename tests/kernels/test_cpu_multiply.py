"""Packed matrices and their products against float64, for each type and instruction set.

The expected values come from the same rounded activations, so only float32 sums differ: 1e-6 of the
sum of all magnitudes. (Groups of 32 are summed exactly.)
"""

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cpu_matrices import (
    FLOAT_TYPES,
    TYPES,
    NativeMatrix,
    multiply_many,
    random_rows,
    rounded_inputs,
    values,
)
from harness.kernel_calls import Floats, Kernels, kernels
from harness.native import isas
from kvtrio.kernels.cpu_abi import Activation

BATCHES = (1, 2, 3, 5, 7, 16, 17, 33, 64, 100)
ROWS, COLS = 90, 512  # the last panel of 32 rows is not full
TOLERANCE = 1e-6
QUANTISED = tuple(kind for kind in TYPES if kind not in FLOAT_TYPES)
EXTREMES = (0x00, 0x77, 0x88, 0xFF, 0x7F, 0x80)  # of nibbles as well as of bytes

types = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)


@pytest.fixture(params=isas())
def native(request: pytest.FixtureRequest) -> Iterator[tuple[Kernels, str]]:
    with kernels(request.param, num_threads=2) as found:
        yield found, request.param


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_matrix(
    library: Kernels, kind: Type, rows: int = ROWS, cols: int = COLS, seed: int = 0
) -> tuple[NativeMatrix, Floats]:
    source = random_rows(kind, rows, cols, rng(seed))
    return NativeMatrix.pack(library, kind, source, cols), values(kind, source)


def inputs(n: int, cols: int = COLS, seed: int = 1) -> Floats:
    return 3 * rng(seed).standard_normal((n, cols), np.float32)


def assert_product(out: Floats, x: np.ndarray, weights: Floats) -> None:
    wide = weights.astype(np.float64)
    magnitudes = np.abs(x) @ np.abs(wide).T
    assert (np.abs(out - x @ wide.T) <= TOLERANCE * magnitudes + 1e-30).all()


@types
def test_packing_loses_nothing(native: tuple[Kernels, str], kind: Type) -> None:
    """Every row comes back with the bits that gguf's own dequantisation gives."""
    matrix, weights = random_matrix(native[0], kind)
    for i, row in enumerate(weights):
        np.testing.assert_array_equal(matrix.row(i), row)


@types
def test_products_are_exact_but_for_float_sums(native: tuple[Kernels, str], kind: Type) -> None:
    """One row, a few and many."""
    library, isa = native
    matrix, weights = random_matrix(library, kind)
    for n in (1, 4, 40):
        x = inputs(n)
        assert_product(matrix.multiply(x), rounded_inputs(kind, isa, x), weights)


@types
def test_a_row_has_the_same_bits_in_any_batch(native: tuple[Kernels, str], kind: Type) -> None:
    """Whatever stands beside it."""
    matrix, _ = random_matrix(native[0], kind)
    x = inputs(max(BATCHES))
    whole = matrix.multiply(x)
    for n in BATCHES:
        np.testing.assert_array_equal(matrix.multiply(x[:n]), whole[:n])
    np.testing.assert_array_equal(matrix.multiply(x[37:40]), whole[37:40])


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("quants", EXTREMES)
def test_the_largest_numbers_fit(native: tuple[Kernels, str], kind: Type, quants: int) -> None:
    """All quants at an end of their range and activations of 127 or -127: no sum overflows."""
    library, isa = native
    source = random_rows(kind, 32, COLS, rng(), quants)
    matrix, weights = NativeMatrix.pack(library, kind, source, COLS), values(kind, source)
    for size in (2, -2):
        x = np.full((3, COLS), size, np.float32)
        assert_product(matrix.multiply(x), rounded_inputs(kind, isa, x), weights)


@types
def test_bias_and_accumulation(native: tuple[Kernels, str], kind: Type) -> None:
    """Product, plus bias, plus what was there, in this order; nothing else changes."""
    matrix, _ = random_matrix(native[0], kind)
    x, bias = inputs(9), rng(2).standard_normal(ROWS, np.float32)
    old = rng(3).standard_normal((9, ROWS), np.float32)
    plain = matrix.multiply(x)
    np.testing.assert_array_equal(matrix.multiply(x, bias), plain + bias)
    np.testing.assert_array_equal(matrix.multiply(x, onto=old), plain + old)
    np.testing.assert_array_equal(matrix.multiply(x, bias, old), (plain + bias) + old)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("kinds", [(Type.Q4_1, Type.Q4_1), (Type.Q6_K, Type.Q8_0)])
def test_gates(
    native: tuple[Kernels, str], kinds: tuple[Type, Type], activation: Activation
) -> None:
    """act(gate) * up in any batch; the two matrices may have different types."""
    up, _ = random_matrix(native[0], kinds[0])
    gate, _ = random_matrix(native[0], kinds[1], seed=5)
    x = inputs(40) / 10
    out = up.gated(x, gate, activation)
    g, u = (each.multiply(x).astype(np.float64) for each in (gate, up))
    if activation is Activation.CLAMPED:
        g, u = np.minimum(g, 7), np.clip(u, -7, 7) + 1
    inner = {
        Activation.SILU: g,
        Activation.GELU_TANH: 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3),
        Activation.CLAMPED: 1.702 * g,
    }[activation]
    np.testing.assert_allclose(out, g / (1 + np.exp(-inner)) * u, rtol=1e-5, atol=1e-7)
    for n in (1, 5, 17):
        np.testing.assert_array_equal(up.gated(x[:n], gate, activation), out[:n])


@pytest.mark.parametrize("n", [1, 4, 20, 1000])
def test_products_of_one_stage(native: tuple[Kernels, str], n: int) -> None:
    """Matrices of different sizes and types give what each gives alone."""
    kinds, sizes = (Type.Q4_1, Type.Q5_0, Type.F16), (200, 33, 64)
    matrices = [
        random_matrix(native[0], kind, rows)[0] for kind, rows in zip(kinds, sizes, strict=True)
    ]
    x = inputs(n)
    for matrix, out in zip(matrices, multiply_many(matrices, x), strict=True):
        np.testing.assert_array_equal(out, matrix.multiply(x))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("n", [1, 50])
def test_any_number_of_threads_gives_the_same_bits(isa: str, n: int) -> None:
    """Fewer panels than threads, too."""
    outs = []
    for num_threads in (1, 2, 5):
        with kernels(isa, num_threads) as library:
            outs.append(random_matrix(library, Type.Q4_K)[0].multiply(inputs(n)))
    np.testing.assert_array_equal(outs[1], outs[0])
    np.testing.assert_array_equal(outs[2], outs[0])


@pytest.mark.parametrize("isa", isas())
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_shape(isa: str, data: st.DataObject) -> None:
    """Rows and batches of any size; inputs of any size for float types."""
    kind = data.draw(st.sampled_from([Type.Q4_0, Type.Q8_0, Type.F16, Type.BF16, Type.F32]))
    unit = 1 if kind in FLOAT_TYPES else 32
    cols = unit * data.draw(st.integers(1, 70 if unit == 1 else 9))
    rows, n = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 30))
    with kernels(isa) as library:
        matrix, weights = random_matrix(library, kind, rows, cols)
        x = inputs(n, cols)
        assert_product(matrix.multiply(x), rounded_inputs(kind, isa, x), weights)


@types
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_show(
    native: tuple[Kernels, str], kind: Type, bad: float
) -> None:
    """In all results of their row, and in no other row's."""
    matrix, _ = random_matrix(native[0], kind)
    x = inputs(8)
    expected = matrix.multiply(x)
    x[3, 70] = bad
    out = matrix.multiply(x)
    assert not np.isfinite(out[3]).any()
    np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(expected, 3, 0))


@types
def test_zeros_and_tiny_inputs(native: tuple[Kernels, str], kind: Type) -> None:
    """Zeros give zeros; numbers so small that their scale would vanish give nearly nothing."""
    matrix, _ = random_matrix(native[0], kind)
    x = np.stack([np.zeros(COLS), np.full(COLS, 1e-40), np.full(COLS, -1e-37)]).astype(np.float32)
    out = matrix.multiply(x)
    assert not out[0].any()
    assert (np.abs(out) < 1e-30).all()


@pytest.mark.parametrize("isa", isas())
def test_what_cannot_be_packed(isa: str) -> None:
    """Codebook types, and rows that are no whole number of blocks."""
    with kernels(isa) as library:
        packed_bytes = library.cdll.kvt_packed_bytes
        assert packed_bytes(Type.IQ2_XS.value, 32, 512) < 0
        assert packed_bytes(Type.Q4_K.value, 32, 288) < 0
        assert packed_bytes(Type.Q4_0.value, 32, 33) < 0
        assert packed_bytes(Type.Q4_0.value, 0, 32) < 0


@pytest.mark.parametrize("isa", isas())
@types
def test_packed_matrices_are_hardly_larger(isa: str, kind: Type) -> None:
    """At most 5 % above the file: decode reads all of it for every token."""
    with kernels(isa) as library:
        rows = random_rows(kind, 640, 2048, rng())
        assert library.cdll.kvt_packed_bytes(kind.value, 640, 2048) <= 1.05 * rows.size
