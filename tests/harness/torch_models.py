"""Small random models for the torch backend, and a driver that steps it without the core."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import torch
from attrs import define, field, frozen

from kvtrio.backends.base import BackendSettings
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.backends.torch_weights import weight_plan
from kvtrio.core.batch import Batch, Chunk, SampleRow
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import BlockId, RequestId, StateClass
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import TensorInfo, open_gguf
from kvtrio.model.spec import (
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    RopeStyle,
)

GREEDY = SampleRow(SamplingParams(temperature=0.0), 0.0, ())
VOCAB = 96


def settings(**changes: object) -> BackendSettings:
    """Room for a few short requests."""
    chosen: dict[str, object] = {
        "dtype": "f32",
        "device": "cpu",
        "num_threads": None,
        "block_size": 16,
        "num_blocks": 256,
        "max_context": 2048,
    }
    return BackendSettings(**(chosen | changes))  # type: ignore[arg-type]


def load(path: Path, **changes: object) -> TorchBackend:
    """The torch backend with a model file."""
    with open_gguf(path) as file:
        return TorchBackend.load(file, read_spec(file), settings(**changes))


def layer(index: int, window: int | None = None, **flags: object) -> LayerSpec:
    """A layer of 32 values with four heads of 8 on two kv heads."""
    post_norms = bool(flags.pop("post_norms", False))
    activation = flags.pop("activation", Activation.SILU)
    style = flags.pop("style", RopeStyle.NEOX)
    assert isinstance(activation, Activation)
    assert isinstance(style, RopeStyle)
    attention: dict[str, object] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "value_dim": 8,
        "rope": RopeSpec(style=style, num_rotated=6, base=1000.0, scale=0.5),
        "scale": 0.4,
        "window": window,
    }
    return LayerSpec(
        index=index,
        state_class=StateClass.TOKEN if window is None else StateClass.WINDOW,
        attention=AttentionSpec(**(attention | flags)),  # type: ignore[arg-type]
        feed_forward=FeedForwardSpec(size=48, activation=activation),
        post_norms=post_norms,
    )


def spec(*layers: LayerSpec, tied: bool = True, final_softcap: float | None = None) -> ModelSpec:
    return ModelSpec(
        architecture="test",
        name="random",
        vocab_size=VOCAB,
        hidden_size=32,
        context_length=2048,
        norm_eps=1e-5,
        embedding_scale=2.0,
        tied_output=tied,
        final_softcap=final_softcap,
        layers=layers,
    )


PLAIN = spec(*(layer(i, style=RopeStyle.NORM) for i in range(3)), tied=False)
FLAGS = {"qk_norm": True, "post_norms": True, "activation": Activation.GELU_TANH}
WINDOWED = spec(
    layer(0, 20, **FLAGS), layer(1, **FLAGS), layer(2, 20, **FLAGS), layer(3, 7, **FLAGS)
)
ODD = spec(
    layer(0, bias=True, output_bias=True, softcap=5.0),
    layer(1, 9, bias=True, softcap=5.0),
    final_softcap=3.0,
)
"""What no shared model has: output bias and soft-caps."""
SPECS = {"plain": PLAIN, "windowed": WINDOWED, "odd": ODD}


@frozen(eq=False)
class RandomFile:
    """Random weights in place of a model file, the same for the same seed."""

    arrays: Mapping[str, np.ndarray]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(
                name=name,
                shape=array.shape,
                ggml_type=gguf.GGMLQuantizationType.F32,
                num_bytes=array.nbytes,
                part=0,
                offset=0,
            )
            for name, array in self.arrays.items()
        }

    def dequantise(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def raw(self, name: str) -> np.ndarray:
        return self.arrays[name].reshape(-1).view(np.uint8)


def random_file(model: ModelSpec, seed: int = 0) -> RandomFile:
    """Weights of a size that keeps activations near one and attention far from uniform."""
    rng = np.random.default_rng(seed)
    shapes = {part: _shape(part, model) for parts in weight_plan(model).values() for part in parts}
    arrays = {
        name: rng.normal(float(len(shape) == 1), 0.3 if len(shape) == 1 else 0.2, shape)
        for name, shape in shapes.items()
    }
    return RandomFile({name: array.astype(np.float32) for name, array in arrays.items()})


def _shape(name: str, model: ModelSpec) -> tuple[int, ...]:
    """Shape of a tensor of these models: all their layers have the same sizes."""
    attention, size = model.layers[0].attention, model.layers[0].feed_forward.size
    query_size = attention.num_heads * attention.head_dim
    key_size = attention.num_kv_heads * attention.head_dim
    kind = name.split(".")[-2]
    outputs = {"attn_q": query_size, "attn_k": key_size, "attn_v": key_size}
    outputs |= {"ffn_gate": size, "ffn_up": size, "token_embd": VOCAB, "output": VOCAB}
    inputs = {"attn_output": query_size, "ffn_down": size}
    if kind in ("attn_q_norm", "attn_k_norm"):
        return (attention.head_dim,)
    num_outputs = outputs.get(kind, model.hidden_size)
    if name.endswith(".bias") or "norm" in kind:
        return (num_outputs,)
    return (num_outputs, inputs.get(kind, model.hidden_size))


def random_backend(model: ModelSpec, **changes: object) -> TorchBackend:
    return TorchBackend.load(random_file(model), model, settings(**changes))


@define(eq=False)
class Driver:
    """Gives requests blocks and steps a backend; one shuffled free list per group when ``rng``
    is given, so that no two groups agree on an id and no table is in order."""

    backend: Any
    """A backend with ``logits``."""
    rng: Random | None = None
    tables: dict[int, list[list[BlockId]]] = field(factory=dict)
    free: list[list[BlockId]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        info = self.backend.info
        for _ in info.groups:
            blocks = [BlockId(block) for block in range(info.num_blocks)]
            if self.rng is not None:
                self.rng.shuffle(blocks)
            self.free.append(blocks)

    def chunk(
        self, request: int, start: int, token_ids: Sequence[int], sample: SampleRow | None = GREEDY
    ) -> Chunk:
        """A chunk with blocks up to its end."""
        size, end = self.backend.info.block_size, start + len(token_ids)
        tables = self.tables.setdefault(request, [[] for _ in self.free])
        for table, free in zip(tables, self.free, strict=True):
            while len(table) * size < end:
                table.append(free.pop(0))
        blocks = tuple(tuple(table) for table in tables)
        return Chunk(RequestId(request), start, tuple(token_ids), blocks, sample)

    def leave(self, request: int) -> None:
        """Give the blocks of a request back, to be used again next."""
        for table, free in zip(self.tables.pop(request), self.free, strict=True):
            free[:0] = table

    def logprobs(self, *chunks: Chunk) -> torch.Tensor:
        """Log-probabilities after each sampled chunk, float32 [M, vocab]."""
        return torch.log_softmax(torch.as_tensor(self.backend.logits(Batch(0, chunks))), -1)

    def tokens(self, *chunks: Chunk) -> list[int | None]:
        """The chosen token of each chunk."""
        result = self.backend.step(Batch(0, chunks))
        return [sampled.token_id if sampled else None for sampled in result.sampled]


def greedy(driver: Driver, request: int, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` tokens of a request that runs alone; its blocks are given back."""
    tokens = [driver.tokens(driver.chunk(request, 0, prompt))[0]]
    while len(tokens) < count:
        start = len(prompt) + len(tokens) - 1
        tokens += driver.tokens(driver.chunk(request, start, [tokens[-1] or 0]))
    driver.leave(request)
    return [token for token in tokens if token is not None]


def random_prompt(rng: Random, num_tokens: int, vocab: int = VOCAB) -> list[int]:
    return [rng.randrange(vocab) for _ in range(num_tokens)]
