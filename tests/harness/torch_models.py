"""Small random models for the torch backend, and a driver that steps it without the core."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import torch
from attrs import define, evolve, field, frozen

from kvtrio.backends.base import BackendSettings
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.core.batch import Batch, Chunk, SampleRow
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import BlockId, RequestId, StateClass
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import TensorInfo, open_gguf
from kvtrio.model.layer_tensors import is_matrix
from kvtrio.model.spec import (
    Activation,
    AttentionSpec,
    ConvSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    Gating,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    Mixer,
    ModelSpec,
    RopeSpec,
    RopeStyle,
    RoutingSpec,
    SharedExpertSpec,
    ShortConvSpec,
    Temperature,
)
from kvtrio.model.tensors import needed_tensors

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
        "num_state_slots": 64,
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
    feed_forward = flags.pop("feed_forward", None)
    style = flags.pop("style", RopeStyle.NEOX)
    assert isinstance(activation, Activation)
    assert isinstance(style, RopeStyle)
    assert isinstance(feed_forward, ExpertsSpec | None)
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
        mixer=AttentionSpec(**(attention | flags)),  # type: ignore[arg-type]
        feed_forward=feed_forward or FeedForwardSpec(size=48, activation=activation),
        post_norms=post_norms,
    )


DENSE = FeedForwardSpec(size=48, activation=Activation.SILU)


def recurrent_layer(
    index: int,
    mixer: Mixer,
    feed_forward: FeedForwardSpec | ExpertsSpec | None = DENSE,
) -> LayerSpec:
    """A layer without attention."""
    return LayerSpec(
        index=index, state_class=StateClass.POINT, mixer=mixer, feed_forward=feed_forward
    )


def delta_net(**flags: bool) -> DeltaNetSpec:
    """Two key heads of 6 values, four value heads of 5."""
    return DeltaNetSpec(
        conv=ConvSpec(width=4, channels=2 * 12 + 20),
        num_key_heads=2,
        num_value_heads=4,
        key_dim=6,
        value_dim=5,
        **flags,
    )


SHORT_CONV = ShortConvSpec(conv=ConvSpec(width=3, channels=32))
MAMBA2 = Mamba2Spec(
    conv=ConvSpec(width=4, channels=24 + 2 * 14),
    num_heads=4,
    head_dim=6,
    num_groups=2,
    state_size=7,
)
EXPERTS = ExpertsSpec(
    num_experts=6,
    num_used=2,
    size=20,
    activation=Activation.SILU,
    shared=SharedExpertSpec(size=24, gated=True),
)
UNGATED = evolve(EXPERTS, shared=SharedExpertSpec(size=24, gated=False))


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
STRETCHED = RopeSpec(
    style=RopeStyle.NEOX, num_rotated=6, base=1000.0, divisors=(1.0, 1.5, 4.0), magnitude=1.1
)
"""As yarn does it."""
ODD = spec(
    layer(0, bias=True, output_bias=True, softcap=5.0, rope=STRETCHED),
    layer(1, 9, bias=True, softcap=5.0),
    final_softcap=3.0,
)
"""What no shared model has: output bias, soft-caps, and yarn without experts."""
DELTA = spec(
    recurrent_layer(0, delta_net(tiled_heads=True, fused_gates=False)),
    layer(1, gated=True, qk_norm=True, style=RopeStyle.NEOX),
    recurrent_layer(2, delta_net(tiled_heads=True, fused_gates=False)),
)
"""As Qwen3.5."""
DELTA_FUSED = evolve(
    DELTA,
    layers=tuple(
        evolve(
            each,
            mixer=each.mixer
            if isinstance(each.mixer, AttentionSpec)
            else delta_net(tiled_heads=False, fused_gates=True),
            ffn_norm="post_attention_norm",
        )
        for each in DELTA.layers
    ),
)


def with_experts(model: ModelSpec, experts: ExpertsSpec) -> ModelSpec:
    return evolve(model, layers=tuple(evolve(each, feed_forward=experts) for each in model.layers))


DELTA_EXPERTS = with_experts(DELTA_FUSED, EXPERTS)
"""As Qwen3-Next."""
CONV = evolve(
    spec(recurrent_layer(0, SHORT_CONV), recurrent_layer(1, SHORT_CONV), layer(2, qk_norm=True)),
    output_norm="token_embd_norm",
)
"""As LFM2."""
MAMBA = spec(*(recurrent_layer(i, MAMBA2, feed_forward=None) for i in range(3)), tied=False)
"""No attention at all."""
MAMBA_SCALED = evolve(
    spec(
        recurrent_layer(0, MAMBA2),
        layer(1, style=RopeStyle.NONE),
        recurrent_layer(2, MAMBA2),
    ),
    residual_scale=0.7,
    logit_scale=0.5,
)
"""As Granite 4 hybrid without experts."""
MAMBA_EXPERTS = with_experts(MAMBA_SCALED, UNGATED)
"""As Granite 4 hybrid."""
SCORED = RoutingSpec(
    gating=Gating.SIGMOID,
    normalised=True,
    scale=1.5,
    selection_bias=True,
    num_groups=3,
    num_groups_used=2,
)
LATENT = spec(
    *(
        LayerSpec(
            index=i,
            state_class=StateClass.TOKEN,
            mixer=LatentAttentionSpec(
                num_heads=4,
                query_rank=rank,
                latent_dim=12,
                plain_dim=6,
                value_dim=5,
                rope=RopeSpec(
                    style=RopeStyle.NORM, num_rotated=4, base=1000.0, divisors=(1.0, 2.5)
                ),
                scale=0.4,
            ),
            feed_forward=evolve(UNGATED, routing=SCORED) if i else DENSE,
        )
        for i, rank in enumerate((10, None))
    )
)
"""As DeepSeek 2."""
BIASED = spec(
    *(
        layer(
            i,
            window,
            bias=True,
            output_bias=True,
            sinks=True,
            feed_forward=evolve(EXPERTS, shared=None, biases=True, activation=Activation.CLAMPED),
        )
        for i, window in enumerate((20, None, 20))
    )
)
"""As gpt-oss."""
PARALLEL = evolve(
    spec(
        *(
            evolve(
                layer(i, window, temperature=Temperature(scale=0.3, length=40)),
                parallel=True,
                feed_forward=FeedForwardSpec(
                    size=48, activation=Activation.GELU_TANH, gated=False, bias=True
                ),
            )
            for i, window in enumerate((20, None))
        )
    ),
    layer_norm=True,
    norm_bias=True,
)
"""What Command R, StarCoder 2 and Mistral 3 have, together."""
UNNORMED = spec(
    *(
        evolve(layer(i, qk_norm=True, joint_norm=True, post_norms=True), pre_norms=False)
        for i in range(2)
    )
)
"""As OLMo 2."""
SPECIAL = {"latent": LATENT, "biased": BIASED, "parallel": PARALLEL, "unnormed": UNNORMED}
"""What few models have."""
RECURRENT = {
    "delta": DELTA,
    "delta-fused": DELTA_FUSED,
    "conv": CONV,
    "mamba": MAMBA,
    "mamba-scaled": MAMBA_SCALED,
}
WITH_EXPERTS = {"delta-experts": DELTA_EXPERTS, "mamba-experts": MAMBA_EXPERTS}
HYBRIDS = RECURRENT | WITH_EXPERTS
BARE_EXPERTS = with_experts(PLAIN, evolve(EXPERTS, shared=None))
"""As Qwen3-MoE."""
SPECS = {"plain": PLAIN, "windowed": WINDOWED, "odd": ODD, "experts": BARE_EXPERTS} | SPECIAL
"""Without recurrent layers."""
MODELS = SPECS | HYBRIDS


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
    arrays = {
        name: rng.normal(float(not is_matrix(name, shape)), 0.3 if len(shape) == 1 else 0.2, shape)
        for name, shape in needed_tensors(model).items()
    }
    # What a state loses from token to token: a tenth or so, so that much of the past stays.
    decays = {name: -0.1 * abs(array) for name, array in arrays.items() if name.endswith("ssm_a")}
    wide = {name: array.astype(np.float32) for name, array in (arrays | decays).items()}
    return RandomFile(wide)


def random_backend(model: ModelSpec, **changes: object) -> TorchBackend:
    return TorchBackend.load(random_file(model), model, settings(**changes))


@define(eq=False)
class Driver:
    """Gives requests blocks and slots and steps a backend; one shuffled free list per group when
    ``rng`` is given, so that no two groups agree on an id and no table is in order."""

    backend: Any
    """A backend with ``logits``."""
    rng: Random | None = None
    tables: dict[int, list[list[BlockId]]] = field(factory=dict)
    free: list[list[BlockId]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        info = self.backend.info
        for group in range(len(info.groups)):
            blocks = [BlockId(block) for block in range(info.places(group)[0])]
            if self.rng is not None:
                self.rng.shuffle(blocks)
            self.free.append(blocks)

    def chunk(
        self, request: int, start: int, token_ids: Sequence[int], sample: SampleRow | None = GREEDY
    ) -> Chunk:
        """A chunk with blocks up to its end, or one slot."""
        info, end = self.backend.info, start + len(token_ids)
        tables = self.tables.setdefault(request, [[] for _ in self.free])
        for group, table, free in zip(info.groups, tables, self.free, strict=True):
            is_point = group.state_class is StateClass.POINT
            while len(table) < (1 if is_point else -(-end // info.block_size)):
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
