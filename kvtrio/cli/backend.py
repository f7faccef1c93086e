"""Which backend computes, and what it is told."""

import os
from math import inf
from typing import Any

from attrs import frozen

from kvtrio import plugins
from kvtrio.backends.base import BackendSettings
from kvtrio.config import ConfigError, ModelSettings, ServeConfig
from kvtrio.kernels.cpu_library import LibraryMissing, LibraryUnfit, load_library

MIB = 1 << 20
MAX_DEFAULT_CACHE_MIB = 8192
CPU, CUDA, TORCH, SIM = "cpu", "cuda", "torch", "sim"
WITHOUT_GPUS = (CPU, TORCH, SIM)
"""Their memory is the host's, or the user's to size."""
DEFAULT_GPU_FRACTION = 0.9
DEFAULT_DTYPE = "bf16"
DEFAULT_CACHE_TYPE = "f16"
SLOTS_PER_PLACE = 2
"""Of recurrent layers, on the device: the running state and a checkpoint."""


@frozen
class Chosen:
    """A backend's class, from the entry points."""

    name: str
    backend: Any
    """Has ``load(file, spec, settings)``."""
    warning: str | None = None
    """One line, where it is not the one that the user would expect."""


def choose_backend(settings: ModelSettings) -> Chosen:
    """The one that was asked for; else the compiled kernels, where they can do what is asked.

    Raises ``PluginError``, or ``ConfigError`` for flags that do not go together.
    """
    name, warning = settings.backend, None
    if name is None:
        name, warning = _default(settings)
    _check(name, settings)
    return Chosen(name, plugins.load(plugins.BACKENDS, name), warning)


def _default(settings: ModelSettings) -> tuple[str, str | None]:
    if settings.device != "cpu" or settings.dtype is not None:
        return TORCH, None
    try:
        load_library()
    except LibraryMissing as error:
        return TORCH, f"{error.reason}: computing with torch, which is several times slower"
    except LibraryUnfit as error:
        raise ConfigError(f"{error} (--backend torch does without it)") from None
    return CPU, None


def _check(name: str, settings: ModelSettings) -> None:
    if name == CPU and settings.dtype is not None:
        raise ConfigError("--dtype is for backend torch; backend cpu computes in the file's types")
    if name in (TORCH, CUDA) and (settings.cache_type_k or settings.cache_type_v):
        raise ConfigError(f"--cache-type-k and -v are for backend cpu; {name} has --dtype")
    if name in WITHOUT_GPUS and settings.gpu_memory_fraction is not None:
        raise ConfigError(f"--gpu-memory-fraction is for backend cuda; {name} does not size by it")
    if name in WITHOUT_GPUS and settings.tensor_split is not None:
        raise ConfigError(f"--tensor-split is for backend cuda; {name} computes on one device")
    if name in WITHOUT_GPUS and settings.cuda_graphs is not None:
        raise ConfigError(f"--cuda-graphs is for backend cuda; {name} captures nothing")
    if settings.tensor_split is not None:
        proportions(settings.tensor_split)


def proportions(text: str) -> tuple[float, ...]:
    """Those of ``--tensor-split``, positive numbers. Raises ``ConfigError``."""
    try:
        parts = tuple(float(part) for part in text.split(","))
    except ValueError:
        parts = ()
    if not parts or not all(0 < part < inf for part in parts):
        raise ConfigError("--tensor-split: expected positive numbers with commas, 3,1 for example")
    return parts


def backend_settings(
    config: ServeConfig, max_context: int, adapter_bytes: int = 0
) -> BackendSettings:
    """Size the pools so that every place can hold the longest request, and RAM as asked;
    ``adapter_bytes``: of those that are loaded at the start."""
    model, scheduling = config.model, config.scheduling
    # One block more, to copy from: see ``CoreConfig.num_blocks``.
    blocks_per_place = -(-max_context // scheduling.block_size) + 1
    cache_ram = config.state.cache_ram
    return BackendSettings(
        dtype=model.dtype or DEFAULT_DTYPE,
        key_type=model.cache_type_k or DEFAULT_CACHE_TYPE,
        value_type=model.cache_type_v or DEFAULT_CACHE_TYPE,
        device=model.device,
        num_threads=model.threads,
        block_size=scheduling.block_size,
        num_blocks=scheduling.parallel * blocks_per_place,
        host_bytes=(default_cache_ram() if cache_ram is None else cache_ram) * MIB,
        host_may_shrink=cache_ram is None,
        num_state_slots=SLOTS_PER_PLACE * scheduling.parallel,
        max_context=max_context,
        max_rows=scheduling.batch_size,
        max_sampled=scheduling.parallel,
        gpu_memory_fraction=model.gpu_memory_fraction or DEFAULT_GPU_FRACTION,
        tensor_split=proportions(model.tensor_split) if model.tensor_split else (),
        graphs=model.cuda_graphs is not False,
        adapter_bytes=adapter_bytes,
        adapters_may_come=config.adapters.lora_dir is not None,
    )


def default_cache_ram() -> int:
    """MiB: a quarter of the machine's memory, at most 8192; the backend takes less of it where that
    does not fit beside the rest."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total // 4 // MIB, MAX_DEFAULT_CACHE_MIB)
