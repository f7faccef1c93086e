"""What all operations of the torch backend share: weights, and products with them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvtrio.backends.torch_adapters import add_changes
from kvtrio.backends.torch_step import TorchStep
from kvtrio.kernels import reference as kernels


class TorchProducts:
    """Base of the groups of operations that ``TorchOps`` is made of."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype

    def linear(self, step: TorchStep, x: Tensor, weight: str, bias: bool) -> Tensor:
        added = self._weights[weight + ".bias"] if bias else None
        out = kernels.linear(x, self._weights[weight + ".weight"], added)
        return add_changes(step.adapters, x, out, weight + ".weight")
