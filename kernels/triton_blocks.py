"""Copies of whole blocks between pools and staging memory, many in one launch."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024
"""Words that one program copies."""


@dataclass(frozen=True, eq=False)
class Places:
    """Memory of [layers, places] parts, each part contiguous, in words."""

    words: Tensor
    """int16 or int32 [layers, places, words of a part], with any strides but the last."""

    @classmethod
    def of(cls, memory: Tensor) -> "Places":
        """A pool [layers, places, ...]: its parts must be contiguous."""
        parts = memory.flatten(2) if memory.ndim > 3 else memory
        assert parts.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        num_bytes = parts.shape[-1] * parts.itemsize
        return cls(parts.view(torch.int32 if num_bytes % 4 == 0 else torch.int16))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Which place goes where; no target is a source or a target of another pair."""

    sources: Tensor
    """int64 [n]."""
    targets: Tensor
    """int64 [n]."""
    num_words: Tensor
    """int32 [n]: of each part, from its beginning."""


def copy_parts(source: Places, target: Places, pairs: Pairs) -> None:
    """The first words of each pair's parts, in all layers; see ``reference.copy_places``."""
    num_layers, _, size = source.words.shape
    if not (num_pairs := pairs.sources.shape[0]):
        return
    # A state may have more pieces than the second and third axis may have programs: 65535.
    _copy_parts[(triton.cdiv(size, WORDS), num_layers, num_pairs)](
        source.words, target.words, pairs.sources, pairs.targets, pairs.num_words,
        *source.words.stride()[:2], *target.words.stride()[:2], BLOCK=WORDS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _copy_parts(
    source, target, sources, targets, num_words, source_layer, source_place, target_layer,
    target_place, BLOCK: tl.constexpr,
):  # fmt: skip
    pair, layer = tl.program_id(2), tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.load(num_words + pair)
    origin = source + layer * source_layer + tl.load(sources + pair) * source_place
    goal = target + layer * target_layer + tl.load(targets + pair) * target_place
    tl.store(goal + i, tl.load(origin + i, mask=mask, other=0), mask=mask)
