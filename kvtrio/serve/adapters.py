"""The adapters that requests may name: which there are, at which global scale, and who uses them.

1. An id is a place in the order of loading and is never given to another name. A reload under a
   known name keeps id and scale; it is another ``Adapter``, with a digest of its own.
2. What a request gets is resolved once, at its admission. Later changes touch later requests only.
3. An adapter that lost its name stays in the model until nobody uses it; then it is to be freed.
4. Everything here is synchronous and changes nothing when it raises.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from attrs import define, field, frozen

from kvtrio.core.identity import AdapterUse, Segment, effective
from kvtrio.model.adapters import AdapterData, AdapterKind
from kvtrio.serve.errors import (
    ADAPTERS_FULL,
    ADAPTERS_TOO_LARGE,
    NO_ADAPTER,
    REPEATED_ADAPTER,
    UNKNOWN_ADAPTER,
    ApiError,
)

MAX_ADAPTERS = 64
MAX_BYTES = 8 << 30
"""Memory of all adapters together."""

Scales = Mapping[int, float]
"""By id; what is not in it has scale 0."""


@frozen(kw_only=True, eq=False)
class AdapterInfo:
    """What is kept of an adapter's data once the model has it."""

    path_name: str
    """Name of its file or folder; where that lies is nobody's business."""
    digest: bytes
    kind: AdapterKind
    invocation_tokens: tuple[int, ...]
    task_name: str
    prompt_prefix: str
    num_bytes: int

    @classmethod
    def of(cls, path_name: str, data: AdapterData) -> "AdapterInfo":
        return cls(
            path_name=path_name,
            digest=data.digest,
            kind=data.kind,
            invocation_tokens=data.invocation_tokens,
            task_name=data.task_name,
            prompt_prefix=data.prompt_prefix,
            num_bytes=data.num_bytes,
        )


@frozen(eq=False)
class Adapter:
    """One load of one adapter."""

    id: int
    name: str
    handle: int
    """The backend's."""
    info: AdapterInfo

    def start_in(self, prompt: Sequence[int]) -> int | None:
        """From which position on it applies; None: nowhere, its invocation does not occur."""
        wanted = self.info.invocation_tokens
        return last_place(prompt, wanted) if wanted else 0


def is_name(text: str) -> bool:
    """Whether an adapter may be called that: names stand in metrics, some of them in lists with
    commas, in answers, and in terminals. How long they may be is the schema's business."""
    return bool(text) and text.isprintable() and "," not in text


