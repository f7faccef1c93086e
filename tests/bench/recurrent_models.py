"""Writes models with recurrent layers or experts in the shapes of real ones, with random weights:
to measure. All experts of a layer have the same.

Tokenizer, template and all metadata that is no size come from a file of ../shared/tiny/models of
the same architecture.

    recurrent_models.py qwen35|lfm2|mamba2|qwen3moe TINY.gguf OUT.gguf [TYPE]
"""

import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, assert_never

import gguf
import numpy as np
from attrs import evolve
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType

from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.layer_tensors import is_matrix
from kvtrio.model.spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    Mamba2Spec,
    Mixer,
    ShortConvSpec,
)
from kvtrio.model.tensors import needed_tensors

SIZES: dict[str, dict[str, Any]] = {
    # Qwen3.5-0.8B, half of its layers.
    "qwen35": {
        "block_count": 12,
        "embedding_length": 1024,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.inner_size": 2048,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 16,
        "ssm.group_count": 16,
        "feed_forward_length": 3584,
    },
    # LFM2-350M.
    "lfm2": {
        "block_count": 16,
        "embedding_length": 1024,
        "attention.head_count": 16,
        "attention.head_count_kv": [8 if i in (2, 5, 8, 10, 12, 14) else 0 for i in range(16)],
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 64,
        "feed_forward_length": 4608,
    },
    # Mamba2-370m, half of its layers.
    "mamba2": {
        "block_count": 24,
        "embedding_length": 1024,
        "ssm.inner_size": 2048,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 32,
        "ssm.group_count": 1,
    },
    # A billion weights in the proportions of Qwen3-30B-A3B.
    "qwen3moe": {
        "block_count": 12,
        "embedding_length": 1024,
        "attention.head_count": 16,
        "attention.head_count_kv": 4,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 64,
        "expert_count": 64,
        "expert_used_count": 8,
        "expert_feed_forward_length": 384,
        "feed_forward_length": 3072,
    },
}


def write_metadata(writer: gguf.GGUFWriter, tiny: Path, architecture: str) -> None:
    """All that ``tiny`` has, with the sizes of ``SIZES``."""
    sizes = {f"{architecture}.{key}": value for key, value in SIZES[architecture].items()}
    sizes |= {f"{architecture}.context_length": 32768, "general.name": "random weights"}
    for key, field in gguf.GGUFReader(tiny).fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        element = field.types[-1] if is_array else None
        value = sizes.get(key, field.contents())
        writer.add_key_value(key, value, field.types[0], element)


def shapes_of(tiny: Path, architecture: str) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor: the layers of ``tiny`` in other sizes."""
    with open_gguf(tiny) as file:
        spec = read_spec(file)
    sizes = SIZES[architecture]
    kv_heads = sizes.get("attention.head_count_kv")
    layers = []
    for i in range(sizes["block_count"]):
        has_turns = "ssm.inner_size" in sizes
        is_attention = (
            kv_heads[i] > 0 if isinstance(kv_heads, list) else not has_turns or i % 4 == 3
        )
        wanted = is_attention and kv_heads is not None
        like = next(each for each in spec.layers if isinstance(each.mixer, AttentionSpec) == wanted)
        dense = like.feed_forward
        if isinstance(dense, FeedForwardSpec):
            dense = evolve(dense, size=sizes["feed_forward_length"])
        if isinstance(dense, ExpertsSpec):
            dense = evolve(
                dense,
                num_experts=sizes["expert_count"],
                num_used=sizes["expert_used_count"],
                size=sizes["expert_feed_forward_length"],
            )
        layers.append(evolve(like, index=i, mixer=resized(like.mixer, sizes), feed_forward=dense))
    return needed_tensors(evolve(spec, hidden_size=sizes["embedding_length"], layers=tuple(layers)))


def resized(mixer: Mixer, sizes: Mapping[str, Any]) -> Mixer:
    hidden, inner = sizes["embedding_length"], sizes.get("ssm.inner_size", 0)
    num_heads, num_groups = sizes.get("ssm.time_step_rank", 0), sizes.get("ssm.group_count", 0)
    channels = inner + 2 * num_groups * sizes.get("ssm.state_size", 0)
    match mixer:
        case AttentionSpec():
            return evolve(
                mixer,
                num_heads=sizes["attention.head_count"],
                num_kv_heads=max(np.atleast_1d(sizes["attention.head_count_kv"]).tolist()),
                head_dim=sizes["attention.key_length"],
                value_dim=sizes["attention.value_length"],
            )
        case ShortConvSpec():
            return evolve(mixer, conv=evolve(mixer.conv, channels=hidden))
        case DeltaNetSpec():
            return evolve(
                mixer,
                conv=evolve(mixer.conv, channels=channels),
                num_key_heads=num_groups,
                num_value_heads=num_heads,
                key_dim=sizes["ssm.state_size"],
                value_dim=inner // num_heads,
            )
        case Mamba2Spec():
            return evolve(
                mixer,
                conv=evolve(mixer.conv, channels=channels),
                num_heads=num_heads,
                head_dim=inner // num_heads,
                num_groups=num_groups,
                state_size=sizes["ssm.state_size"],
            )
        case _:
            assert_never(mixer)


def values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if is_matrix(name, shape):
        return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
    if name.endswith("ssm_a"):
        return -np.exp(rng.uniform(-3.0, 0.7, shape)).astype(np.float32)
    if name.endswith("norm.weight"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return (0.5 * rng.standard_normal(shape)).astype(np.float32)


def main(architecture: str, tiny: Path, out: Path, kind: Type) -> None:
    shapes = shapes_of(tiny, architecture)
    writer, rng, count = gguf.GGUFWriter(out, architecture), np.random.default_rng(0), 0
    write_metadata(writer, tiny, architecture)
    for name, shape in shapes.items():
        array = values(name, shape[-2:], rng)
        count += prod(shape)
        if name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(name, array)
        elif is_matrix(name, shape):
            rows = gguf.quants.quantize(array, kind)
            stack = np.broadcast_to(rows, (*shape[:-2], *rows.shape))
            writer.add_tensor(name, np.ascontiguousarray(stack), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{out}: {count / 1e6:.0f} million weights")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Type[(sys.argv[4:] or ["Q8_0"])[0]])
