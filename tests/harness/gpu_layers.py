"""How fast kernels of special layers are, at the sizes of models that have such."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from harness.gpu_sizes import Sizes, Speed, kernel_seconds, random_matrix, turns
from harness.gpu_speed import copy_rate
from harness.triton_queries import ragged
from kvtrio.kernels.triton_attention import Shape
from kvtrio.kernels.triton_experts import Experts, Stack, apply_experts
from kvtrio.kernels.triton_latent import LatentShape, attend_latent, latent_ratio
from kvtrio.kernels.triton_mamba2 import SpaceShape, state_space
from kvtrio.kernels.triton_pack import pack
from kvtrio.kernels.triton_recurrent import Runs
from kvtrio.kernels.triton_rows import Act

Run = Callable[[], object]


def layer_speeds(sizes: Sizes) -> Iterator[Speed]:
    """As parts of the device's own copy."""
    copy = copy_rate(sizes)
    for num_rows in sizes.rows:
        for name, make in (("latent attention", _latent), ("state space", _space)):
            run, num_bytes = make(sizes, num_rows)
            runs = [run, *(make(sizes, num_rows)[0] for _ in turns(sizes, num_bytes)[1:])]
            rate = num_bytes / kernel_seconds(sizes, runs) / 1e9
            yield Speed(f"{name}, {num_rows} rows", rate, "GB/s", rate / copy)
        for name in ("Q4_K", "MXFP4"):
            run, num_bytes = _experts(sizes, name, num_rows)
            rate = num_bytes / kernel_seconds(sizes, [run]) / 1e9
            yield Speed(f"experts, {name}, {num_rows} rows", rate, "GB/s", rate / copy)


def _latent(sizes: Sizes, num_rows: int) -> tuple[Run, int]:
    """As DeepSeek 2 lite has it; toy sizes are an eighth."""
    heads, latent, rotated = (16, 512, 64) if sizes.device == "cuda" else (4, 64, 8)
    plain = Shape(heads, 1, latent + rotated, 1, 0.1)
    chunks = ((sizes.context - 1, 1),) * num_rows
    batch = ragged(plain, chunks, dtype=torch.bfloat16, device=sizes.device)
    queries = batch.queries(replace(plain, num_heads=latent_ratio(heads)))
    out = batch.q.new_empty(num_rows, heads, latent)
    shape = LatentShape(heads, latent, rotated, 0.1)
    num_bytes = num_rows * sizes.context * (latent + rotated) * 2
    return partial(attend_latent, batch.q, batch.keys, queries, shape, out), num_bytes


def _space(sizes: Sizes, num_rows: int) -> tuple[Run, int]:
    """As Granite 4 small has it: its state is read and written."""
    heads, p, s = (128, 64, 128) if sizes.device == "cuda" else (2, 16, 16)
    rows = torch.randn(num_rows, heads * p + 2 * s, device=sizes.device)
    dt = torch.rand(num_rows, heads, device=sizes.device)
    states = torch.zeros(num_rows, heads, p, s, device=sizes.device)
    ints = torch.arange(num_rows, dtype=torch.int32, device=sizes.device)
    runs = Runs(ints, ints + 1, torch.ones_like(ints), ints.long(), 1)
    shape = SpaceShape(heads, p, 1, s)
    out = torch.empty(num_rows, heads, p, device=sizes.device)
    run = partial(state_space, (rows, dt, -dt), dt[0].contiguous(), states, runs, shape, out)
    return run, 2 * states.numel() * 4


def _experts(sizes: Sizes, name: str, num_rows: int) -> tuple[Run, int]:
    """32 of which a row uses 4, as gpt-oss 20B has them; counted is what the chosen ones have."""
    inner, hidden = (2816, 3072) if sizes.device == "cuda" else (256, 256)
    num, used = (32, 4) if sizes.device == "cuda" else (4, 2)
    wide, down = (
        pack(name, torch.from_numpy(random_matrix(name, num * r, c)).to(sizes.device), c)
        for r, c in ((inner, hidden), (hidden, inner))
    )
    logits = torch.randn(num_rows, num, generator=torch.Generator().manual_seed(num_rows))
    best, chosen = logits.topk(used, -1)
    num_chosen = len(set(chosen.flatten().tolist()))
    experts = Experts(Stack(wide, inner), Stack(wide, inner), Stack(down, hidden), Act.SILU)
    x = torch.randn(num_rows, hidden, device=sizes.device).bfloat16() / 1000
    choice = chosen.to(sizes.device), torch.softmax(best, -1).to(sizes.device)
    num_bytes = (2 * wide.num_bytes + down.num_bytes) * num_chosen // num
    return partial(apply_experts, x, choice, experts), num_bytes
