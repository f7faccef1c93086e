"""How fast kernels are, beside what the device can copy and multiply."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from harness.gpu_sizes import Sizes, Speed, kernel_seconds, random_matrix, seconds, turns
from harness.triton_queries import ragged
from kvtrio.kernels.triton_attention import Shape, attend
from kvtrio.kernels.triton_matmul import multiply
from kvtrio.kernels.triton_pack import KINDS, Packed, pack


def copy_rate(sizes: Sizes) -> float:
    """GB/s, read and written, of the device's own copy."""
    source = torch.empty(sizes.copied // 4, device=sizes.device)
    target = torch.empty_like(source)
    return 2 * sizes.copied / seconds(sizes, lambda: target.copy_(source)) / 1e9


def kernel_speeds(sizes: Sizes) -> Iterator[Speed]:
    """The device's own copy and product, then kernels as parts of them."""
    copy = copy_rate(sizes)
    yield Speed("copy", copy, "GB/s")
    side = torch.randn(sizes.square, sizes.square, device=sizes.device).bfloat16()
    product = 2 * sizes.square**3 / seconds(sizes, lambda: side @ side) / 1e12
    yield Speed("matrix product", product, "TFLOP/s")
    shape = Shape(sizes.heads, sizes.kv_heads, sizes.dim, sizes.dim, 0.09)
    for num_rows in sizes.rows:
        rate = _decode_attention(sizes, shape, num_rows)
        yield Speed(f"attention, {num_rows} rows", rate, "GB/s", rate / copy)
    rate = _prefill_attention(sizes, shape)
    yield Speed(f"attention, prompt of {sizes.prompt}", rate, "TFLOP/s", rate / product)
    for name in KINDS:
        yield from _matrix_speeds(sizes, name, (copy, product))


def _decode_attention(sizes: Sizes, shape: Shape, num_rows: int) -> float:
    num_bytes = num_rows * sizes.context * sizes.kv_heads * sizes.dim * 4
    runs = [_attention(sizes, shape, num_rows) for _ in turns(sizes, num_bytes)]
    return num_bytes / kernel_seconds(sizes, runs) / 1e9


def _attention(sizes: Sizes, shape: Shape, num_rows: int) -> Callable[[], None]:
    chunks = ((sizes.context - 1, 1),) * num_rows
    batch = ragged(shape, chunks, dtype=torch.bfloat16, device=sizes.device)
    queries, out = batch.queries(shape), torch.empty_like(batch.q)
    return partial(attend, batch.q, (batch.keys, batch.values), queries, shape, out)


def _prefill_attention(sizes: Sizes, shape: Shape) -> float:
    batch = ragged(shape, ((0, sizes.prompt),), dtype=torch.bfloat16, device=sizes.device)
    queries, out = batch.queries(shape), torch.empty_like(batch.q)
    cache = (batch.keys, batch.values)
    took = kernel_seconds(sizes, [lambda: attend(batch.q, cache, queries, shape, out)])
    return 2 * sizes.prompt**2 * sizes.heads * sizes.dim / took / 1e12


def _matrix_speeds(sizes: Sizes, name: str, peaks: tuple[float, float]) -> Iterator[Speed]:
    raw = torch.from_numpy(random_matrix(name, sizes.inner, sizes.hidden)).to(sizes.device)
    size = raw.numel()
    packed = [pack(name, raw, sizes.hidden) for _ in turns(sizes, size)]
    for num_rows in (1, 16):
        took = _product_seconds(sizes, packed, num_rows)
        rate = packed[0].num_bytes / took / 1e9
        yield Speed(f"{name}, {num_rows} rows", rate, "GB/s", rate / peaks[0])
    for num_rows in (64, sizes.prompt):
        took = _product_seconds(sizes, packed[:1], num_rows)
        rate = 2 * num_rows * sizes.inner * sizes.hidden / took / 1e12
        yield Speed(f"{name}, {num_rows} rows", rate, "TFLOP/s", rate / peaks[1])


def _product_seconds(sizes: Sizes, packed: list[Packed], num_rows: int) -> float:
    x = torch.randn(num_rows, sizes.hidden, device=sizes.device).bfloat16()
    out = torch.empty(num_rows, sizes.inner, device=sizes.device, dtype=torch.bfloat16)
    return kernel_seconds(sizes, [partial(multiply, x, each, out) for each in packed])
