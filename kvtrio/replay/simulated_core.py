"""The core as simulations run it: it decides the same, and hashes less.

Nobody attacks a simulation, and tokens are compared on every hit all the same. So keys need no
cryptography, and a conversation's next turn takes over those of the turn before as far as its
prompt is the same, whether or not a server was told its name; on a server, each prompt is hashed
from its start.
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import inf

from attrs import define, field

from kvtrio.core.batch import Batch, StepResult
from kvtrio.core.events import Abort, Output, Submit
from kvtrio.core.identity import Identity, KeyMaker, TokenTrail
from kvtrio.core.machine import Core

MAX_REMEMBERED = 1 << 21
"""Prompt tokens of last turns that are remembered, about 40 bytes each."""

PLAIN_KEYS = KeyMaker(b"known to everybody: simulated", b"simulated")


@define(eq=False)
class PlainTrail(TokenTrail):
    """Keys by Python's own hash, which differs from run to run: nothing depends on their order.
    Tags say what tokens are computed under, as long as the core lives."""

    stop: int | None = None
    """A chunk ends here, as where adapters change."""

    def next_border(self, position: int) -> int | None:
        border = super().next_border(position)
        if self.stop is None or self.stop <= position:
            return border
        return self.stop if border is None else min(border, self.stop)

    def _key_after(self, index: int, num_tokens: int) -> bytes:
        start = index * self.block_size
        parent = self.chain[index - 1] if index else b""
        number = hash((parent, self.tags[start : start + num_tokens].tobytes()))
        return number.to_bytes(8, "little", signed=True)


@define(eq=False)
class SimulatedCore(Core):
    """See the module."""

    conversations: Sequence[int | None] = ()
    """By request, its conversation in the scenario."""
    stops: Mapping[int, int] = field(factory=dict)
    """By request, the position up to which its prompt is read, where its client left before."""
    _trails: OrderedDict[int, tuple[TokenTrail, int]] = field(init=False, factory=OrderedDict)
    """Last turns, and how long their prompts were."""
    _identities: set[Identity] = field(init=False, factory=set)
    """All there were: keys outlive what they are of, and hold their numbers."""
    _num_remembered: int = field(init=False, default=0)

    def update(self, batch: Batch, result: StepResult, now: float) -> list[Output]:
        """A client that leaves does so while its last chunk is computed."""
        for chunk in batch.chunks if self.stops else ():
            if chunk.end >= self.stops.get(chunk.request_id, inf):
                self.handle(Abort(chunk.request_id), now)
        return super().update(batch, result, now)

    def _trail(self, submit: Submit) -> TokenTrail:
        told = super()._trail(submit)
        stop = self.stops.get(submit.request_id)
        trail = PlainTrail(told.keys, told.block_size, told.contexts, stop)
        trail.tags = told.tags
        self._identities.update(context.identity for _, context in told.contexts)
        conversation = self.conversations[submit.request_id]
        if conversation is not None:
            self._take_over(trail, conversation)
        return trail

    def _take_over(self, trail: TokenTrail, conversation: int) -> None:
        """The keys that the last turn has already; and be what the next one finds."""
        before, length = self._trails.pop(conversation, (None, 0))
        self._num_remembered += len(trail.tags) - length
        if before is not None:
            trail.chain += before.chain[: _num_same(before.tags, trail.tags) // trail.block_size]
        self._trails[conversation] = trail, len(trail.tags)
        while self._num_remembered > MAX_REMEMBERED:
            _, (_, length) = self._trails.popitem(last=False)
            self._num_remembered -= length


def _num_same(a: "array[int]", b: "array[int]") -> int:
    """Equal leading tags: the tokens and what they are computed under. By halving, since slices
    compare fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
