"""Every Triton kernel against float64, on fresh random inputs, on any device."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import gguf
import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from harness.cpu_matrices import random_rows, values
from harness.triton_adapters import Mix, expected, random_matrix, table, tiles
from harness.triton_queries import ragged
from kvtrio.kernels import reference, reference_experts
from kvtrio.kernels import reference_recurrent as recurrent
from kvtrio.kernels.reference_adapters import LowRankMatrix, OutputPart
from kvtrio.kernels.reference_delta_net import delta_rule as reference_rule
from kvtrio.kernels.reference_delta_net import unit_length
from kvtrio.kernels.reference_mamba2 import state_space as reference_space
from kvtrio.kernels.triton_adapters import add_adapters
from kvtrio.kernels.triton_attention import Shape, attend
from kvtrio.kernels.triton_blocks import Pairs, Places, copy_parts
from kvtrio.kernels.triton_experts import Experts, Stack, apply_experts
from kvtrio.kernels.triton_latent import LatentShape, attend_latent, latent_ratio
from kvtrio.kernels.triton_mamba2 import SpaceShape, state_space
from kvtrio.kernels.triton_matmul import multiply
from kvtrio.kernels.triton_pack import KINDS, Packed, pack
from kvtrio.kernels.triton_qkv import QkvRows, QkvShape, write_qkv
from kvtrio.kernels.triton_recurrent import DeltaShape, Runs, causal_conv, delta_rule
from kvtrio.kernels.triton_rows import Act, add_norm, gated

F32 = torch.float32


@frozen
class Check:
    """One comparison: the largest error, as a part of the largest value."""

    name: str
    error: float
    limit: float


@frozen
class Where:
    """A device, and inputs that differ from run to run."""

    device: str
    seed: int

    def random(self, *shape: int) -> Tensor:
        own = torch.Generator().manual_seed(self.seed + sum(shape))
        return torch.randn(shape, generator=own).to(self.device)

    def ints(self, numbers: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)


def checked(where: Where) -> Iterator[Check]:
    """All of them, one after the other."""
    for name, (check, limit) in CHECKS.items():
        got, wanted = check(where)
        got, wanted = got.double().cpu(), wanted.double().cpu()
        error = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
        yield Check(name, error if torch.isfinite(got).all() else float("inf"), limit)


Pair = tuple[Tensor, Tensor]


def _norm(where: Where) -> Pair:
    x, change, weight = where.random(5, 200), where.random(5, 200), where.random(200)
    total = (x + change).double()
    wanted = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    return add_norm(x, change, weight, 1e-5, F32), wanted


def _gated(where: Where, act: Act) -> Pair:
    a, b = where.random(5, 300), where.random(6, 300)[:5]
    wide = a.double()
    if act is Act.CLAMPED:
        return gated(a, b, act), _clamped(wide, b.double())
    if act is Act.GELU_TANH:
        active = torch.nn.functional.gelu(wide, approximate="tanh")
    else:
        active = wide.sigmoid() * (wide if act is Act.SILU else 1.0)
    return gated(a, b, act), active * b.double()


def _qkv(where: Where) -> Pair:
    shape = QkvShape(4, 2, 16, 16, 12, False, False, 1e-5)
    fused, norms = where.random(5, 8 * 16), (where.random(16), where.random(16))
    angles = where.random(5, 6)
    rows = QkvRows(where.ints([40, 3, 17, 5, 0], torch.int64), angles.cos(), angles.sin())
    cache = (torch.zeros(3, 16, 2, 16).to(where.device), torch.zeros(3, 16, 2, 16).to(where.device))
    q = write_qkv(fused, norms, rows, cache, shape)
    heads = fused.double().view(5, 8, 16)
    parts = []
    for part, norm in zip((heads[:, :4], heads[:, 4:6]), norms, strict=True):
        scale = torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-5)
        own = part * scale * norm.double()
        parts.append(reference.rope(own, angles.double().cos(), angles.double().sin(), False))
    keys, vals = (each.flatten(0, 1)[rows.slots].flatten(1) for each in cache)
    got = torch.cat((q.flatten(1), keys, vals), -1)
    return got, torch.cat((parts[0].flatten(1), parts[1].flatten(1), heads[:, 6:].flatten(1)), -1)


def _attention(where: Where, dtype: torch.dtype, is_decode: bool) -> Pair:
    shape = Shape(8, 2, 64, 64, 0.12, window=50)
    chunks = ((70, 1), (0, 1), (33, 1)) if is_decode else ((0, 40), (17, 5), (60, 3))
    batch = ragged(shape, chunks, dtype=dtype, device=where.device, seed=where.seed)
    out, sinks = torch.empty_like(batch.q), where.random(8)
    attend(batch.q, (batch.keys, batch.values), batch.queries(shape), shape, out, sinks)
    return out, batch.expected(shape, sinks)


def _matrix(where: Where, name: str, cols: int = 512) -> tuple[Packed, Tensor]:
    kind, rng = gguf.GGMLQuantizationType[name], np.random.default_rng(where.seed)
    raw = random_rows(kind, 70, cols, rng)
    packed = pack(name, torch.from_numpy(raw).to(where.device), cols)
    return packed, torch.from_numpy(values(kind, raw)).to(where.device)


def _product(where: Where, name: str, num_rows: int) -> Pair:
    packed, matrix = _matrix(where, name)
    x = where.random(num_rows, 512).bfloat16()
    out = torch.empty(num_rows, 70, device=where.device)
    multiply(x, packed, out)
    return out, x.double() @ matrix.bfloat16().double().T


def _company(where: Where) -> Pair:
    """A row at another place of the tile, among others; must be the same bits on a GPU."""
    packed, _ = _matrix(where, "Q4_K", 2048)
    x = where.random(16, 2048).bfloat16()
    whole, alone = (torch.empty(n, 70, device=where.device) for n in (16, 1))
    multiply(x, packed, whole)
    multiply(x[7:8].contiguous(), packed, alone)
    return alone, whole[7:8]


def _on(matrix: LowRankMatrix, device: str) -> LowRankMatrix:
    parts = tuple(OutputPart(p.b.to(device), p.first_output, p.first_rank) for p in matrix.parts)
    return LowRankMatrix(matrix.a.to(device), matrix.scaling.to(device), parts)


def _adapters(where: Where) -> Pair:
    sizes = (24, 70)
    matrices = [
        _on(random_matrix(ranks, sizes, 40, where.seed + i), where.device)
        for i, ranks in enumerate(((4, 4), (16, 3)))
    ]
    mixes = (
        Mix((3, 0), ((matrices[0], 0.5),)),
        Mix((1,), ((matrices[1], 2.0), (matrices[0], 1.0))),
    )
    x, out = where.random(5, 40), where.random(5, 94)
    wanted = expected(x, out, mixes)
    add_adapters(x, out, tiles(mixes, where.device), table(mixes, sizes, where.device))
    return out, wanted


def _blocks(where: Where) -> Pair:
    source, target = where.random(3, 6, 16, 2, 8), where.random(3, 5, 16, 2, 8)
    wanted = target.clone()
    wanted[:, 4], wanted[:, 0] = source[:, 2], source[:, 5]
    pairs = Pairs(
        *(where.ints(ids, torch.int64) for ids in ([2, 5], [4, 0])), where.ints([256] * 2)
    )
    copy_parts(Places.of(source), Places.of(target), pairs)
    return target, wanted


def _convolution(where: Where) -> Pair:
    x, weight, history = where.random(40, 30), where.random(30, 4), where.random(2, 3, 30)
    runs = _run(where, 9, 40)
    before = history[1:].double().clone()
    out = causal_conv(x, weight, None, history, runs, False)
    return out, recurrent.causal_conv(x[None].double(), weight.double(), None, before)[0][0]


def _delta(where: Where, length: int) -> Pair:
    heads, k, v = 3, 64, 48
    q, keys = where.random(length, heads, k), unit_length(where.random(length, heads, k), 1e-6)
    decay = -0.05 * where.random(length, heads).abs()
    inputs = (q, keys, where.random(length, heads, v), decay, where.random(length, heads).sigmoid())
    states, out = where.random(2, heads, k, v), torch.empty(length, heads, v, device=where.device)
    before, wide = states[1:].double().clone(), tuple(x[None].double() for x in inputs)
    delta_rule(inputs, states, _run(where, 9, length), DeltaShape(heads, k, v), out)
    sizes = recurrent.pieces(9, length)
    return out, recurrent.in_pieces(reference_rule, wide, before, sizes)[0][0]


def _space(where: Where, length: int) -> Pair:
    heads, p, s = 4, 24, 40
    x, b, c = where.random(length, heads, p), where.random(length, 2, s), where.random(length, 2, s)
    dt, decay = (
        where.random(length, heads).abs(),
        -0.05 * where.random(length, heads + 1)[:, 1:].abs(),
    )
    skip, states = where.random(heads), where.random(2, heads, p, s)
    inputs = torch.cat([part.flatten(1) for part in (x, b, c)], -1), dt, decay.contiguous()
    before, out = states[1:].double().clone(), torch.empty(length, heads, p, device=where.device)
    wide = tuple(each[None].double() for each in (x * dt[..., None], b, c, decay))
    state_space(inputs, skip, states, _run(where, 9, length), SpaceShape(heads, p, 2, s), out)
    wanted = recurrent.in_pieces(reference_space, wide, before, recurrent.pieces(9, length))[0][0]
    return out, wanted + (x * skip[:, None]).double()


def _latent(where: Where, is_decode: bool) -> Pair:
    heads, latent, rotated = 20, 64, 16
    plain = Shape(heads, 1, latent + rotated, latent, 0.1)
    chunks = ((300, 1), (0, 1), (33, 1)) if is_decode else ((0, 40), (17, 5), (60, 3))
    batch = ragged(plain, chunks, dtype=torch.bfloat16, device=where.device, seed=where.seed)
    batch.values.copy_(batch.keys[..., :latent])
    out = torch.empty(*batch.q.shape[:2], latent, dtype=torch.bfloat16, device=where.device)
    tiled = replace(plain, num_heads=latent_ratio(heads))
    shape = LatentShape(heads, latent, rotated, 0.1)
    attend_latent(batch.q, batch.keys, batch.queries(tiled), shape, out)
    return out, batch.expected(plain)


def _experts(where: Where, name: str, num_rows: int) -> Pair:
    num, size = 4, max(64, KINDS[name].block)
    made, plain = [], []
    for i in range(3):
        kind, rng = gguf.GGMLQuantizationType[name], np.random.default_rng(where.seed + i)
        raw = random_rows(kind, num * size, size, rng)
        packed = pack(name, torch.from_numpy(raw).to(where.device), size)
        made.append(Stack(packed, size, where.random(num, size + i)[:, i:].contiguous()))
        plain.append(torch.from_numpy(values(kind, raw)).view(num, size, size).to(where.device))
    x = where.random(num_rows, size) / (size**0.5 * plain[0].square().mean().sqrt())
    logits = where.random(num_rows, num)
    own = reference_experts.choose_experts(logits, 2)
    biases = tuple(stack.bias.double() for stack in made)
    gate, up, down = (each.double() for each in plain)
    wanted = reference_experts.apply_experts(
        x.double(),
        (own[0], own[1].double()),
        reference_experts.Matrices(gate, up, down, biases),
        _clamped,
    )
    return apply_experts(x, own, Experts(*made, Act.CLAMPED)), wanted


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1.0)


def _run(where: Where, start: int, length: int) -> Runs:
    ints = where.ints
    return Runs(ints([0]), ints([start]), ints([length]), ints([1], torch.int64), length)


CHECKS: dict[str, tuple[Callable[[Where], Pair], float]] = {
    "norm": (_norm, 1e-5),
    **{f"gated {act.name.lower()}": (partial(_gated, act=act), 1e-5) for act in Act},
    "qkv": (_qkv, 1e-5),
    "attention, decode, f32": (partial(_attention, dtype=F32, is_decode=True), 1e-4),
    "attention, prefill, f32": (partial(_attention, dtype=F32, is_decode=False), 1e-4),
    "attention, decode, bf16": (partial(_attention, dtype=torch.bfloat16, is_decode=True), 0.02),
    "attention, prefill, bf16": (partial(_attention, dtype=torch.bfloat16, is_decode=False), 0.02),
    **{f"{name}, 3 rows": (partial(_product, name=name, num_rows=3), 0.01) for name in KINDS},
    **{f"{name}, 40 rows": (partial(_product, name=name, num_rows=40), 0.01) for name in KINDS},
    "a row in any company": (_company, 0.0),
    "adapters": (_adapters, 1e-4),
    "block copies": (_blocks, 0.0),
    "convolution": (_convolution, 1e-5),
    "delta net, row": (partial(_delta, length=1), 1e-4),
    "delta net, pieces": (partial(_delta, length=70), 1e-3),
    "state space, row": (partial(_space, length=1), 1e-4),
    "state space, pieces": (partial(_space, length=70), 1e-3),
    "latent, decode": (partial(_latent, is_decode=True), 0.02),
    "latent, prefill": (partial(_latent, is_decode=False), 0.02),
    **{
        f"experts, {name}, 3 rows": (partial(_experts, name=name, num_rows=3), 1e-3)
        for name in KINDS
    },
    "experts, MXFP4, 70 rows": (partial(_experts, name="MXFP4", num_rows=70), 1e-3),
}
