"""Adapters that come and go while the server runs.

1. A load reads and checks the whole adapter before anything changes.
2. One change at a time; requests go on meanwhile, and take the change from their admission on.
3. What lost its name is freed by ``reap`` when the last request that uses it has ended.
"""

from collections.abc import Callable
from pathlib import Path

import trio
from attrs import define, field, frozen

from kvtrio.core.identity import AdapterUse
from kvtrio.engine import Engine
from kvtrio.engine.offload import Offload
from kvtrio.model.adapters import AdapterData, load_adapter
from kvtrio.model.errors import ModelFileError
from kvtrio.model.paths import open_inside
from kvtrio.model.spec import ModelSpec
from kvtrio.obs.events import AdapterChange
from kvtrio.obs.identity import adapter_set
from kvtrio.obs.schema import Digest
from kvtrio.obs.words import AdapterEvent
from kvtrio.serve.adapters import Adapter, AdapterInfo, Adapters, Lease, Scales, is_name
from kvtrio.serve.errors import (
    ADAPTER_REFUSED,
    NO_ADAPTER_DIR,
    NO_ADAPTER_ROOM,
    TAKEN_NAME,
    WRONG_VALUE,
    ApiError,
)

NAMES = "expected printable characters without commas"


@frozen(kw_only=True)
class LoadingSettings:
    """Fixed at start."""

    folder: Path | None
    """Where requests may load from; None: they may not."""
    spec: ModelSpec
    reserved: str
    """The model's own name."""
    log_key: bytes = field(repr=False)
    emit: Callable[[AdapterChange], None]
    """Writes a log line."""


@define(eq=False)
class AdapterLoader:
    """Changes ``adapters`` and the model together."""

    adapters: Adapters
    settings: LoadingSettings
    _engine: Engine
    _offload: Offload
    _lock: trio.Lock = field(init=False, factory=trio.Lock)
    _news: trio.Event = field(init=False, factory=trio.Event)
    """Something may be idle now."""

    # --- requests' side ---

    async def load(self, name: str, path: str) -> Adapter:
        """Load what lies at ``path`` below the folder, under ``name``, which may be taken already.

        Raises ``ApiError``.
        """
        folder = self.settings.folder
        if folder is None:
            raise ApiError(NO_ADAPTER_DIR)
        if not is_name(name):
            raise ApiError(WRONG_VALUE, "lora_name", expected=NAMES)
        if name == self.settings.reserved:
            raise ApiError(TAKEN_NAME, "lora_name")
        async with self._lock:
            self.adapters.check_room(name, 0)
            data = await self._offload.run(self._read, folder, path)
            self.adapters.check_room(name, data.num_bytes)
            return await self.put(name, AdapterInfo.of(path.rpartition("/")[2], data), data)

    def _read(self, folder: Path, path: str) -> AdapterData:
        try:
            return load_adapter(open_inside(folder, path), self.settings.spec)
        except ModelFileError as error:
            raise ApiError(ADAPTER_REFUSED, "lora_path", expected=str(error)) from None

    async def put(
        self, name: str, info: AdapterInfo, data: AdapterData, scale: float = 0.0
    ) -> Adapter:
        """Hand a checked adapter to the model and give it its name."""
        try:
            handle = await self._engine.load_adapter(data)
        except ValueError:  # the backend's word for "no room, or not for this model"
            raise ApiError(NO_ADAPTER_ROOM, "lora_path") from None
        is_known = self.adapters.find(name) is not None
        adapter = self.adapters.add(name, handle, info, scale)
        self._tell(AdapterEvent.REPLACED if is_known else AdapterEvent.LOADED, adapter)
        self._news.set()
        return adapter

    async def unload(self, name: str) -> Adapter:
        """Take ``name`` away; raises ``ApiError`` if there is no such adapter."""
        async with self._lock:
            adapter = self.adapters.remove(name)
            self._tell(AdapterEvent.UNLOADED, adapter)
            self._news.set()
            return adapter

    def set_scales(self, scales: Scales) -> None:
        """Replace the global scales; raises ``ApiError``, with nothing changed."""
        before = dict(self.adapters.scales)
        self.adapters.set_scales(scales)
        for adapter in self.adapters.all:
            if self.adapters.scales[adapter.id] != before[adapter.id]:
                self._tell(AdapterEvent.SCALED, adapter)

    def release(self, lease: Lease) -> None:
        """A request has ended. Synchronous: it may have ended by cancellation."""
        lease.release()
        self._news.set()

    # --- freeing ---

    async def reap(self) -> None:
        """Free what nobody uses, for ever; the task of whoever owns the server."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            for adapter in self.adapters.idle():
                # Booked first: nobody else may find it idle while the model lets go of it.
                self.adapters.forget(adapter)
                await self._engine.unload_adapter(adapter.handle)
                self._tell(AdapterEvent.FREED, adapter)

    def _tell(self, what: AdapterEvent, adapter: Adapter) -> None:
        settings = self.settings
        self.settings.emit(
            AdapterChange(
                what=what,
                name=Digest.of(adapter.name, settings.log_key),
                content=content_digest(adapter, settings.log_key),
                scale=self.adapters.scales.get(adapter.id, 0.0),
                num_bytes=adapter.info.num_bytes,
                num_loaded=len(self.adapters.all),
            )
        )


def content_digest(adapter: Adapter, log_key: bytes) -> Digest:
    """How ``request.done`` shows the adapter alone at scale 1."""
    digest = adapter_set([AdapterUse(adapter.handle, adapter.info.digest, 1.0)], log_key)
    assert digest is not None
    return digest
