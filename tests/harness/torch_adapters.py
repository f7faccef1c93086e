"""Random adapters for the torch backend, and models with the same changes merged into them."""

from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen

from harness.torch_models import Driver, RandomFile, random_file, settings
from kvtrio.backends.cpu_backend import CpuBackend
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.core.batch import Chunk
from kvtrio.core.identity import AdapterUse, effective
from kvtrio.model.adapter_pairs import HEAD, adaptable
from kvtrio.model.adapters import AdapterData, AdapterKind, LowRank
from kvtrio.model.spec import ModelSpec


def random_adapter(
    model: ModelSpec, seed: int, rank: int = 4, only: Sequence[str] = ()
) -> AdapterData:
    """Changes about as large as the weights of ``random_file``; ranks and factors differ between
    targets. ``only``: kinds of target, all if empty."""
    rng = np.random.default_rng(seed)
    targets = {}
    for i, (name, (num_out, num_in)) in enumerate(sorted(adaptable(model).items())):
        if only and name.split(".")[-2] not in only:
            continue
        own = rank + i % 3
        a = rng.normal(0, 0.2, (own, num_in)).astype(np.float32)
        b = rng.normal(0, 1 / own**0.5, (num_out, own)).astype(np.float32)
        targets[name] = LowRank(a, b, (0.5, 1.0, 2.0)[i % 3])
    return AdapterData(
        kind=AdapterKind.GGUF,
        digest=bytes([seed]) * 32,
        targets=targets,
        invocation_tokens=(),
        task_name="",
        prompt_prefix="",
    )


Mix = Sequence[tuple[AdapterData, float]]


def merged_backend(model: ModelSpec, mix: Mix) -> TorchBackend:
    """The model with all changes added to its weights, in float64; what adapters must equal."""
    arrays = dict(random_file(model).arrays)
    arrays.setdefault(HEAD, arrays["token_embd.weight"])
    for data, scale in mix:
        for name, target in data.targets.items():
            change = target.b.astype(np.float64) @ target.a.astype(np.float64)
            arrays[name] = arrays[name] + change * (target.scaling * scale)
    file = RandomFile({name: array.astype(np.float32) for name, array in arrays.items()})
    return TorchBackend.load(file, evolve(model, tied_output=False), settings())


@frozen(eq=False)
class Loaded:
    """A backend with adapters; ``uses`` makes what a chunk carries."""

    backend: TorchBackend | CpuBackend
    handles: dict[bytes, int]

    def uses(self, mix: Mix) -> tuple[AdapterUse, ...]:
        return effective(
            AdapterUse(self.handles[data.digest], data.digest, scale) for data, scale in mix
        )

    def chunk(self, driver: Driver, request: int, piece: tuple[int, list[int]], mix: Mix) -> Chunk:
        """``piece``: first position and tokens."""
        return evolve(driver.chunk(request, *piece), adapters=self.uses(mix))


def loaded(backend: TorchBackend | CpuBackend, *adapters: AdapterData) -> Loaded:
    return Loaded(backend, {data.digest: backend.load_adapter(data) for data in adapters})
