"""How every request for text comes in: its body, its job, its adapters."""

from collections.abc import Callable

import trio
from attrs import field, frozen
from quart import request

from kvtrio.serve.adapters import Lease
from kvtrio.serve.cleanup import cleanup
from kvtrio.serve.guards import given_key
from kvtrio.serve.info import PlaceSettings
from kvtrio.serve.job import Job
from kvtrio.serve.keeping import Asker
from kvtrio.serve.services import Services
from kvtrio.serve.shown_settings import short_settings


async def whole_body() -> bytes:
    """Return the body whatever its content type says; quart's limits raise."""
    return await request.get_data(cache=False, as_text=False, parse_form_data=False)


@frozen(eq=False)
class Arrivals:
    """For handlers; finds the request in quart's context."""

    services: Services
    shown: PlaceSettings = field(factory=dict)

    async def job(self, prepare: Callable[[bytes, Asker], Job]) -> Job:
        """The request as a job."""
        asker, raw = self.asker(), await whole_body()
        return await self.services.offload.run(prepare, raw, asker, num_bytes=len(raw))

    def admitted(self, job: Job) -> tuple[Job, Lease]:
        """With its adapters. Nothing may wait from here to the engine: what is resolved is what is
        admitted."""
        services = self.services
        selection = services.loader.adapters.select(job.lora, job.model_name)
        lease = services.loader.adapters.hold(selection)
        cleanup(request).callback(services.loader.release, lease)
        return job.admitted(selection), lease

    def asker(self) -> Asker:
        settings = self.services.settings
        api_key = given_key(request.headers) if settings.api_keys else None
        return Asker(api_key, settings.new_seed(), trio.current_time())

    def on_start(self, lease: Lease) -> Callable[[int, Job], None]:
        """To be told the place in which a job runs."""

        def note(place: int, job: Job) -> None:
            lease.is_running = True
            self.shown[place] = short_settings(job)

        return note

    def model_name(self, job: Job) -> str:
        """What the answer calls the model."""
        name = job.model_name
        is_adapter = name is not None and self.services.loader.adapters.find(name) is not None
        return name if name is not None and is_adapter else self.services.model.alias
