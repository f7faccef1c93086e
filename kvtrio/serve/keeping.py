"""Who asks, and what that and the request's fields mean for the state it uses and leaves."""

from attrs import frozen

from kvtrio.core.types import Retain
from kvtrio.serve.errors import NEEDS, UNKNOWN_PURPOSE, ApiError
from kvtrio.serve.job import Keeping
from kvtrio.serve.schema import Extension, GenerationBody
from kvtrio.serve.services import ServeSettings

AUXILIARY_PURPOSES = frozenset({"title", "recap", "probe"})
"""Asked once and never continued: not kept, unless the request says otherwise."""


@frozen
class Asker:
    """What a request brings besides its body."""

    api_key: bytes | None
    """The key that opened the API; None: it is open to everybody."""
    seed: int
    """For a request without one."""
    arrived_s: float
    """On the engine's clock."""


def keeping(body: GenerationBody, asker: Asker, settings: ServeSettings) -> Keeping:
    """Raises ``ApiError``."""
    ours = body.kvtrio or Extension()
    namespace = _namespace(asker.api_key, body.cache_salt, settings)
    session = ours.session
    return Keeping(
        namespace=namespace,
        reuse=body.cache_prompt is not False,
        retain=_retain(ours),
        retain_s=ours.retain_s or 0.0,
        session=None if session is None else settings.sealer.session(namespace, session),
        purpose=_purpose(ours, settings.purposes),
    )


def _namespace(api_key: bytes | None, salt: str | None, settings: ServeSettings) -> bytes:
    """One for all where there are no keys and no salt."""
    if api_key is None and not salt:
        return b""
    return settings.sealer.namespace(api_key or b"", salt or "")


def _purpose(ours: Extension, purposes: tuple[str, ...]) -> int | None:
    if ours.purpose is None:
        return None
    if ours.purpose not in purposes:
        raise ApiError(UNKNOWN_PURPOSE, "kvtrio.purpose")
    return purposes.index(ours.purpose)


def _retain(ours: Extension) -> Retain:
    default = "auxiliary" if ours.purpose in AUXILIARY_PURPOSES else "normal"
    retain = Retain(ours.retain or default)
    if retain is Retain.PIN and ours.retain_s is None:
        raise ApiError(NEEDS, "kvtrio.retain", other="kvtrio.retain_s")
    if retain is not Retain.PIN and ours.retain_s is not None:
        raise ApiError(NEEDS, "kvtrio.retain_s", other="kvtrio.retain: pin")
    return retain
