"""The core as simulations run it: it decides the same, and hashes less.

Nobody attacks a simulation, and tokens are compared on every hit all the same. So keys need no
cryptography, and a session's next turn takes over those of the turn before as far as its prompt is
the same; on a server, each prompt is hashed from its start.
"""

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field

from kvtrio.core.events import Submit
from kvtrio.core.identity import KeyMaker, TokenTrail
from kvtrio.core.machine import Core

MAX_SESSIONS = 8192
"""Whose last trail is remembered."""


class PlainKeys(KeyMaker):
    """Keys by Python's own hash, which differs from run to run: nothing depends on their order."""

    def block_key(
        self, parent: bytes, start: int, token_ids: Sequence[int], runs: Sequence[bytes]
    ) -> bytes:
        number = hash((parent, start, *token_ids, *runs))
        return number.to_bytes(8, "little", signed=True)


PLAIN_KEYS = PlainKeys(b"known to everybody: simulated", b"simulated")


@define(eq=False)
class SimulatedCore(Core):
    """See the module."""

    _trails: OrderedDict[bytes, TokenTrail] = field(init=False, factory=OrderedDict)

    def _trail(self, submit: Submit) -> TokenTrail:
        trail = super()._trail(submit)
        if submit.session is None:
            return trail
        before = self._trails.pop(submit.session, None)
        if before is not None:
            trail.chain += before.chain[
                : _num_same(before.tags, trail.tags) // self.config.block_size
            ]
        self._trails[submit.session] = trail
        if len(self._trails) > MAX_SESSIONS:
            self._trails.popitem(last=False)
        return trail


def _num_same(a: list[int], b: list[int]) -> int:
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
