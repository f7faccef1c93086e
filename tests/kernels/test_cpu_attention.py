"""The compiled cache and attention against a float64 model, for each instruction set.

Tolerances: f32 arithmetic loses 1e-6 of what comes out, as the root of mean squares; where pairs of
bf16 are multiplied (AVX-512, all types but F32), q, k, v and the weights lose up to 2^-9 each,
0.6 % together at scores with a spread of 3. Against numbers that were never stored the loss of the
type is added.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve, frozen

from harness.cpu_attention import (
    Floats,
    KvType,
    NativeCache,
    Rows,
    Scoring,
    Shape,
    naive,
    rotate,
    stored,
)
from harness.kernel_calls import Kernels, kernels
from harness.native import isas

NUM_TOKENS = 1100  # three splits of 512, and a part of a tile
TYPES = list(KvType)


@pytest.fixture(params=isas())
def native(request: pytest.FixtureRequest) -> Iterator[tuple[Kernels, str]]:
    with kernels(request.param, num_threads=2) as found:
        yield found, request.param


@frozen(eq=False)
class Conversation:
    cache: NativeCache
    blocks: np.ndarray
    q: Floats
    k: Floats
    v: Floats

    def attend(self, borders: list[int], scoring: Scoring) -> Floats:
        """Rows from the first border to the last, in one call with a chunk between any two."""
        rows = [Rows(first, end, self.blocks) for first, end in pairwise(borders)]
        return self.cache.attend(self.q[borders[0] : borders[-1]], rows, scoring)


def conversation(
    library: Kernels, shape: Shape, num_tokens: int = NUM_TOKENS, seed: int = 0
) -> Conversation:
    """Random numbers in blocks that lie anywhere."""
    rng = np.random.default_rng(seed)
    num_blocks = -(-num_tokens // shape.block_size)
    cache = NativeCache(library, shape, num_blocks + 2)
    blocks = rng.permutation(num_blocks + 2)[:num_blocks].astype(np.int32)

    def normal(heads: int, dim: int) -> Floats:
        return rng.standard_normal((num_tokens, heads, dim), dtype=np.float32)

    q, k = normal(shape.heads, shape.head_dim), normal(shape.kv_heads, shape.head_dim)
    v = normal(shape.kv_heads, shape.value_dim)
    cache.write(blocks, k, v)
    return Conversation(cache, blocks, q, k, v)


def loss(found: Floats, expected: np.ndarray) -> float:
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


# DeepSeek's own sizes, and some that fill no vector and whose values alone would be rotated by 4.
LATENT = [
    Shape(heads=16, kv_heads=1, head_dim=576, value_dim=512, is_latent=True),
    Shape(heads=3, kv_heads=1, head_dim=42, value_dim=20, is_latent=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", LATENT, ids=lambda shape: str(shape.head_dim))
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_values_are_the_beginnings_of_keys(native, kind, shape):
    """Of a latent cache, which has no values besides: in any chunks, the same bits."""
    library, isa = native
    shape = evolve(shape, key_type=kind, value_type=kind)
    talk = conversation(library, shape, 600)
    assert not talk.cache.values.size
    scoring = Scoring(scale=0.03)
    out = talk.attend([560, 600], scoring)
    np.testing.assert_array_equal(talk.attend([560, 561, 573, 600], scoring), out)
    k = stored(kind, talk.k)
    expected = naive(talk.q[560:], k, k[..., : shape.value_dim], np.arange(560, 600), scoring)
    assert loss(out, expected) < allowed(isa, shape)


def allowed(isa: str, shape: Shape) -> float:
    is_pairs = isa == "avx512" and {shape.key_type, shape.value_type} != {KvType.F32}
    return 6e-3 if is_pairs else 3e-6


SHAPES = {
    "small llama": Shape(),
    "gemma": Shape(heads=4, kv_heads=1, head_dim=256, value_dim=256, block_size=32),
    "no groups": Shape(heads=5, kv_heads=5, head_dim=36, value_dim=50),
    "values differ": Shape(heads=8, kv_heads=2, head_dim=80, value_dim=48),
    "tiny": Shape(heads=1, kv_heads=1, head_dim=2, value_dim=6),
    "large group": Shape(heads=20, kv_heads=1, head_dim=128, value_dim=96, block_size=64),
    "odd thirds": Shape(heads=7, kv_heads=7, head_dim=96, value_dim=112),
    "short heads": Shape(heads=6, kv_heads=2, head_dim=16, value_dim=32),
}
SCORINGS = {
    "plain": Scoring(),
    "window": Scoring(window=70),
    "wide window": Scoring(window=600),
    "capped": Scoring(scale=0.4, softcap=2.0),
    "sinks": Scoring(sinks=np.linspace(-2, 6, 20, dtype=np.float32)),
    "all": Scoring(scale=0.4, softcap=30.0, window=513, sinks=np.full(20, 3, dtype=np.float32)),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_type_and_shape_is_the_models(
    native: tuple[Kernels, str], shape: Shape, kind: KvType
) -> None:
    """The whole prompt as one chunk gives the softmax over what the cache has stored."""
    library, isa = native
    shape = evolve(shape, key_type=kind, value_type=kind)
    known = conversation(library, shape, 150)
    scoring = Scoring(scale=shape.head_dim**-0.5)
    out = known.attend([0, 150], scoring)
    k, v = stored(kind, known.k), stored(kind, known.v)
    expected = naive(known.q, k, v, np.arange(150), scoring)
    assert loss(out, expected) <= allowed(isa, shape)


@pytest.mark.parametrize("kinds", [(KvType.F32, KvType.Q4_0), (KvType.Q8_0, KvType.F16)])
def test_keys_and_values_may_differ_in_type(
    native: tuple[Kernels, str], kinds: tuple[KvType, KvType]
) -> None:
    """Only what is quantised is rotated, and each product has the arithmetic of its type."""
    library, isa = native
    shape = Shape(key_type=kinds[0], value_type=kinds[1])
    known = conversation(library, shape, 200)
    k, v = stored(kinds[0], known.k), stored(kinds[1], known.v)
    expected = naive(known.q, k, v, np.arange(200), Scoring())
    assert loss(known.attend([0, 200], Scoring()), expected) <= allowed(isa, shape)


@pytest.mark.parametrize("kind", [KvType.F32, KvType.F16])
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_every_scoring_is_the_models(
    native: tuple[Kernels, str], scoring: Scoring, kind: KvType
) -> None:
    """Windows, caps and sinks, at positions within and behind the first split."""
    library, isa = native
    shape = Shape(key_type=kind, value_type=kind)
    if scoring.sinks is not None:
        scoring = evolve(scoring, sinks=scoring.sinks[: shape.heads].copy())
    known = conversation(library, shape)
    k, v = stored(kind, known.k), stored(kind, known.v)
    for start, end in ((0, 30), (500, 530), (1075, NUM_TOKENS)):
        out = known.attend([start, end], scoring)
        expected = naive(known.q[start:end], k, v, np.arange(start, end), scoring)
        assert loss(out, expected) <= allowed(isa, shape)


@pytest.mark.parametrize(
    ("kind", "most"), [(KvType.F16, 6e-3), (KvType.Q8_0, 0.01), (KvType.Q4_0, 0.13)]
)
def test_types_lose_no_more_than_stated(
    native: tuple[Kernels, str], kind: KvType, most: float
) -> None:
    """Against k and v as they came: the price of a type."""
    known = conversation(native[0], Shape(key_type=kind, value_type=kind), 300)
    scoring = Scoring(scale=0.125)
    expected = naive(known.q, known.k, known.v, np.arange(300), scoring)
    assert loss(known.attend([0, 300], scoring), expected) <= most


def test_rotation_spreads_an_outlier(native: tuple[Kernels, str]) -> None:
    """One huge dimension of k, as models have them, costs Q4_0 little of the others."""
    rng = np.random.default_rng(1)
    library, _ = native
    shape = Shape(heads=1, kv_heads=1, key_type=KvType.Q4_0, value_type=KvType.F32)
    cache = NativeCache(library, shape, 13)
    q, k, v = (rng.standard_normal((200, 1, 64), dtype=np.float32) for _ in range(3))
    q[..., 7], k[..., 7] = 0, 40
    blocks = np.arange(13, dtype=np.int32)
    cache.write(blocks, k, v)
    out = cache.attend(q, [Rows(0, 200, blocks)], Scoring(scale=0.05))
    expected = naive(q, k, v, np.arange(200), Scoring(scale=0.05))
    assert loss(out, expected) <= 0.1
    np.testing.assert_allclose(rotate(rotate(k)), k, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("scoring", [SCORINGS["plain"], SCORINGS["all"]], ids=["plain", "all"])
def test_bits_do_not_depend_on_chunks(
    native: tuple[Kernels, str], kind: KvType, scoring: Scoring
) -> None:
    """Chunks of 1, 7 and 64 rows, and mixed ones in one call, are the whole prompt bit for bit."""
    shape = Shape(key_type=kind, value_type=kind)
    if scoring.sinks is not None:
        scoring = evolve(scoring, sinks=scoring.sinks[: shape.heads].copy())
    known = conversation(native[0], shape)
    whole = known.attend([0, NUM_TOKENS], scoring)
    mixed = [0, 1, 2, 65, 100, 511, 512, 513, 520, 900, 1023, 1024, 1090, 1099, NUM_TOKENS]
    assert np.array_equal(known.attend(mixed, scoring), whole)
    for size in (1, 7, 64):
        for first in (0, 490, 1030):
            for start in range(first, first + max(40, size), size):
                end = min(start + size, NUM_TOKENS)
                assert np.array_equal(known.attend([start, end], scoring), whole[start:end])


def test_bits_do_not_depend_on_company(native: tuple[Kernels, str]) -> None:
    """Single rows and chunks of several conversations in one call are what they are alone."""
    library, shape = native[0], Shape(heads=4, kv_heads=1)
    lengths = (5, 130, 700, 1100)
    cache = NativeCache(library, shape, 200)
    rng = np.random.default_rng(2)
    free = rng.permutation(200).astype(np.int32)
    alone, q, rows = [], [], []
    for length, num_rows in zip(lengths, (5, 1, 300, 1), strict=True):
        blocks, free = np.split(free, [-(-length // shape.block_size)])
        k, v = (rng.standard_normal((length, 1, 64), dtype=np.float32) for _ in range(2))
        cache.write(blocks, k, v)
        q.append(rng.standard_normal((num_rows, 4, 64), dtype=np.float32))
        rows.append(Rows(length - num_rows, length, blocks))
        alone.append(cache.attend(q[-1], [rows[-1]], Scoring()))
    together = cache.attend(np.concatenate(q), rows, Scoring())
    assert np.array_equal(together, np.concatenate(alone))


@pytest.mark.slow
def test_bits_do_not_depend_on_threads() -> None:
    """One thread, two and five give the same, whoever computes which split."""
    for isa in isas():
        results = []
        for num_threads in (1, 2, 5):
            with kernels(isa, num_threads) as library:
                known = conversation(library, Shape())
                results.append(known.attend([0, 400, 1098, 1099, NUM_TOKENS], Scoring()))
        assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32])
def test_copies_hold_the_first_places(
    native: tuple[Kernels, str], kind: KvType, num_tokens: int
) -> None:
    """A copied part of a block is read like the block itself, and can be written on."""
    shape = Shape(key_type=kind, value_type=kind, block_size=32)
    known = conversation(native[0], shape, 32)
    used, target = int(known.blocks[0]), int(min(set(range(3)) - set(known.blocks.tolist())))
    known.cache.copy(used, target, num_tokens)
    copied = Rows(0, num_tokens, np.array([target], np.int32))
    out = known.cache.attend(known.q[:num_tokens], [copied], Scoring())
    whole = known.attend([0, 32], Scoring())
    assert np.array_equal(out, whole[:num_tokens])
    known.cache.write(copied.blocks, known.k[num_tokens:], known.v[num_tokens:], num_tokens)
    again = known.cache.attend(known.q, [Rows(0, 32, copied.blocks)], Scoring())
    assert np.array_equal(again, whole)


def test_blocks_behind_the_window_are_not_read(native: tuple[Kernels, str]) -> None:
    """Their entries may name no block."""
    known = conversation(native[0], Shape())
    scoring = Scoring(window=100)
    whole = known.attend([1000, NUM_TOKENS], scoring)
    known.blocks[: (1000 - 99) // 16] = -1
    assert np.array_equal(known.attend([1000, NUM_TOKENS], scoring), whole)


def test_huge_scores_neither_overflow_nor_lose_the_best(native: tuple[Kernels, str]) -> None:
    """With scores of thousands a row is the value of its best key."""
    known = conversation(native[0], Shape(key_type=KvType.F32, value_type=KvType.F32), 300)
    out = known.attend([0, 300], Scoring(scale=1e5))
    expected = naive(known.q, known.k, known.v, np.arange(300), Scoring(scale=1e5))
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_what_is_no_number_shows(native: tuple[Kernels, str]) -> None:
    """NaN in a row of q makes that row NaN and no other."""
    known = conversation(native[0], Shape(), 100)
    whole = known.attend([0, 100], Scoring())
    known.q[50, 4, 3] = np.nan
    out = known.attend([0, 100], Scoring())
    assert np.isnan(out[50, 4]).all()
    out[50, 4] = whole[50, 4]
    assert np.array_equal(out, whole)
