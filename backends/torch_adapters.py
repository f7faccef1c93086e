"""Adapters on the device, and which rows of a step carry which.

1. Base weights are never changed. A row without an adapter is not touched, so it gets the very
   bits that it gets when no adapter is loaded.
2. A row's changes are added in the order of their digests, whoever shares the step, in float32, and
   rounded once.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from attrs import define, field, frozen
from torch import Tensor

from kvtrio.backends.base import BackendError
from kvtrio.backends.torch_weights import weight_plan
from kvtrio.core.batch import Chunk
from kvtrio.core.identity import AdapterUse, effective
from kvtrio.kernels.reference_adapters import LowRankMatrix, OutputPart, add_low_rank
from kvtrio.model.adapter_pairs import HEAD, adaptable
from kvtrio.model.adapters import AdapterData, LowRank
from kvtrio.model.spec import ModelSpec

Matrices = Mapping[str, LowRankMatrix]
"""By name of the weight as the backend keeps it, ``blk.0.attn_qkv.weight`` for example."""
Loaded = Mapping[int, Matrices]
"""By handle."""
NO_ADAPTERS: Loaded = MappingProxyType({})


@frozen(eq=False)
class Use:
    """One adapter at one scale."""

    matrices: Matrices
    scale: float
    places: Tensor | None
    """int64 [n]: where in ``AdapterRows.rows``; None: all of them."""


@frozen(eq=False)
class AdapterRows:
    """The rows of a step that have adapters."""

    rows: Tensor
    """int64 [T], ascending."""
    uses: tuple[Use, ...]
    """In the order in which their changes are added."""


@define(eq=False)
class TorchAdapters:
    """All loaded adapters of one backend."""

    _spec: ModelSpec
    _device: torch.device
    loaded: dict[int, Matrices] = field(init=False, factory=dict)
    """By handle."""
    _next_handle: int = field(init=False, default=1)

    def load(self, data: AdapterData) -> int:
        """Put an adapter on the device; returns its handle, which is never given out again.

        Raises BackendError, with nothing changed, when it is for another model.
        """
        shapes = adaptable(self._spec)
        for name, target in data.targets.items():
            if shapes.get(name) != (len(target.b), target.a.shape[1]):
                raise BackendError("the adapter is for another model")
        handle = self._next_handle
        self.loaded[handle] = _matrices(data, self._spec, self._device)
        self._next_handle += 1
        return handle

    def unload(self, handle: int) -> None:
        """Forget an adapter that no request uses. Raises KeyError for an unknown handle."""
        del self.loaded[handle]


def adapter_rows(
    chunks: Sequence[Chunk], counts: Sequence[int], loaded: Loaded, device: torch.device
) -> AdapterRows | None:
    """Which rows carry what when chunk i has ``counts[i]`` rows; None: no row has an adapter.

    Raises KeyError for a handle that is not loaded.
    """
    carried = _rows_by_use(chunks, counts)
    touched = sorted({row for rows in carried.values() for row in rows})
    if not touched:
        return None
    place = {row: i for i, row in enumerate(touched)}
    uses = []
    for use, rows in carried.items():
        is_all = len(rows) == len(touched)
        places = None if is_all else torch.tensor([place[row] for row in rows]).to(device)
        uses.append(Use(loaded[use.adapter_id], use.scale, places))
    return AdapterRows(torch.tensor(touched).to(device), tuple(uses))


def add_changes(adapters: AdapterRows | None, x: Tensor, out: Tensor, weight: str) -> Tensor:
    """``out``, the product of ``x`` with a weight, with the changes of the rows that have some.

    x [N, I], out [N, O], changed in place; any float types.
    """
    uses = [use for use in adapters.uses if weight in use.matrices] if adapters else []
    if adapters is None or not uses:
        return out
    source = x[adapters.rows].float()
    target = out[adapters.rows].float()
    for use in uses:
        _add(use, source, target, use.matrices[weight])
    out[adapters.rows] = target.to(out.dtype)
    return out


def _add(use: Use, source: Tensor, target: Tensor, matrix: LowRankMatrix) -> None:
    if use.places is None:
        add_low_rank(target, source, matrix, use.scale)
        return
    part = target[use.places]
    add_low_rank(part, source[use.places], matrix, use.scale)
    target[use.places] = part


def _rows_by_use(chunks: Sequence[Chunk], counts: Sequence[int]) -> dict[AdapterUse, list[int]]:
    """Rows of each use, in the canonical order of uses, which ``effective`` defines."""
    uses = effective(dict.fromkeys(use for chunk in chunks for use in chunk.adapters))
    carried: dict[AdapterUse, list[int]] = {use: [] for use in uses}
    first = 0
    for chunk, count in zip(chunks, counts, strict=True):
        for use in effective(chunk.adapters):
            carried[use] += range(first, first + count)
        first += count
    return {use: rows for use, rows in carried.items() if rows}


def _matrices(data: AdapterData, spec: ModelSpec, device: torch.device) -> Matrices:
    """Stacked as the base's weights are."""
    sizes = {name: shape[0] for name, shape in adaptable(spec).items()}
    plan = {**weight_plan(spec), HEAD: (HEAD,)}
    found = {name: _stacked(data, parts, sizes, device) for name, parts in plan.items()}
    return {name: matrix for name, matrix in found.items() if matrix is not None}


def _stacked(
    data: AdapterData, names: tuple[str, ...], sizes: Mapping[str, int], device: torch.device
) -> LowRankMatrix | None:
    present: list[LowRank] = []
    parts: list[OutputPart] = []
    first_output = first_rank = 0
    for name in names:
        target = data.targets.get(name)
        if target is not None:
            b = torch.from_numpy(target.b).to(device)
            parts.append(OutputPart(b, first_output, first_rank))
            present.append(target)
            first_rank += len(target.a)
        first_output += sizes.get(name, 0)
    if not present:
        return None
    a = torch.cat([torch.from_numpy(target.a) for target in present])
    factors = [target.scaling for target in present for _ in range(len(target.a))]
    return LowRankMatrix(a.to(device), torch.tensor(factors).to(device), tuple(parts))
