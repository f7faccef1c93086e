"""Callers' names and adapter sets as opaque digests: equal or not, and nothing else."""

import struct
from collections.abc import Iterable
from hashlib import blake2b

from attrs import frozen

from kvtrio.core.identity import AdapterUse
from kvtrio.obs.schema import Digest

NAMESPACE_BYTES = 32


@frozen
class Sealer:
    """Makes the digests. Keys of 16 to 64 bytes, secret."""

    tenant_key: bytes
    """For namespaces; as long as the process."""
    log_key: bytes
    """For everything that a log line shows."""

    def namespace(self, api_key: bytes, salt: str) -> bytes:
        """The tenant of an API key; a salt only narrows it: nobody gets into another's."""
        hasher = blake2b(key=self.tenant_key, digest_size=NAMESPACE_BYTES, person=b"namespace")
        hasher.update(len(api_key).to_bytes(8, "little") + api_key)
        hasher.update(salt.encode("utf-8", "replace"))
        return hasher.digest()

    def tenant(self, api_key: bytes, user: str) -> bytes:
        """Who is served, for a fair share: the holder of a key, or one user among the holder's.
        Unlike the namespace it has no salt, which would make a new tenant of every request."""
        hasher = blake2b(key=self.tenant_key, digest_size=NAMESPACE_BYTES, person=b"tenant")
        hasher.update(len(api_key).to_bytes(8, "little") + api_key)
        hasher.update(user.encode("utf-8", "replace"))
        return hasher.digest()

    def session(self, namespace: bytes, name: str) -> bytes:
        """Eight bytes; another tenant's session of the same name is another."""
        digest = Digest.of_bytes(namespace + b"\0" + name.encode("utf-8", "replace"), self.log_key)
        return digest.value.to_bytes(8)


def adapter_set(uses: Iterable[AdapterUse], key: bytes) -> Digest | None:
    """Digest of an effective set, in canonical order; None for the base model."""
    parts = b"".join(use.digest + struct.pack("<d", use.scale) for use in uses)
    return Digest.of_bytes(parts, key) if parts else None
