"""The compiled recurrent layers against the reference, for each instruction set."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from attrs import evolve

from harness.cpu_recurrent import NativeLayer, Run, random_vectors, reference, row_size
from harness.kernel_calls import Floats, Kernels, kernels
from harness.native import isas
from kvtrio.backends.cpu_recurrent import sizes
from kvtrio.model.spec import ConvSpec, DeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec

CLOSE = {"rtol": 0.0, "atol": 1e-4}
"""Outputs are normed, so that they are about 1."""


@pytest.fixture(params=isas())
def native(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    with kernels(request.param, num_threads=2) as found:
        yield found


def delta_net(groups: int, heads: int, key: int, value: int, **flags: bool) -> DeltaNetSpec:
    return DeltaNetSpec(
        conv=ConvSpec(width=4, channels=2 * groups * key + heads * value),
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=key,
        value_dim=value,
        **({"tiled_heads": False, "fused_gates": False} | flags),
    )


def mamba2(groups: int, heads: int, state: int, head: int, width: int = 4) -> Mamba2Spec:
    return Mamba2Spec(
        conv=ConvSpec(width=width, channels=heads * head + 2 * groups * state),
        num_heads=heads,
        head_dim=head,
        num_groups=groups,
        state_size=state,
    )


LAYERS: dict[str, RecurrentSpec] = {
    "delta": delta_net(2, 2, 32, 48),
    "shared keys": delta_net(2, 6, 16, 20, tiled_heads=True),
    "fused gates": delta_net(3, 6, 6, 5, fused_gates=True),
    "wide delta": delta_net(1, 2, 128, 128),
    "space": mamba2(1, 12, 24, 16),
    "groups": mamba2(2, 4, 7, 6, width=2),
    "wide space": mamba2(1, 3, 128, 64),
    "conv": ShortConvSpec(conv=ConvSpec(width=3, channels=300)),
    "wide conv": ShortConvSpec(conv=ConvSpec(width=9, channels=17)),
}


def make(native: Kernels, spec: RecurrentSpec, num_rows: Sequence[int]) -> tuple[
    NativeLayer, list[Floats], list[Floats]
]:  # fmt: skip
    """A layer, and per request its rows and what the reference makes of them."""
    rng = np.random.default_rng(11)
    vectors = random_vectors(spec, rng)
    rows = [rng.standard_normal((count, row_size(spec)), dtype=np.float32) for count in num_rows]
    layer = NativeLayer(native, spec, vectors, len(num_rows) + 2)
    return layer, rows, [reference(spec, vectors, each) for each in rows]


@pytest.mark.parametrize("spec", LAYERS.values(), ids=LAYERS)
def test_ragged_batches_are_the_references(native: Kernels, spec: RecurrentSpec) -> None:
    """Requests that begin, go on by long or short chunks and by single rows, all in one step."""
    lengths = [200, 131, 70, 3, 1]
    layer, rows, expected = make(native, spec, lengths)
    starts = [0] * len(lengths)
    for counts in ([150, 64, 1, 2, 1], [49, 1, 68, 0, 0], [1, 66, 1, 1, 0]):
        active = [i for i, count in enumerate(counts) if count]
        runs = [Run(starts[i], counts[i], i) for i in reversed(active)]
        joined = [rows[run.slot][run.start : run.start + run.num_rows] for run in runs]
        out = layer.mix(np.concatenate(joined), runs)
        ends = np.cumsum([run.num_rows for run in runs])[:-1]
        for run, part in zip(runs, np.split(out, ends), strict=True):
            wanted = expected[run.slot][run.start : run.start + run.num_rows]
            np.testing.assert_allclose(part, wanted, **CLOSE)
            starts[run.slot] += run.num_rows
    assert starts == lengths


@pytest.mark.parametrize("spec", LAYERS.values(), ids=LAYERS)
def test_company_changes_no_bit(native: Kernels, spec: RecurrentSpec) -> None:
    """A chunk has the same bits alone and beside others, and leaves the same state."""
    layer, rows, _ = make(native, spec, [90, 5, 1, 1, 1, 70])
    alone = []
    for i, own in enumerate(rows):
        alone.append(layer.mix(own, [Run(0, len(own), i)]))
    states = layer.states[:6].copy()
    layer.states[:] = np.nan
    together = layer.mix(np.concatenate(rows), [Run(0, len(own), i) for i, own in enumerate(rows)])
    np.testing.assert_array_equal(together, np.concatenate(alone))
    np.testing.assert_array_equal(layer.states[:6], states)


@pytest.mark.parametrize("spec", LAYERS.values(), ids=LAYERS)
def test_borders_at_whole_pieces_change_no_bit(native: Kernels, spec: RecurrentSpec) -> None:
    """Who goes on from a multiple of 64 computes the very pieces of who went through; and a chunk's
    end changes nothing in its rows."""
    layer, (rows, *_), _ = make(native, spec, [200, 1])
    whole = layer.mix(rows, [Run(0, 200, 0)])
    state = layer.states[0].copy()
    first, rest = layer.mix(rows[:128], [Run(0, 128, 0)]), layer.mix(rows[128:], [Run(128, 72, 0)])
    np.testing.assert_array_equal(np.concatenate((first, rest)), whole)
    np.testing.assert_array_equal(layer.states[0], state)
    np.testing.assert_array_equal(layer.mix(rows[:150], [Run(0, 150, 1)]), whole[:150])


@pytest.mark.parametrize("isa", isas())
def test_the_number_of_threads_changes_nothing(isa: str) -> None:
    """Heads are shared out otherwise, and have the same bits."""
    answers = []
    for num_threads in (1, 3):
        with kernels(isa, num_threads) as native:
            layer, (rows, *_), _ = make(native, LAYERS["space"], [100, 1])
            answers.append(layer.mix(rows, [Run(0, 100, 0)]))
    np.testing.assert_array_equal(answers[0], answers[1])


@pytest.mark.parametrize("name", ["delta", "space"])
def test_heads_that_forget_at_once_give_numbers(native: Kernels, name: str) -> None:
    """A decay to nothing within a row leaves zeros behind, not the ratio of two of them."""
    spec, rng = LAYERS[name], np.random.default_rng(3)
    vectors = random_vectors(spec, rng)
    vectors = evolve(vectors, decay=np.full_like(vectors.decay, -1e4))
    rows = rng.standard_normal((80, row_size(spec)), dtype=np.float32)
    out = NativeLayer(native, spec, vectors, 1).mix(rows, [Run(0, 80, 0)])
    np.testing.assert_allclose(out, reference(spec, vectors, rows), **CLOSE)


def test_what_cannot_be_is_refused(native: Kernels) -> None:
    """Channels that do not fit the heads, slots that do not exist: errors, not memory faults."""
    layer, (rows, *_), _ = make(native, LAYERS["delta"], [4, 1])
    with pytest.raises(RuntimeError, match="slot"):
        layer.mix(rows, [Run(0, 4, 4)])
    wrong = sizes(LAYERS["delta"])
    wrong.channels += 1
    with pytest.raises(RuntimeError, match="channels"):
        native.call("kvt_state_values", wrong)
