"""The prefix index: a tree of published blocks, found by key, compared by tokens.

1. Every block in it, but the root, has its parent in it.
2. A block with fewer tokens than ``block_size`` has no children.
3. No block's tokens are a prefix of a sibling's, since the longer one serves for both; one that is
   in use when the longer one comes stays until it is evicted.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from attrs import define, field, frozen

from kvtrio.core.blocks import Block, Checkpoint
from kvtrio.core.identity import TAG_SHIFT, TOKEN_MASK, TokenTrail, tags_of


@frozen
class Match:
    """The longest known prefix of some tokens."""

    blocks: tuple[Block, ...]
    """Whole blocks, in order."""
    partial: Block | None
    """A block that goes on with the same ``num_partial`` tokens, then differently or no more."""
    num_partial: int
    num_tokens: int
    checkpoint: Checkpoint | None = None
    """At its end; of models with recurrent layers, where ``whole`` is the match of the tokens."""
    whole: "Match | None" = None

    @property
    def num_same(self) -> int:
        """Tokens that are known, whether or not a request can resume behind them."""
        return self.num_tokens if self.whole is None else self.whole.num_tokens


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of equal leading items."""
    for i, (x, y) in enumerate(zip(a, b)):  # noqa: B905 (lengths may differ)
        if x != y:
            return i
    return min(len(a), len(b))


def _tags(block: Block) -> "array[int]":
    return block.tags


def _start(block: Block) -> tuple[bytes, tuple[int, ...]]:
    return block.identities[0].namespace, tuple(tag & TOKEN_MASK for tag in block.tags)


@define(eq=False)
class PrefixIndex:
    """match / insert / remove; see the module's rules."""

    block_size: int
    root: Block = field(init=False, factory=lambda: Block(ids=(), num_refs=0))
    by_key: dict[bytes, list[Block]] = field(init=False, factory=dict)
    """Lists, since keys may collide: then the tokens decide, and only speed suffers."""
    num_blocks: int = field(init=False, default=0)
    starts: dict[tuple[bytes, tuple[int, ...]], dict[int, Block]] = field(init=False, factory=dict)
    """Namespace and tokens of a whole first block: the blocks with those, per identity's number."""

    def match(self, trail: TokenTrail, limit: int, known: list[Block] | None = None) -> Match:
        """The longest published prefix of ``trail``'s first ``limit`` tokens.

        ``known``, blocks that were found before, saves looking them up again; it is brought up to
        date. Nothing else is changed.
        """
        size, tags, keys = self.block_size, trail.tags, trail.chain
        blocks = [] if known is None else known
        # Blocks are dropped leaf first: if the last one is still published, so are all.
        while blocks and (blocks[-1].key is None or blocks[-1].end > limit):
            blocks.pop()
        parent = blocks[-1] if blocks else self.root
        for index in range(len(blocks), limit // size):
            if not parent.children:
                break
            key = keys[index] if index < len(keys) else trail.key(index)
            child = self.find(parent, key, tags[index * size : (index + 1) * size])
            if child is None:
                break
            blocks.append(child)
            parent = child
        start = len(blocks) * size
        partial, num = self._longest(parent, tags[start : min(start + size, limit)])
        return Match(tuple(blocks), partial, num, start + num)

    def others(self, trail: TokenTrail) -> list[int]:
        """Numbers of other identities of the namespace under which the first block is known."""
        identity = trail.contexts[0][1].identity
        tokens = tuple(tag & TOKEN_MASK for tag in trail.tags[: self.block_size])
        numbers = self.starts.get((identity.namespace, tokens), {})
        return [number for number in numbers if number != identity.number]

    def follow(self, tags: "array[int]", number: int, limit: int) -> int:
        """How many of the first ``limit`` tokens of ``tags`` are known under another identity;
        costs what is found, no hashing."""
        base, size, parent, start = number << TAG_SHIFT, self.block_size, self.root, 0
        while start < limit:
            some = tags[start : min(start + size, limit)]
            child, num = self._longest(parent, tags_of(tag & TOKEN_MASK | base for tag in some))
            start += num
            if child is None or num < size:
                break
            parent = child
        return start

    def _is_start(self, block: Block) -> bool:
        """Of a first block: whether it is a whole one under one identity."""
        return len(block.tags) == self.block_size and len(block.identities) == 1

    def find(self, parent: Block, key: bytes, tags: "array[int]") -> Block | None:
        """The child of ``parent`` that holds exactly ``tags``."""
        for block in self.by_key.get(key, ()):
            if block.parent is parent and block.tags == tags:
                return block
        return None

    def _longest(self, parent: Block, wanted: "array[int]") -> tuple[Block | None, int]:
        if not parent.children:
            return None, 0
        at = bisect_left(parent.children, wanted, key=_tags)
        best: Block | None = None
        longest = 0
        for child in parent.children[max(at - 1, 0) : at + 1]:
            if (num := common_prefix(child.tags, wanted)) > longest:
                best, longest = child, num
        return best, longest

    def insert(self, block: Block, parent: Block) -> Block | None:
        """Publish ``block`` (key, start, tags set) below ``parent``.

        Returns the sibling that it makes superfluous, to be dropped by the caller (as soon as
        nobody uses it), if there is one. The block itself must not be superfluous.
        """
        assert block.key is not None
        block.parent, siblings = parent, parent.children
        at = bisect_left(siblings, block.tags, key=_tags) if siblings else 0
        siblings.insert(at, block)
        self.by_key.setdefault(block.key, []).append(block)
        self.num_blocks += 1
        if parent is self.root and self._is_start(block):
            self.starts.setdefault(_start(block), {})[block.identities[0].number] = block
        before = siblings[at - 1] if at else None
        if before is not None and block.tags[: len(before.tags)] == before.tags:
            return before
        return None

    def covering(self, parent: Block, tags: "array[int]") -> Block | None:
        """The child of ``parent`` that begins with all of ``tags``."""
        child, num = self._longest(parent, tags)
        return child if num == len(tags) else None

    def remove(self, block: Block) -> None:
        """Take a childless block out; it can be matched no more."""
        assert block.key is not None
        assert block.parent is not None
        assert not block.children
        siblings = block.parent.children
        del siblings[bisect_left(siblings, block.tags, key=_tags) if len(siblings) > 1 else 0]
        if block.parent is self.root and self._is_start(block):
            starts = self.starts[_start(block)]
            del starts[block.identities[0].number]
            if not starts:
                del self.starts[_start(block)]
        bucket = self.by_key[block.key]
        bucket.remove(block)
        if not bucket:
            del self.by_key[block.key]
        self.num_blocks -= 1
        block.key = block.parent = None
