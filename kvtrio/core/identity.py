"""What state was computed with, and the one key that says so.

1. Names and ids are never part of a key: an adapter is its content's digest and its exact scale.
2. Every part that enters a key is typed and length-delimited, so that no two inputs collide by
   concatenation.
3. Keys are keyed hashes (BLAKE2b, RFC 7693): without the secret nobody can choose a collision or
   guess what is cached. The tokens are compared on every hit all the same.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from weakref import WeakValueDictionary

from attrs import define, field, frozen

DIGEST_BYTES = 32
TAG_SHIFT = 32
TOKEN_MASK = (1 << TAG_SHIFT) - 1
"""A tag is a token id with its context's number above it: equal tags, equal state."""


def tags_of(tags: Iterable[int] = ()) -> "array[int]":
    """Tags as they are kept: numbers of 64 bits side by side, which compare as fast as memory is
    read and take an eighth of the room of Python's own."""
    return array("Q", tags)


@frozen
class AdapterUse:
    """One adapter at one scale. ``adapter_id`` is the backend's handle and no part of identity."""

    adapter_id: int
    digest: bytes
    scale: float


def effective(uses: Iterable[AdapterUse]) -> tuple[AdapterUse, ...]:
    """The uses that change anything, in the one order in which their deltas are added."""
    return tuple(sorted((use for use in uses if use.scale != 0.0), key=_use_key))


def _use_key(use: AdapterUse) -> tuple[bytes, bytes]:
    return use.digest, struct.pack("<d", use.scale)


@frozen(eq=False)
class Identity:
    """Under what tokens were computed: tenant namespace and adapter set. Interned, and compared by
    ``number``; it lives as long as a request or a block refers to it."""

    number: int
    """Unique for the life of the process; the upper part of a tag."""
    namespace: bytes
    digest: bytes


@frozen(eq=False)
class Context:
    """An identity, with the handles of today for its adapters."""

    identity: Identity
    adapters: tuple[AdapterUse, ...]

    @property
    def number(self) -> int:
        return self.identity.number


@frozen
class Segment:
    """From ``start`` on, these adapters; the last segment also covers what is generated."""

    start: int
    adapters: tuple[AdapterUse, ...] = ()


@define(eq=False)
class ContextTable:
    """Interns identities: equal sets get equal numbers, whatever handles their adapters have, as
    long as anything that was computed under them is there."""

    known: WeakValueDictionary[tuple[bytes, ...], Identity] = field(
        init=False, factory=WeakValueDictionary
    )
    next_number: int = field(init=False, default=0)

    def intern(self, namespace: bytes, uses: Iterable[AdapterUse]) -> Context:
        adapters = effective(uses)
        key = (namespace, *(part for use in adapters for part in _use_key(use)))
        identity = self.known.get(key)
        if identity is None:
            identity = Identity(self.next_number, namespace, _digest(b"context", key))
            self.next_number += 1
            self.known[key] = identity
        return Context(identity, adapters)


def _digest(kind: bytes, parts: Iterable[bytes], secret: bytes = b"") -> bytes:
    hasher = blake2b(key=secret, digest_size=DIGEST_BYTES, person=kind.ljust(16, b"\0")[:16])
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


def root_identity(parts: Iterable[tuple[str, bytes]]) -> bytes:
    """Digest of named parts: key format, weights, resolved architecture, KV format, numerics."""
    return _digest(b"root", (item for name, value in parts for item in (name.encode(), value)))


@frozen
class KeyMaker:
    """The one key function of all tiers and derived caches."""

    secret: bytes
    """16 to 64 bytes; kept with the disk tier, or as long as the process."""
    root: bytes

    def root_key(self) -> bytes:
        return _digest(b"root key", (self.root,), self.secret)

    def block_key(
        self, parent: bytes, start: int, token_ids: Sequence[int], runs: Sequence[bytes]
    ) -> bytes:
        """Key of the block at ``start`` after ``parent``.

        ``runs`` describes the context of its tokens: alternating 4-byte offsets and digests. All
        parts but the tokens have a fixed size, and the number of tokens goes before them.
        """
        sizes = struct.pack("<QQ", start, len(token_ids))
        parts = (parent, sizes, array("I", token_ids).tobytes(), *runs)
        return blake2b(
            b"".join(parts), key=self.secret, digest_size=DIGEST_BYTES, person=b"block"
        ).digest()


