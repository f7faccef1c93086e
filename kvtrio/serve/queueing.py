"""Who asks, and what that and the request's fields mean for its turn."""

from kvtrio.serve.job import Queueing
from kvtrio.serve.keeping import Asker
from kvtrio.serve.schema import Extension, GenerationBody
from kvtrio.serve.services import ServeSettings


def queueing(body: GenerationBody, asker: Asker, settings: ServeSettings) -> Queueing:
    """The deadline becomes a time on the engine's clock: nothing that is done before the queue
    delays it."""
    ours = body.kvtrio or Extension()
    limits_s = [
        None if ours.deadline_ms is None else ours.deadline_ms / 1e3,
        settings.max_waiting_s,
    ]
    limit_s = min((each for each in limits_s if each is not None), default=None)
    return Queueing(
        tenant=_tenant(asker.api_key, body.user, settings),
        priority=ours.priority or 0,
        deadline_s=None if limit_s is None else asker.arrived_s + limit_s,
        predict=bool(ours.predict),
    )


def _tenant(api_key: bytes | None, user: str | None, settings: ServeSettings) -> bytes:
    """One for all where there are no keys and no users."""
    if api_key is None and not user:
        return b""
    return settings.sealer.tenant(api_key or b"", user or "")