def last_place(tokens: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where ``wanted`` occurs last in ``tokens``."""
    size = array("I").itemsize
    haystack, needle = array("I", tokens).tobytes(), array("I", wanted).tobytes()
    at = haystack.rfind(needle)
    while at >= 0 and at % size:  # across the border of two tokens
        at = haystack.rfind(needle, 0, at + len(needle) - 1)
    return None if at < 0 else at // size


@frozen(eq=False)
class Selection:
    """What one request uses: adapters with scales other than 0, by id."""

    chosen: tuple[tuple[Adapter, float], ...] = ()

    def segments(self, prompt: Sequence[int]) -> tuple[Segment, ...]:
        """From which position on which adapters change the model."""
        by_start: dict[int, list[AdapterUse]] = {0: []}
        for adapter, scale in self.chosen:
            start = adapter.start_in(prompt)
            if start is not None:
                use = AdapterUse(adapter.handle, adapter.info.digest, scale)
                by_start.setdefault(start, []).append(use)
        uses: list[AdapterUse] = []
        segments: list[Segment] = []
        for start, more in sorted(by_start.items()):
            uses += more
            segments.append(Segment(start, effective(uses)))
        return tuple(segments)

    @property
    def shown(self) -> list[dict[str, float]]:
        """As llama-server shows a request's adapters."""
        return [{"id": adapter.id, "scale": scale} for adapter, scale in self.chosen]


@define(eq=False)
class Lease:
    """A request's hold on its adapters; ``release`` is idempotent."""

    selection: Selection
    _adapters: "Adapters"
    is_running: bool = False
    """It has left the queue."""
    _is_over: bool = field(init=False, default=False)

    def release(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._adapters.give_back(self)


@define(eq=False)
class Adapters:
    """The registry; see the module's rules. Used from the event loop alone."""

    max_adapters: int = MAX_ADAPTERS
    max_bytes: int = MAX_BYTES
    _named: dict[str, Adapter] = field(init=False, factory=dict)
    """In the order of ids."""
    _scales: dict[int, float] = field(init=False, factory=dict)
    _next_id: int = field(init=False, default=0)
    _leases: set[Lease] = field(init=False, factory=set)
    _retired: dict[int, Adapter] = field(init=False, factory=dict)
    """By handle: without a name, still in the model."""

    # --- looking ---

    @property
    def all(self) -> tuple[Adapter, ...]:
        return tuple(self._named.values())

    @property
    def scales(self) -> Scales:
        """The global ones, of all ids."""
        return MappingProxyType(self._scales)

    @property
    def leases(self) -> tuple[Lease, ...]:
        return tuple(self._leases)

    def find(self, name: str) -> Adapter | None:
        return self._named.get(name)

    # --- requests ---

    def select(self, lora: Scales | None, name: str | None) -> Selection:
        """What a request gets that asks for ``lora``, or for the model ``name``, or for neither.

        ``lora`` counts first; without it, an adapter's name means that adapter at scale 1, and any
        other name the global scales. Raises ``ApiError`` for an id that there is not.
        """
        if lora is not None:
            self._check_ids(lora)
            scales = lora
        elif name is not None and name in self._named:
            scales = {self._named[name].id: 1.0}
        else:
            scales = self._scales
        return Selection(
            tuple(
                (adapter, scales[adapter.id])
                for adapter in self.all
                if scales.get(adapter.id, 0.0) != 0.0
            )
        )

    def hold(self, selection: Selection) -> Lease:
        """Keep the adapters of a selection in the model until the lease is released."""
        lease = Lease(selection, self)
        if selection.chosen:
            self._leases.add(lease)
        return lease

    def give_back(self, lease: Lease) -> None:
        self._leases.discard(lease)

    # --- changes ---

    def set_scales(self, scales: Scales) -> None:
        """Replace the global scales; raises ``ApiError`` for an id that there is not."""
        self._check_ids(scales)
        self._scales = {adapter.id: scales.get(adapter.id, 0.0) for adapter in self.all}

    def check_room(self, name: str, num_bytes: int) -> None:
        """Raise ``ApiError`` if an adapter of that name and size would be one too many."""
        old = self._named.get(name)
        others = [*self.all, *self._retired.values()]
        if len(others) >= self.max_adapters and old is None:
            raise ApiError(ADAPTERS_FULL, limit=self.max_adapters)
        if sum(each.info.num_bytes for each in others) + num_bytes > self.max_bytes:
            raise ApiError(ADAPTERS_TOO_LARGE, limit=self.max_bytes)

    def add(self, name: str, handle: int, info: AdapterInfo, scale: float = 0.0) -> Adapter:
        """Give a name to an adapter that the model has. ``scale`` is for a name that is new."""
        old = self._named.get(name)
        if old is None:
            adapter = Adapter(self._next_id, name, handle, info)
            self._next_id += 1
            self._scales[adapter.id] = scale
        else:
            adapter = Adapter(old.id, name, handle, info)
            self._retired[old.handle] = old
        self._named[name] = adapter
        return adapter

    def remove(self, name: str) -> Adapter:
        """Take a name away; raises ``ApiError`` if there is none such."""
        if name not in self._named:
            raise ApiError(NO_ADAPTER, "lora_name")
        adapter = self._named.pop(name)
        del self._scales[adapter.id]
        self._retired[adapter.handle] = adapter
        return adapter

    # --- freeing ---

    def idle(self) -> tuple[Adapter, ...]:
        """Adapters without a name that nobody uses."""
        used = {each.handle for lease in self._leases for each, _ in lease.selection.chosen}
        return tuple(each for handle, each in self._retired.items() if handle not in used)

    def forget(self, adapter: Adapter) -> None:
        """The model has it no more."""
        del self._retired[adapter.handle]

    def _check_ids(self, ids: Iterable[int]) -> None:
        for each in ids:
            if each not in self._scales:
                raise ApiError(UNKNOWN_ADAPTER, "lora")


def scales_of(entries: Iterable[tuple[int, float]]) -> dict[int, float]:
    """A request's list by id; raises ``ApiError`` for an id that is there twice."""
    scales: dict[int, float] = {}
    for adapter_id, scale in entries:
        if adapter_id in scales:
            raise ApiError(REPEATED_ADAPTER, "lora")
        scales[adapter_id] = scale
    return scales
