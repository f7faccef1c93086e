"""Who asks, and what that and the request's fields mean for the state it uses and leaves."""

from attrs import frozen

from kvtrio.core.session import owner_tag
from kvtrio.core.types import Retain
from kvtrio.serve.errors import NEEDS, UNKNOWN_PURPOSE, ApiError
from kvtrio.serve.job import Keeping, NamedSession, Owner
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
    owner = owner_of(asker, body.cache_salt, settings)
    session = ours.session
    return Keeping(
        owner=owner,
        reuse=body.cache_prompt is not False,
        retain=_retain(ours),
        retain_s=ours.retain_s or 0.0,
        session=None if session is None else settings.sealer.session(owner.namespace, session),
        named=_named(ours),
        purpose=_purpose(ours, settings.purposes),
    )


def owner_of(asker: Asker, salt: str | None, settings: ServeSettings) -> Owner:
    """One for all where there are no keys and no salt."""
    if asker.api_key is None and not salt:
        return Owner()
    key, salt = asker.api_key or b"", salt or ""
    return Owner(settings.sealer.namespace(key, salt), owner_tag(key, salt))


def _named(ours: Extension) -> NamedSession | None:
    is_to_be_saved = bool(ours.save_session)
    if ours.session is None and is_to_be_saved:
        raise ApiError(NEEDS, "kvtrio.save_session", other="kvtrio.session")
    return None if ours.session is None else NamedSession(ours.session, is_to_be_saved)


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
