"""What the server's state is known by: model, formats, secrets."""

import secrets
from hashlib import blake2b
from typing import Self

from attrs import evolve, field, frozen

from kvtrio.backends.base import BackendInfo, BackendSettings
from kvtrio.core.identity import KeyMaker, root_identity
from kvtrio.core.session import ServerIdentity
from kvtrio.model.spec import ModelSpec
from kvtrio.obs.identity import Sealer

KEY_FORMAT = b"1"
"""Raised when keys are made of other parts."""
SECRET_BYTES = 32


def _secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


@frozen
class Secrets:
    """One run's; they live as long as the process, unless a disk tier keeps them."""

    keys: bytes = field(factory=_secret, repr=False)
    """For the keys of blocks."""
    sealer: Sealer = field(factory=lambda: Sealer(_secret(), _secret()), repr=False)

    @classmethod
    def kept(cls, secret: bytes) -> Self:
        """With keys and tenants that are the same at every start with this secret: what lies on
        disk is found by them. Those of the log are new each time."""
        keys, tenants = (
            blake2b(key=secret, digest_size=SECRET_BYTES, person=kind).digest()
            for kind in (b"keys", b"tenants")
        )
        return cls(keys, Sealer(tenants, _secret()))


def server_identity(
    weights: bytes, spec: ModelSpec, info: BackendInfo, settings: BackendSettings
) -> ServerIdentity:
    """State is used under the same weights, shapes, formats and arithmetic only.

    ``weights``: digest of the model file, whose contents include the rope factors. The model's name
    has no part in it: a folder's is what somebody called it.
    """
    spec = evolve(spec, name="")
    groups = [
        (group.state_class.value, group.window, group.bytes_per_token, group.bytes_per_state)
        for group in info.groups
    ]
    kinds = f"{settings.dtype} {settings.key_type} {settings.value_type}"
    numerics = f"{info.name} {info.numerics} {settings.device} {kinds}"
    return ServerIdentity(
        model=root_identity((("weights", weights), ("architecture", repr(spec).encode()))),
        format=root_identity(
            (("kv format", f"{kinds} {groups}".encode()), ("numerics", numerics.encode()))
        ),
        block_size=settings.block_size,
    )


def key_maker(secret: bytes, identity: ServerIdentity) -> KeyMaker:
    """For the keys of blocks."""
    root = root_identity(
        (
            ("key format", KEY_FORMAT),
            ("model", identity.model),
            ("format", identity.format),
            ("block size", str(identity.block_size).encode()),
        )
    )
    return KeyMaker(secret, root)