@define(eq=False)
class TokenTrail:
    """One request's tokens with their contexts, and the chain of keys of its full blocks."""

    keys: KeyMaker
    block_size: int
    contexts: tuple[tuple[int, Context], ...]
    """(first position, context), ascending, the first at 0."""
    tags: "array[int]" = field(init=False, factory=tags_of)
    chain: list[bytes] = field(init=False, factory=list)

    @cached_property
    def _last_base(self) -> int:
        return self.contexts[-1][1].number << TAG_SHIFT

    def append(self, token_id: int) -> None:
        """A token that was generated: under the last context."""
        self.tags.append(token_id | self._last_base)

    def extend(self, token_ids: Sequence[int]) -> None:
        """As many times ``append``."""
        self.tags.extend(_tagged(token_ids, self._last_base))

    def extend_prompt(self, token_ids: Sequence[int]) -> None:
        """A whole prompt, one slice per context."""
        ends = [start for start, _ in self.contexts[1:]] + [len(token_ids)]
        for (start, context), end in zip(self.contexts, ends, strict=True):
            self.tags.extend(_tagged(token_ids[start:end], context.number << TAG_SHIFT))

    @cached_property
    def _identities(self) -> tuple[Identity, ...]:
        return tuple(context.identity for _, context in self.contexts)

    def identities(self, end: int) -> tuple[Identity, ...]:
        """Those of the tokens before ``end``, in order."""
        num = len(self.contexts)
        while num > 1 and self.contexts[num - 1][0] >= end:
            num -= 1
        return self._identities[:num]

    def context_at(self, position: int) -> Context:
        for start, context in reversed(self.contexts):
            if start <= position:
                return context
        raise AssertionError("the first context starts at 0")

    def next_border(self, position: int) -> int | None:
        """First position after ``position`` with another context."""
        return next((start for start, _ in self.contexts if start > position), None)

    def key(self, index: int) -> bytes:
        """Key of full block ``index``; its tokens must be there."""
        return self.keys_to(index + 1)[index]

    def keys_to(self, num_blocks: int) -> list[bytes]:
        """Keys of the first ``num_blocks`` full blocks, and perhaps of more; not to be changed."""
        chain = self.chain
        while len(chain) < num_blocks:
            chain.append(self._key_after(len(chain), self.block_size))
        return chain

    def key_of(self, index: int, num_tokens: int) -> bytes:
        """Key of the first ``num_tokens`` of block ``index``."""
        if num_tokens == self.block_size:
            return self.keys_to(index + 1)[index]
        if index:
            self.key(index - 1)
        return self._key_after(index, num_tokens)

    def _key_after(self, index: int, num_tokens: int) -> bytes:
        start = index * self.block_size
        end = start + num_tokens
        assert end <= len(self.tags), "keys are of tokens that are there"
        parent = self.chain[index - 1] if index else self.keys.root_key()
        tokens = [tag & TOKEN_MASK for tag in self.tags[start:end]]
        return self.keys.block_key(parent, start, tokens, self._runs(start, end))

    def _runs(self, start: int, end: int) -> list[bytes]:
        if len(self.contexts) == 1:
            return [bytes(4), self.contexts[0][1].identity.digest]
        return flat_runs(self.runs(start, end))

    def runs(self, start: int, end: int) -> list[tuple[int, bytes]]:
        """Contexts from ``start`` to ``end``: offset from ``start``, and digest."""
        runs: list[tuple[int, bytes]] = []
        position: int | None = start
        while position is not None and position < end:
            runs.append((position - start, self.context_at(position).identity.digest))
            position = self.next_border(position)
        return runs


def _tagged(token_ids: Sequence[int], base: int) -> Sequence[int]:
    """Tokens with their context's number above them. On many a server there is but one context,
    whose number is 0."""
    return list(map(base.__or__, token_ids)) if base else token_ids


def flat_runs(runs: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """As they enter a key."""
    return [part for offset, digest in runs for part in (struct.pack("<I", offset), digest)]
