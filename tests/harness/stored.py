"""Small blocks and sessions for the tests of ``kvtrio.store``."""

from hashlib import blake2b
from random import Random

from kvtrio.core.session import (
    Parts,
    SavedAdapter,
    SavedContext,
    ServerIdentity,
    SessionHead,
)
from kvtrio.core.stored import RunOfContext, Stored, StoredHead
from kvtrio.store.sessions import SessionStore

SECRET = bytes(range(32))
ROOT = b"\x01" * 32
BLOCK_SIZE = 4
IDENTITY = ServerIdentity(b"m" * 32, b"f" * 32, BLOCK_SIZE)


def digest(*words: object) -> bytes:
    return blake2b(repr(words).encode(), digest_size=32).digest()


def entry(number: int, parent: Stored | None = None, num_bytes: int = 100) -> Stored:
    """A block, behind ``parent``, whose bytes follow from its number."""
    rng = Random(number)
    head = StoredHead(
        key=digest("key", number),
        parent=parent.head.key if parent else ROOT,
        start=parent.head.start + BLOCK_SIZE if parent else 0,
        token_ids=tuple(rng.randrange(50_000) for _ in range(BLOCK_SIZE)),
        runs=(RunOfContext(0, digest("base")), RunOfContext(2, digest("adapter"))),
    )
    return Stored(head, (rng.randbytes(num_bytes), b"", rng.randbytes(7)))


def state(block: Stored) -> Stored:
    """The state behind a block's tokens."""
    head = block.head
    head = StoredHead(head.key, head.parent, head.start, head.token_ids, head.runs, BLOCK_SIZE)
    return Stored(head, (Random(head.start).randbytes(64),))


def chain(first: int, length: int) -> list[Stored]:
    blocks: list[Stored] = []
    for number in range(first, first + length):
        blocks.append(entry(number, blocks[-1] if blocks else None))
    return blocks


def head_of(tokens: range, num_states: int = 1) -> SessionHead:
    adapters = (SavedAdapter(digest("adapter"), 0.1),)
    return SessionHead(
        token_ids=tuple(tokens),
        contexts=(SavedContext(0), SavedContext(2, adapters)),
        state_positions=tuple(range(3, 3 + num_states)),
    )


def block_parts(head: SessionHead, index: int) -> Parts:
    tokens = head.token_ids[: (index + 1) * BLOCK_SIZE]
    return Random(repr(tokens)).randbytes(300), b""


def state_parts(head: SessionHead, index: int) -> Parts:
    return (Random(repr(head.token_ids[: head.state_positions[index]])).randbytes(50),)


def save(store: SessionStore, name: str, head: SessionHead, owner: bytes = b"owner") -> int:
    """Bytes that were written."""
    with store.saving(name, head, IDENTITY, owner) as writer:
        for i in range(head.num_blocks(BLOCK_SIZE)):
            writer.add_block(block_parts(head, i))
        for i in range(len(head.state_positions)):
            writer.add_state(state_parts(head, i))
        return writer.commit().num_new_bytes


def restored(store: SessionStore, name: str, owner: bytes | None = b"owner") -> SessionHead:
    """A session's head, when all its bytes are what ``save`` writes."""
    with store.restoring(name, IDENTITY, lambda digest: True, owner) as reader:
        head = reader.head
        for i in range(head.num_blocks(BLOCK_SIZE)):
            assert reader.block(i) == block_parts(head, i)
        for i in range(len(head.state_positions)):
            assert reader.state(i) == state_parts(head, i)
    return head
