"""How a client that leaves is played.

When a server notices that a client left depends on microseconds; what it has computed by then is
what later prompts find. A recording says how much that was. So where it can be, the server is asked
for just as much as leaves the same state, instead of being left: the last token that is sampled is
never computed, as is the one under way when a client leaves.
"""

from math import inf

from attrs import evolve, frozen

from kvtrio.core.events import Finished
from kvtrio.core.types import FinishReason
from kvtrio.replay.results import Pacing, ServerKind
from kvtrio.replay.scenario import Request

MORE = 64
"""Tokens that a client asks for beyond those after which it leaves."""
UNKNOWN_OUTPUT = 16
"""Tokens to ask for where the client left before the first."""


@frozen(kw_only=True)
class Stay:
    """What is sent of a request, and when its client goes."""

    num_wanted: int
    """Tokens to ask for."""
    num_enough: int | None = None
    """With so many tokens the client leaves; None: it stays."""
    after_s: float = inf
    """So long after sending it leaves in any case."""
    num_prompt: int | None = None
    """Tokens of the prompt to send; None: all."""
    is_sent: bool = True
    """False: its client left before the server began with it."""


def stay(request: Request, pacing: Pacing, kind: ServerKind) -> Stay:
    """Serial replays leave the state that was recorded, to the token; others leave in time."""
    if request.left_s is None:
        return Stay(num_wanted=request.output_tokens or UNKNOWN_OUTPUT)
    is_serial, ready = pacing is Pacing.SERIAL, request.ready_tokens
    is_exact = is_serial or (kind is ServerKind.KVTRIO and ready is not None)
    if request.output_tokens:
        return _in_the_answer(request, is_exact=is_exact)
    if not is_serial or ready is None:
        num_wanted = 1 if is_exact else UNKNOWN_OUTPUT
        return Stay(num_wanted=num_wanted, num_enough=1, after_s=request.left_s)
    if ready == 0:
        return Stay(num_wanted=1, is_sent=False)
    return Stay(num_wanted=1, num_prompt=request.stop)


def _in_the_answer(request: Request, *, is_exact: bool) -> Stay:
    """More is asked of servers that may not stop at once: to see whether they do."""
    if not is_exact:
        return Stay(num_wanted=request.output_tokens + MORE, num_enough=request.output_tokens)
    return Stay(num_wanted=request.sampled_tokens)


def as_left(finished: Finished, request: Request) -> Finished:
    """In a simulation, the account of one whose client left: the token that was sampled beyond
    those that it got is nobody's."""
    if request.left_s is None:
        return finished
    num_written = min(finished.num_generated_tokens, request.output_tokens)
    return evolve(finished, reason=FinishReason.ABORT, num_generated_tokens=num_written)
