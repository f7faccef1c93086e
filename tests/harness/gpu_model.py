"""How fast a whole model is on a GPU."""

import time
from collections.abc import Iterator, Mapping

import gguf
import numpy as np
import torch
from attrs import evolve, frozen

from harness.fake_graph import FakeGraph
from harness.gpu_sizes import Sizes, Speed, random_matrix, seconds, synchronise
from harness.torch_models import Driver, settings
from kvtrio.backends.cuda_backend import CudaBackend
from kvtrio.backends.cuda_graphs import SIZES, Graph, graph_maker
from kvtrio.core.batch import Batch, Chunk, Copy
from kvtrio.core.types import BlockId, StateClass, Tier
from kvtrio.model.gguf_file import TensorInfo
from kvtrio.model.layer_tensors import is_matrix
from kvtrio.model.spec import (
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    RopeStyle,
)
from kvtrio.model.tensors import needed_tensors


@frozen(eq=False)
class SyntheticFile:
    """A model of which all matrices are Q4_K."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: self._info(name, shape) for name, shape in self.shapes.items()}

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        kind = gguf.GGMLQuantizationType.Q4_K if is_matrix(name, shape) else (
            gguf.GGMLQuantizationType.F32
        )  # fmt: skip
        size = int(np.prod(shape))
        num_bytes = size // 256 * 144 if kind is gguf.GGMLQuantizationType.Q4_K else size * 4
        return TensorInfo(
            name=name, shape=shape, ggml_type=kind, num_bytes=num_bytes, part=0, offset=0
        )

    def raw(self, name: str) -> np.ndarray:
        rows, cols = self.shapes[name]
        return random_matrix("Q4_K", rows, cols).reshape(-1)

    def dequantise(self, name: str) -> np.ndarray:
        return np.ones(self.shapes[name], np.float32)


def model(sizes: Sizes) -> ModelSpec:
    """Llama's layers."""
    attention = AttentionSpec(
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        value_dim=sizes.dim,
        rope=RopeSpec(style=RopeStyle.NORM, num_rotated=sizes.dim, base=500000.0),
        scale=sizes.dim**-0.5,
    )
    layers = tuple(
        LayerSpec(
            index=i,
            state_class=StateClass.TOKEN,
            mixer=attention,
            feed_forward=FeedForwardSpec(size=sizes.inner, activation=Activation.SILU),
        )
        for i in range(sizes.layers)
    )
    return ModelSpec(
        architecture="llama",
        name="random",
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        context_length=131072,
        norm_eps=1e-5,
        embedding_scale=1.0,
        tied_output=False,
        final_softcap=None,
        layers=layers,
    )


def model_speeds(sizes: Sizes) -> Iterator[Speed]:
    """Decoding, reading a prompt, both at once, and moves between the tiers."""
    spec = model(sizes)
    num_tokens = (max(sizes.rows) + 1) * sizes.context + sizes.far + 2 * sizes.prompt
    backend = CudaBackend.load(
        SyntheticFile(needed_tensors(spec)),
        spec,
        settings(
            dtype="bf16",
            num_blocks=num_tokens // 16 + max(sizes.rows) + sizes.moves,
            is_unified=False,
            max_sampled=max(sizes.rows),
            graphs=False,
            max_context=sizes.far + sizes.prompt,
            host_bytes=sizes.moves * 16 * sizes.layers * sizes.kv_heads * sizes.dim * 4,
        ),
    )
    driver = Driver(backend)
    chunks = [driver.chunk(i, sizes.context - 1, [1]) for i in range(max(sizes.rows))]
    for num_rows in sizes.rows:
        batch = Batch(0, tuple(chunks[:num_rows]))
        took = seconds(sizes, lambda batch=batch: backend.step(batch))
        yield Speed(f"decode, {num_rows} rows, launched singly", num_rows / took, "tokens/s")
    yield from _captured_speeds(sizes, backend, chunks)
    prompt = driver.chunk(1000, 0, [1] * sizes.prompt)
    took = seconds(sizes, lambda: backend.step(Batch(0, (prompt,))))
    yield Speed(f"prompt of {sizes.prompt}", sizes.prompt / took, "tokens/s")
    far = driver.chunk(1001, sizes.far, [1] * min(512, sizes.prompt), None)
    took = seconds(sizes, lambda: backend.step(Batch(0, (*chunks[:8], far))))
    yield Speed(f"step of 8 rows beside a prompt at {sizes.far}", 1000 * took, "ms")
    yield from _move_speeds(sizes, backend, tuple(chunks[:8]))
    backend.close()


def _captured_speeds(sizes: Sizes, backend: CudaBackend, chunks: list[Chunk]) -> Iterator[Speed]:
    """Captured steps of decoding rows, and what part of each is not spent in its kernels."""
    graphs: list[Graph] = []
    make = graph_maker() if sizes.device == "cuda" else FakeGraph

    def made() -> Graph:
        graphs.append(make())
        return graphs[-1]

    begin = time.perf_counter()
    backend.capture(made, max(sizes.rows))
    synchronise(sizes)
    yield Speed("capturing all sizes", time.perf_counter() - begin, "s")
    captured = dict(zip(SIZES[len(graphs) - 1 :: -1], graphs, strict=True))
    for num_rows in sizes.rows:
        batch = Batch(0, tuple(chunks[:num_rows]))
        took = seconds(sizes, lambda batch=batch: backend.step(batch))
        yield Speed(f"decode, {num_rows} rows", num_rows / took, "tokens/s")
        size = next(size for size in SIZES if size >= num_rows)
        with torch.inference_mode():
            busy = seconds(sizes, captured[size].replay)
        yield Speed(f"gaps, {num_rows} rows", 100 * (1 - busy / took), "%")


def _move_speeds(sizes: Sizes, backend: CudaBackend, chunks: tuple[Chunk, ...]) -> Iterator[Speed]:
    """Alone, and in front of a step, as a part of which the step alone is told."""
    size = sizes.moves * 16 * sum(group.bytes_per_token for group in backend.info.groups)
    away = tuple(
        Copy(0, BlockId(i), BlockId(i), 16, Tier.DEVICE, Tier.HOST) for i in range(sizes.moves)
    )
    back = tuple(evolve(copy, source_tier=Tier.HOST, target_tier=Tier.DEVICE) for copy in away)
    alone = seconds(sizes, lambda: backend.step(Batch(0, chunks)))
    for name, copies in (("to RAM", away), ("from RAM", back)):
        took = seconds(sizes, lambda copies=copies: backend.step(Batch(0, (), copies)))
        yield Speed(f"moves {name}", size / took / 1e9, "GB/s")
        beside = seconds(sizes, lambda copies=copies: backend.step(Batch(0, chunks, copies)))
        yield Speed(f"step with moves {name}", 1000 * beside, "ms", alone / beside)
