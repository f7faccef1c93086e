"""Adapters in GGUF form, as llama.cpp's converter writes them.

Tensors are ``<base tensor>.lora_a`` and ``.lora_b``; the rows of q and k are already in the base
file's order. The factor is alpha / rank, or 1 where there is no alpha.
Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-adapter.cpp, build b11434.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from kvtrio.model.adapter_pairs import EMBEDDING, Content, Half, Side, low_rank, pair_up
from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.fields import Fields
from kvtrio.model.gguf_file import GGUFFile
from kvtrio.model.gguf_index import TensorInfo
from kvtrio.model.gguf_reader import MetaValue
from kvtrio.model.spec import ModelSpec

ALPHA = (-1e6, 1e6)
MAX_TEXT = 1 << 16


def read_gguf_adapter(file: GGUFFile, spec: ModelSpec) -> Content:
    """Raises ModelFileError when the file is no LoRA adapter for this base."""
    _check_kind(file.metadata, spec.architecture)
    alpha = Fields(file.metadata, "adapter.lora.").number("alpha", ALPHA, 0.0)
    pairs = pair_up(_halves(file.tensors), spec)
    values = file.dequantise
    return Content(
        targets={
            pair.target: low_rank(
                values(pair.a.name), values(pair.b.name), alpha / pair.rank if alpha else 1.0, pair
            )
            for pair in pairs
        },
        invocation_tokens=_numbers(file.metadata.get("adapter.alora.invocation_tokens")),
        task_name=_text(file.metadata, "task_name"),
        prompt_prefix=_text(file.metadata, "prompt_prefix"),
    )


def _check_kind(metadata: Mapping[str, MetaValue], architecture: str) -> None:
    general, adapter = Fields(metadata, "general."), Fields(metadata, "adapter.")
    kind = general.text("type", "model")
    if kind != "adapter":
        raise ModelFileError(f"it holds no adapter but something of type {safe_name(kind)}")
    if adapter.text("type") != "lora":
        raise ModelFileError(f"adapters of type {safe_name(adapter.text('type'))} are unsupported")
    own = general.text("architecture")
    if own != architecture:
        raise ModelFileError(f"it is for architecture {safe_name(own)}, not {architecture}")


def _halves(tensors: Mapping[str, TensorInfo]) -> Iterator[Half]:
    for name, tensor in tensors.items():
        target, _, suffix = name.rpartition(".lora_")
        if suffix not in ("a", "b"):
            raise ModelFileError(f"tensor {safe_name(name)} is neither lora_a nor lora_b")
        if target == EMBEDDING:
            raise ModelFileError("it changes the embedding (token_embd), which is not supported")
        yield Half(name=name, target=target, side=Side(suffix), shape=tensor.shape)


def _numbers(value: MetaValue | None) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        raise ModelFileError("adapter.alora.invocation_tokens is not an array of token ids")
    return tuple(int(number) for number in value)


def _text(metadata: Mapping[str, MetaValue], key: str) -> str:
    text = Fields(metadata, "adapter.lora.").text(key, "")
    if len(text) > MAX_TEXT:
        raise ModelFileError(f"adapter.lora.{key} has {len(text)} characters")
    # What was no UTF-8 must not travel on as lone surrogates: JSON has no way to say them.
    return text.encode("utf-8", "replace").decode()
