"""Experts in Triton against the reference, in the interpreter."""

import gguf
import numpy as np
import pytest
import torch

from harness.cpu_matrices import random_rows, values
from kvtrio.kernels import reference, reference_experts
from kvtrio.kernels.triton_experts import Experts, Stack, apply_experts, grouped
from kvtrio.kernels.triton_pack import KINDS, pack
from kvtrio.kernels.triton_rows import Act

pytestmark = pytest.mark.slow  # each program of a grid runs in Python

NUM, USED = 4, 2


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices(name: str | None, rows: int, cols: int, seed: int) -> tuple[object, torch.Tensor]:
    """A stack as the kernels take it, and its values [experts, rows, cols]."""
    if name is None:
        plain = random(NUM, rows, cols, seed=seed) / cols**0.5
        return plain.flatten(0, 1), plain
    kind = gguf.GGMLQuantizationType[name]
    raw = random_rows(kind, NUM * rows, cols, np.random.default_rng(seed))
    packed = pack(name, torch.from_numpy(raw), cols)
    return packed, torch.from_numpy(values(kind, raw)).view(NUM, rows, cols)


def choice(num_rows: int, seed: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    return reference_experts.choose_experts(random(num_rows, NUM, seed=seed), USED)


def check(name: str | None, sizes: tuple[int, int, int], act: Act, has_bias: bool) -> None:
    """``sizes``: rows, hidden size, size of an expert."""
    num_rows, hidden, inner = sizes
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    made = [matrices(name, *shape, seed=i) for i, shape in enumerate(shapes)]
    biases = [
        random(NUM, shape[0], seed=i + 5) if has_bias else None for i, shape in enumerate(shapes)
    ]
    stacks = [
        Stack(matrix, shape[0], bias)
        for (matrix, _), shape, bias in zip(made, shapes, biases, strict=True)
    ]
    gate, up, down = (plain for _, plain in made)
    x = random(num_rows, hidden) / (hidden**0.5 * gate.square().mean().sqrt())
    theirs = reference_experts.Matrices(gate, up, down, tuple(biases) if has_bias else None)
    activate = reference.gated_clamped if act is Act.CLAMPED else _silu
    wanted = reference_experts.apply_experts(x, choice(num_rows), theirs, activate)
    got = apply_experts(x, choice(num_rows), Experts(*stacks, act))
    close = {"rtol": 1e-4, "atol": 1e-4 * float(wanted.abs().max())}
    torch.testing.assert_close(got, wanted, **close)


def _silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return reference.gated(gate, up, False)


@pytest.mark.parametrize("name", KINDS)
def test_experts_of_every_quantised_type(name):
    """Few rows, of which each meets the experts that it chose."""
    size = max(64, KINDS[name].block)
    check(name, (3, size, size), Act.SILU, False)


@pytest.mark.parametrize("name", [None, "MXFP4"])
@pytest.mark.parametrize("num_rows", [5, 70])
def test_biases_clamped_activations_and_larger_tiles(name, num_rows):
    """Sizes that no tile divides where the type allows them; more rows than a tile has."""
    check(name, (num_rows, 64, 96) if name else (num_rows, 37, 19), Act.CLAMPED, True)


def test_pairs_are_sorted_by_expert_with_tiles_for_any_choice():
    """Also where one expert gets all rows, and others none."""
    for experts in (torch.tensor([[1, 3]] * 40), choice(40)[0], choice(1)[0]):
        groups = grouped(experts, torch.ones(experts.shape), NUM)
        counts = [int((experts == i).sum()) for i in range(NUM)]
        assert groups.starts.diff().tolist() == counts
        tiles = [-(-count // groups.block_m) for count in counts]
        assert groups.tile_starts.diff().tolist() == tiles
        assert sum(tiles) <= groups.num_tiles
        found = experts.flatten().tolist()
        for row, places in enumerate(groups.places.tolist()):
            owners = [int((groups.starts <= place).sum()) - 1 for place in places]
            assert owners == sorted(found[row * USED : (row + 1) * USED])


def test_a_row_has_the_same_bits_in_any_company():
    """Alone, and among others of whom some share its experts."""
    stack, _ = matrices("Q4_0", 32, 64, 1)
    down, _ = matrices("Q4_0", 64, 32, 2)
    experts = Experts(Stack(stack, 32), Stack(stack, 32), Stack(down, 64), Act.SILU)
    x, own = random(6, 64), choice(6)
    whole = apply_experts(x, own, experts)
    alone = apply_experts(x[:1], (own[0][:1], own[1][:1]), experts)
    assert torch.equal(alone, whole[:1])
