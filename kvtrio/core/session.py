"""A saved conversation as its three handlers pass it on: memory, files, routes.

It names no keys and no tenant: whoever restores it gets it as state of their own, under the keys of
the server that restores.
"""

from hashlib import blake2b

from attrs import frozen

DIGEST_BYTES = 32


@frozen
class SavedAdapter:
    """One adapter at one scale, by content."""

    digest: bytes
    scale: float


@frozen
class SavedContext:
    """Under what the tokens from ``start`` on were computed."""

    start: int
    adapters: tuple[SavedAdapter, ...] = ()
    """Those that change anything, in the order of ``identity.effective``."""


@frozen
class ServerIdentity:
    """Which state a server can use. Digests of 32 bytes, the same on every server."""

    model: bytes
    """Weights and resolved architecture."""
    format: bytes
    """KV format and arithmetic."""
    block_size: int
    """Tokens in a block."""


@frozen(kw_only=True)
class SessionHead:
    """All of a session but its bytes.

    Blocks cover the tokens from 0 on without gaps, ``ServerIdentity.block_size`` each, the last one
    perhaps fewer. States of recurrent layers stand at ``state_positions``.
    """

    token_ids: tuple[int, ...]
    """Those whose state is there: prompt and answer, without the answer's last token."""
    contexts: tuple[SavedContext, ...]
    """Ascending, the first at 0."""
    state_positions: tuple[int, ...] = ()
    """Ascending; each is a number of tokens, from 1 to all."""

    def num_blocks(self, block_size: int) -> int:
        return -(-len(self.token_ids) // block_size)


Parts = tuple[bytes, ...]
"""Raw bytes of a block or a state, one part per group as in ``stored.Stored``."""


@frozen
class Piece:
    """A file of state: its content's digest, which is its name, and its size."""

    digest: bytes
    size: int


@frozen
class StateName:
    """What a block or a state is known by in this process: equal names are equal state, whoever
    computed it."""

    key: bytes
    state_offset: int
    """0 for a block; else the state behind so many of its tokens."""
    is_whole: bool = True
    """False: of a block without what its groups with a sliding window had."""


@frozen(kw_only=True)
class SessionInfo:
    """A saved session, without what is in it."""

    name: str
    identity: ServerIdentity
    num_tokens: int
    num_states: int
    num_bytes: int
    """Of all its files, those that it shares with other sessions included."""
    num_new_bytes: int = 0
    """Of those that were written for it when it was saved."""


def owner_tag(api_key: bytes, salt: str) -> bytes:
    """Whose a session is. No secret of a server enters: the same key finds it on every one."""
    hasher = blake2b(digest_size=DIGEST_BYTES, person=b"session owner")
    hasher.update(len(api_key).to_bytes(8, "little") + api_key)
    hasher.update(salt.encode("utf-8", "replace"))
    return hasher.digest()
