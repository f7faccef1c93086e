"""What places hold while nobody runs in them: read out, taken in, forgotten.

A place is a name for a sequence; its state is in the cache, like any other.
"""

from collections.abc import Sequence

from attrs import frozen

from kvtrio.core.arrival import has_sizes
from kvtrio.core.blocks import Block
from kvtrio.core.config import CoreConfig
from kvtrio.core.identity import TOKEN_MASK, TokenTrail
from kvtrio.core.lying import Lying, end_of, found, name_of
from kvtrio.core.resume import resumable
from kvtrio.core.session import SavedAdapter, SavedContext, SessionHead, StateName
from kvtrio.core.state import State
from kvtrio.core.stored import Incoming, StoreError, StoreFault

NOTHING = SessionHead(token_ids=(), contexts=(SavedContext(0),))


@frozen
class Held:
    """A place's sequence as far as its state is there, and how to get that."""

    head: SessionHead
    blocks: tuple[Lying, ...] = ()
    states: tuple[Lying, ...] = ()
    block_names: tuple[StateName, ...] = ()
    state_names: tuple[StateName, ...] = ()


def held_in(state: State, place: int, namespace: bytes) -> Held:
    """Of a place where nobody runs; nothing, if what is there is not of this namespace."""
    trail = _contents(state, place, namespace)
    return held_of(state, trail) if trail else Held(NOTHING)


def held_of(state: State, trail: TokenTrail) -> Held:
    """Of a sequence, wherever it ran, and whether memory has it or the disk."""
    keeper = state.cache.keeper
    match = state.cache.match(trail, len(trail.tags))
    there = found(match, trail, keeper.disk if keeper else None)
    num_tokens = there.num_tokens
    if not num_tokens:
        return Held(NOTHING)
    contexts = (
        SavedContext(start, tuple(SavedAdapter(use.digest, use.scale) for use in context.adapters))
        for start, context in trail.contexts
        if start < num_tokens
    )
    head = SessionHead(
        token_ids=tuple(tag & TOKEN_MASK for tag in trail.tags[:num_tokens]),
        contexts=tuple(contexts),
        state_positions=tuple(map(end_of, there.states)),
    )
    names = [
        tuple(name_of(each, state.keys, state.config) for each in kind)
        for kind in (there.blocks, there.states)
    ]
    return Held(head, there.blocks, there.states, *names)


def erase(state: State, place: int, namespace: bytes, now: float) -> None:
    """Forget what a place holds of a namespace, and its state as far as nobody else has a use for
    it."""
    trail = _contents(state, place, namespace)
    if trail is not None:
        path, _ = _path(state, trail)
        state.cache.forget(path, now)
        if state.cache.keeper is not None:
            num_kept = state.cache.match(trail, len(trail.tags)).num_tokens
            state.cache.keeper.forget(trail, num_kept)
        state.places.replace(place, None)


def num_resumable(state: State, trail: TokenTrail) -> int:
    """Tokens of a sequence behind which a request could go on."""
    match = state.cache.match(trail, len(trail.tags))
    return resumable(match, 0, state.tables.windows, state.cache.states is not None).num_tokens


def require_sizes(config: CoreConfig, pieces: Sequence[Incoming]) -> None:
    """Raise StoreError where parts are not of the sizes that state has here."""
    if not all(has_sizes(config, piece) for piece in pieces):
        raise StoreError(StoreFault.FORMAT)


def _contents(state: State, place: int, namespace: bytes) -> TokenTrail | None:
    trail = state.places.contents[place]
    is_theirs = trail is not None and trail.contexts[0][1].identity.namespace == namespace
    return trail if is_theirs else None


def _path(state: State, trail: TokenTrail) -> tuple[list[Block], int]:
    """The published blocks that hold a sequence's first tokens, and how many they hold."""
    match = state.cache.match(trail, len(trail.tags))
    blocks = list(match.blocks)
    if match.partial is not None:
        blocks.append(match.partial)
    return blocks, match.num_tokens
