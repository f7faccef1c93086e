"""From pieces to prompts: atoms in place of what a scenario does not tell.

An atom is a whole number: a token id, or the place of a word in a list. The same scenario, seed and
vocabulary give the same prompts, on every machine.

1. Equal in the scenario, equal here: a reference is the very atoms that it means; what a server
   answered is put in where an answer is meant.
2. Different in the scenario, different here: the first new atom behind a known beginning is none
   that followed there before. Only where all of the vocabulary has followed, it may repeat.
3. A prompt is kept as long as one that is not made yet refers to it.
"""

from collections.abc import Sequence

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from kvtrio.replay.scenario import Block, Fresh, Part, Piece, Ref, Request

Atoms = NDArray[np.int64]
Node = tuple[int, int]
"""Behind so many atoms of a request's text: its prompt and, then, its answer."""
ROOT: Node = (-1, 0)
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
MASK = (1 << 64) - 1
OUTPUT, BLOCK = 1 << 20, 1 << 21
"""Set apart from the numbers of pieces."""


@frozen
class _Beginning:
    """A prompt begins with the first ``length`` atoms of another request's text."""

    request: int
    length: int


@define(eq=False)
class Realiser:
    """``prompt(number)`` once for each request that is sent; ``answered`` when its answer is there.

    ``vocabulary``: the atoms to choose from, all different.
    """

    requests: Sequence[Request]
    vocabulary: Atoms
    seed: int = 0
    _prompts: dict[int, Atoms] = field(init=False, factory=dict)
    _outputs: dict[int, Atoms] = field(init=False, factory=dict)
    _num_uses: dict[int, int] = field(init=False, factory=dict)
    """Per request, prompts to come that refer to it."""
    _beginnings: dict[int, _Beginning] = field(init=False, factory=dict)
    _followers: dict[Node, set[int]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        for request in self.requests:
            for other in _referred(request):
                self._num_uses[other] = self._num_uses.get(other, 0) + 1

    def needs(self, number: int) -> frozenset[int]:
        """Requests whose answers the prompt contains, and whose prompts are not made yet."""
        needed: set[int] = set()
        for each in self._missing(number):
            refs = _refs(self.requests[each])
            needed |= {ref.request for ref in refs if ref.part is Part.OUTPUT}
        return frozenset(needed)

    def prompt(self, number: int) -> Atoms:
        """Answers that it contains and that nobody has given are made up."""
        for each in self._missing(number):
            self._make(each)
        made = self._prompts[number]
        self._release(number)
        return made

    def answered(self, number: int, atoms: Atoms) -> None:
        """What was really answered; as long as the scenario says, or it is cut or continued."""
        length = self.requests[number].output_tokens
        whole = np.concatenate([atoms[:length], self._made_up(number)[len(atoms) : length]])
        if self._num_uses.get(number):
            self._outputs[number] = whole
        if length:
            end = self.requests[number].prompt_tokens
            self._followers.setdefault(self._node(number, end), set()).add(int(whole[0]))

    def sampling_seed(self, number: int) -> int:
        """The same for answers that were alike, else one of its own."""
        while (other := self.requests[number].same_as) is not None:
            number = other
        return mixed(self.seed, number, OUTPUT) >> 33

    def _missing(self, number: int) -> list[int]:
        """Prompts to make for this one, in order."""
        found: set[int] = set()
        todo = [] if number in self._prompts else [number]
        while todo:
            each = todo.pop()
            found.add(each)
            refs = _refs(self.requests[each])
            others = {ref.request for ref in refs if ref.part is Part.PROMPT}
            todo += [other for other in others if other not in self._prompts.keys() | found]
        return sorted(found)

    def _make(self, number: int) -> None:
        request = self.requests[number]
        beginning, num_pieces = _beginning(self.requests, request)
        node = ROOT
        if beginning.length:
            self._beginnings[number] = beginning
            node = self._node(number, beginning.length)
            self._note_next(beginning, node)
        parts: list[Atoms] = []
        for index, piece in enumerate(request.prompt):
            atoms = self._atoms(number, index, piece)
            if index == num_pieces and isinstance(piece, Fresh):
                self._part_ways(atoms, node, number)
            parts.append(atoms)
        made = np.concatenate(parts)
        if beginning.length < len(made):
            self._followers.setdefault(node, set()).add(int(made[beginning.length]))
        self._prompts[number] = made
        for other in _referred(request):
            self._num_uses[other] -= 1
            self._release(other)

    def _atoms(self, number: int, index: int, piece: Piece) -> Atoms:
        if isinstance(piece, Fresh):
            return self._drawn(mixed(self.seed, number, index), piece.length)
        if isinstance(piece, Block):
            return self._drawn(mixed(self.seed, piece.digest, BLOCK), piece.length)
        is_prompt = piece.part is Part.PROMPT
        text = self._prompts[piece.request] if is_prompt else self._output(piece.request)
        return text[piece.start : piece.start + piece.length]

    def _part_ways(self, atoms: Atoms, node: Node, number: int) -> None:
        """Change the first atom of ``atoms`` to one that never followed at ``node``."""
        taken, size = self._followers.get(node, set()), len(self.vocabulary)
        if len(taken) >= size:
            return
        first = mixed(self.seed, number, OUTPUT - 1) % size
        while int(self.vocabulary[first]) in taken:
            first = (first + 1) % size
        atoms[0] = self.vocabulary[first]

    def _note_next(self, beginning: _Beginning, node: Node) -> None:
        """What follows in the other text is taken."""
        other, at = beginning.request, beginning.length
        prompt = self._prompts[other]
        text, at = (
            (prompt, at) if at < len(prompt) else (self._outputs.get(other), at - len(prompt))
        )
        if text is not None and at < len(text):
            self._followers.setdefault(node, set()).add(int(text[at]))

    def _node(self, request: int, position: int) -> Node:
        """The one name of a place that several texts have in common: that of the first of them."""
        while (start := self._beginnings.get(request)) and position <= start.length:
            request = start.request
        return (request, position) if position else ROOT

    def _output(self, number: int) -> Atoms:
        if number not in self._outputs:
            self._outputs[number] = self._made_up(number)
        return self._outputs[number]

    def _made_up(self, number: int) -> Atoms:
        seed = mixed(self.seed, number, OUTPUT)
        return self._drawn(seed, self.requests[number].output_tokens)

    def _drawn(self, seed: int, length: int) -> Atoms:
        """SplitMix64, as ``core.sampling`` has it, for a whole row at once."""
        with np.errstate(over="ignore"):
            z = np.uint64(seed) + np.arange(1, length + 1, dtype=np.uint64) * GAMMA
            z = (z ^ (z >> np.uint64(30))) * MIX[0]
            z = (z ^ (z >> np.uint64(27))) * MIX[1]
        places = (z ^ (z >> np.uint64(31))) % np.uint64(len(self.vocabulary))
        return self.vocabulary[places.astype(np.int64)]

    def _release(self, number: int) -> None:
        if not self._num_uses.get(number):
            self._prompts.pop(number, None)
            self._outputs.pop(number, None)


def mixed(*numbers: int) -> int:
    """A scrambled number of 64 bits."""
    z = 0
    for number in numbers:
        z = (z + number + int(GAMMA)) & MASK
        z = ((z ^ (z >> 30)) * int(MIX[0])) & MASK
        z = ((z ^ (z >> 27)) * int(MIX[1])) & MASK
        z ^= z >> 31
    return z


def _refs(request: Request) -> list[Ref]:
    return [piece for piece in request.prompt if isinstance(piece, Ref)]


def _referred(request: Request) -> frozenset[int]:
    return frozenset(ref.request for ref in _refs(request))


def _beginning(requests: Sequence[Request], request: Request) -> tuple[_Beginning, int]:
    """What a prompt begins with, and how many pieces that is."""
    first = request.prompt[0]
    if not isinstance(first, Ref):
        return _Beginning(-1, 0), 0
    at, border = 0, requests[first.request].prompt_tokens
    for index, piece in enumerate(request.prompt):
        if not isinstance(piece, Ref) or piece.request != first.request:
            return _Beginning(first.request, at), index
        if piece.start + (border if piece.part is Part.OUTPUT else 0) != at:
            return _Beginning(first.request, at), index
        at += piece.length
    return _Beginning(first.request, at), len(request.prompt)
