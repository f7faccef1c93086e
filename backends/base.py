"""The one interface between the engine and a model: synchronous, thread-agnostic, no trio."""

from typing import Protocol

from attrs import frozen

from kvtrio.core.batch import Batch, StepResult
from kvtrio.core.config import Group, RamBudget
from kvtrio.core.types import StateClass
from kvtrio.model.adapters import AdapterData


@frozen(kw_only=True)
class DeviceMemory:
    """Where the memory of one device goes that has its own; bytes."""

    name: str
    """In torch's words."""
    allowed_bytes: int
    """Of all that it has, by ``BackendSettings.gpu_memory_fraction``."""
    taken_bytes: int
    """By weights, and by other processes."""
    step_bytes: int
    """At most, for the values of a step and for moves between memories, as measured."""
    pool_bytes: int
    """KV and states."""
    adapter_bytes: int
    """What is left, for adapters."""


@frozen(kw_only=True)
class BackendInfo:
    """Facts that the core and the API need; fixed after loading."""

    name: str
    groups: tuple[Group, ...]
    block_size: int
    num_blocks: int
    """Per group with K and V of all tokens, on the device."""
    num_host_blocks: int = 0
    """Per such group, in RAM: in the same arena after the device's blocks if ``is_unified``."""
    num_window_blocks: int = 0
    """Per group with a sliding window, on the device."""
    num_host_window_blocks: int = 0
    """Per such group, in RAM; numbered as blocks are."""
    host_is_short: bool = False
    """It is less than the settings' ``host_bytes``, since memory is short."""
    num_state_slots: int = 0
    """Per group of recurrent layers, on the device."""
    num_host_state_slots: int = 0
    """Per group of recurrent layers, in RAM; numbered as blocks are."""
    ram: RamBudget | None = None
    """What all kinds of state in RAM share: the numbers above are then the most of each kind.
    None: each kind has its share."""
    is_unified: bool = True
    """The device's memory is the host's."""
    vocab_size: int
    max_context: int
    """Longest request, in tokens."""
    pool_bytes: int
    weight_bytes: int
    numerics: str = ""
    """What else decides the bits of an answer, besides the settings: the instruction set."""
    num_converted: int = 0
    """Tensors in a type that it does not compute with, kept in another."""
    memory: tuple[DeviceMemory, ...] = ()
    """Of devices whose memory was measured."""

    def places(self, group: int) -> tuple[int, int]:
        """Blocks, or slots, of a group: on the device, and in RAM."""
        match self.groups[group].state_class:
            case StateClass.TOKEN:
                return self.num_blocks, self.num_host_blocks
            case StateClass.WINDOW:
                return self.num_window_blocks, self.num_host_window_blocks
            case StateClass.POINT:
                return self.num_state_slots, self.num_host_state_slots


class Backend(Protocol):
    """Owns weights and KV memory. All calls come from one thread."""

    @property
    def info(self) -> BackendInfo: ...

    def step(self, batch: Batch) -> StepResult:
        """Write K and V of every token of ``batch`` and sample where asked; before that, move state
        as it says, see ``moves``.

        Blocks named by a chunk are written at its positions and read at lower ones. The slot that
        it names for a group of recurrent layers holds the state before its first position, or
        anything where that is 0, and afterwards the state behind its last. An exception is a bug
        or a dead device: the engine ends the process.
        """
        ...

    def load_adapter(self, data: AdapterData) -> int:
        """Make an adapter for this model ready; returns the handle for ``AdapterUse.adapter_id``.

        Handles are never given out again. Raises BackendError, with nothing changed, when there is
        no room for it.
        """
        ...

    def unload_adapter(self, adapter_id: int) -> None:
        """Forget an adapter. The caller knows that no request uses it."""
        ...

    def close(self) -> None: ...


@frozen(kw_only=True)
class BackendSettings:
    """How a backend loads a model."""

    dtype: str = "bf16"
    """Type of matrices and KV cache, where a backend dequantises: "f32" or "bf16"."""
    key_type: str = "f16"
    """Type of keys in the cache, where a backend has several: "f32", "f16", "q8_0", "q4_0"."""
    value_type: str = "f16"
    """The same of values."""
    device: str = "cpu"
    """Device in torch's words: "cpu", "cuda", "cuda:1", ..."""
    num_threads: int | None = None
    """None: the library's own choice."""
    block_size: int = 16
    num_blocks: int
    """Per group of layers, on the device; of those with a sliding window less, see
    ``core.config.window_blocks``. Backends whose devices have their own memory may have more."""
    host_bytes: int = 0
    """Most that state in RAM may take; the backend makes whole blocks of it."""
    host_may_shrink: bool = False
    """Nobody asked for ``host_bytes``: the backend takes less where memory is short."""
    num_state_slots: int = 0
    """Per group of recurrent layers, on the device; models without such layers ignore it."""
    num_host_state_slots: int | None = None
    """The same in RAM, besides ``host_bytes``. None: as many as a share of ``host_bytes`` holds,
    and the rest is for blocks; see ``groups.with_slots``."""
    is_unified: bool | None = None
    """Whether device and RAM blocks share one arena; None: if the device is the host."""
    max_context: int
    """Longest request, in tokens."""
    max_rows: int = 4096
    """Most tokens of a step."""
    max_sampled: int = 64
    """Most requests of a step, and that run at once."""
    gpu_memory_fraction: float = 0.9
    """Of all memory of a GPU, what weights, steps, state and adapters may take together."""
    tensor_split: tuple[float, ...] = ()
    """Proportions of the model's layers on several GPUs; empty: all on one."""
    adapter_bytes: int = 0
    """Of adapters that will be loaded at the start."""
    adapters_may_come: bool = False
    """Others may be loaded at run time."""
    graphs: bool = True
    """Steps of decoding rows alone are captured at load and launched as a whole, on a GPU."""


class BackendError(ValueError):
    """What the user asked for cannot be had here: one clear line for the command line to print."""
