"""Prompts of a trace that knows them by blocks only, and who goes on from whom.

A block's id says what the prompt is up to the block's end. A prompt's last block is mostly not
full; the next turn has other tokens behind the same ones, so a full block with another id stands
there. Taken as it is, each turn of a conversation would look like a rewrite of the one before. So
where a prompt goes on from an earlier one, it is taken to begin with that whole prompt and its
answer, to the token:

1. It has all full blocks of the other one, two at least, and then none that was seen before.
2. It is longer than the other prompt and its answer together.
3. What follows those blocks in the whole trace is of few kinds: else they are a system prompt.
"""

from collections.abc import Iterable, Iterator, Sequence

from attrs import define, field, frozen

from kvtrio.replay.scenario import Block, Fresh, Part, Piece, Ref

MIN_BLOCKS = 2
"""In common, to be one conversation."""
MAX_BRANCHES = 4
"""Different blocks behind one that belongs to a single conversation."""


@frozen
class Row:
    """One request; lengths in tokens."""

    ids: tuple[int, ...]
    num_prompt: int
    num_output: int


@define(eq=False)
class BlockTrace:
    """``size``: tokens in a full block."""

    rows: Sequence[Row]
    size: int
    _next: dict[int, set[int]] = field(init=False, factory=dict)
    """By id, the ids that follow it anywhere in the trace."""
    _seen: set[int] = field(init=False, factory=set)
    _ends: dict[int, int] = field(init=False, factory=dict)
    """By id of a last full block, the latest request that had it."""
    _lasts: dict[int, int] = field(init=False, factory=dict)
    """By id of a last block, full or not."""
    _continued: set[int] = field(init=False, factory=set)
    """Requests whose answers are in a later prompt."""
    _places: dict[int, tuple[int, int]] = field(init=False, factory=dict)
    """By id of a block that was put together: a request, and the position in its prompt."""
    _turns: list[tuple[int, int]] = field(init=False, factory=list)
    """By request, session and turn."""
    _num_turns: list[int] = field(init=False, factory=list)
    """By session."""

    def __attrs_post_init__(self) -> None:
        for row in self.rows:
            for one, other in zip(row.ids, row.ids[1:], strict=False):
                self._next.setdefault(one, set()).add(other)

    def requests(self) -> Iterator[tuple[int, int, tuple[Piece, ...]]]:
        """Session, turn and prompt of each; once."""
        for number, row in enumerate(self.rows):
            num_seen = next((n for n, each in enumerate(row.ids) if each not in self._seen), None)
            before = self._before(row, num_seen)
            pieces = tuple(_joined(self._pieces(number, before, num_seen)))
            yield *self._turn(before), pieces
            self._note(number)

    def _before(self, row: Row, num_seen: int | None) -> int | None:
        """The request that this one goes on from, or asks again."""
        if num_seen is None:
            is_long = len(row.ids) >= MIN_BLOCKS
            return self._lasts.get(row.ids[-1]) if is_long else None
        if num_seen < MIN_BLOCKS:
            return None
        fork = row.ids[num_seen - 1]
        other = self._ends.get(fork)
        if other is None or len(self._next[fork]) > MAX_BRANCHES:
            return None
        known = self.rows[other]
        return other if row.num_prompt > known.num_prompt + known.num_output else None

    def _turn(self, before: int | None) -> tuple[int, int]:
        session = len(self._num_turns) if before is None else self._turns[before][0]
        if before is None:
            self._num_turns.append(0)
        turn = session, self._num_turns[session]
        self._num_turns[session] += 1
        self._turns.append(turn)
        return turn

    def _note(self, number: int) -> None:
        row = self.rows[number]
        num_full = min(row.num_prompt // self.size, len(row.ids))
        if num_full:
            self._ends[row.ids[num_full - 1]] = number
        if row.ids:
            self._lasts[row.ids[-1]] = number
        self._seen.update(row.ids)

    def _pieces(self, number: int, before: int | None, num_seen: int | None) -> Iterator[Piece]:
        """The last one is what is left; what no id speaks of is new."""
        row, at = self.rows[number], 0
        is_next = before is not None and num_seen is not None
        for index, each in enumerate(row.ids):
            if is_next and index == num_seen and before is not None:
                bridge = list(self._bridge(number, before, at))
                yield from bridge
                at += sum(piece.length for piece in bridge)
            if (length := min((index + 1) * self.size, row.num_prompt) - at) > 0:
                yield from self._block(each, length)
                at += length
        if at < row.num_prompt:
            yield Fresh(row.num_prompt - at)

    def _bridge(self, number: int, before: int, at: int) -> Iterator[Piece]:
        """From the last full block that both have to the end of a block of the later one."""
        row, known, first = self.rows[number], self.rows[before], at // self.size
        if known.num_prompt > at:
            yield Ref(before, Part.PROMPT, at, known.num_prompt - at)
        at = known.num_prompt
        if before not in self._continued and known.num_output:
            # Another prompt that went on from it has other blocks, so perhaps not this answer.
            yield Ref(before, Part.OUTPUT, 0, known.num_output)
            at += known.num_output
        self._continued.add(before)
        end = min(-(-at // self.size) * self.size, row.num_prompt)
        if end > at:
            yield Fresh(end - at)
        last = -(-end // self.size)
        for index in range(first, min(last, len(row.ids))):
            self._places[row.ids[index]] = number, index * self.size

    def _block(self, digest: int, length: int) -> Iterator[Piece]:
        place = self._places.get(digest)
        if place is None:
            yield Block(digest, length)
            return
        request, start = place
        num_there = min(length, self.rows[request].num_prompt - start)
        yield Ref(request, Part.PROMPT, start, num_there)
        if num_there < length:
            yield Fresh(length - num_there)


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """References that go on from each other as one."""
    last: Piece | None = None
    for piece in pieces:
        if (
            isinstance(last, Ref)
            and isinstance(piece, Ref)
            and (last.request, last.part, last.start + last.length)
            == (piece.request, piece.part, piece.start)
        ):
            last = Ref(last.request, last.part, last.start, last.length + piece.length)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
