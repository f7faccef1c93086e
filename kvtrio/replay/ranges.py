"""Prompts and answers as ranges of a made-up vocabulary, in which no token comes twice by chance.

1. What a scenario calls fresh is a range that was never given out: it differs from all there is.
2. A reference is the part of earlier ranges that it names; a prompt made of hundreds of thousands
   of tokens is a few pairs of numbers.
3. An answer that a scenario says was equal to another one's (``same_as``) is the same range, as
   far as both go; or as far as it says (``begins_as``).
"""

from collections.abc import Iterable

from attrs import define, field

from kvtrio.replay.scenario import Block, Fresh, Part, Piece, Ref, Request

Ranges = tuple[range, ...]


def joined(parts: Iterable[range]) -> Ranges:
    """The same tokens in as few ranges as can be."""
    found: list[range] = []
    for part in parts:
        if not part:
            continue
        if found and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop)
        else:
            found.append(part)
    return tuple(found)


def cut(ranges: Ranges, start: int, length: int) -> list[range]:
    """``length`` tokens from position ``start`` on; there must be so many."""
    found: list[range] = []
    for each in ranges:
        if length <= 0:
            break
        part = each[start : start + length] if start < len(each) else each[:0]
        start = max(0, start - len(each))
        length -= len(part)
        if part:
            found.append(part)
    assert length <= 0, "a checked scenario refers to what is there"
    return found


def total(ranges: Ranges) -> int:
    return sum(map(len, ranges))


@define(eq=False)
class Vocabulary:
    """Gives tokens to the requests of a scenario, in order."""

    prompts: list[Ranges] = field(factory=list)
    """By request."""
    outputs: list[Ranges] = field(factory=list)
    num_tokens: int = 0
    """Tokens given out."""
    _rows: dict[int, Ranges] = field(init=False, factory=dict)
    """What digests stand for, as far as it was asked for."""

    def add(self, request: Request) -> None:
        """The next request, whose number is that of those before it."""
        assert request.id == len(self.prompts)
        prompt = joined(part for piece in request.prompt for part in self._tokens(piece))
        self.prompts.append(prompt)
        self.outputs.append(self._output(request))

    def _tokens(self, piece: Piece) -> list[range]:
        match piece:
            case Fresh(length):
                return [self._new(length)]
            case Block(digest, length):
                row = self._rows.get(digest, ())
                if (missing := length - total(row)) > 0:
                    row = self._rows[digest] = joined((*row, self._new(missing)))
                return cut(row, 0, length)
            case Ref(request, part, start, length):
                known = self.prompts if part is Part.PROMPT else self.outputs
                return cut(known[request], start, length)

    def _output(self, request: Request) -> Ranges:
        length, begins_as = request.output_tokens, request.begins_as
        known: list[range] = []
        if begins_as is not None:
            known = cut(self.outputs[begins_as.request], 0, begins_as.length)
        elif request.same_as is not None:
            same = self.outputs[request.same_as]
            known = cut(same, 0, min(length, total(same)))
        num_new = length - sum(map(len, known))
        return joined([*known, self._new(num_new)] if num_new else known)

    def _new(self, length: int) -> range:
        start, self.num_tokens = self.num_tokens, self.num_tokens + length
        return range(start, self.num_tokens)
