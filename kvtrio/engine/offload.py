"""Work that would hold the event loop: tokenising, templates, grammars. Pure functions only.

A job that has started runs to its end even if its caller is cancelled. To abandon it would answer a
hang-up some milliseconds earlier, but leave a thread inside native code that the interpreter
may tear down under it at exit; jobs are bounded (templates by their time limit, texts by the body
limit), so waiting is. The caller is cancelled right after, before it can act on the result.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

import trio
from attrs import field, frozen

from kvtrio.engine.executor import checkpoint, checkpoint_if_cancelled

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Offload(Protocol):
    """Runs functions beside the event loop."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts, num_bytes: int = 0) -> T:
        """Return ``fn(*args)`` or raise what it raises; a checkpoint.

        ``num_bytes``: of the input, if its size decides how long the job takes.
        """
        ...


@frozen
class ThreadOffload:
    """At most ``num_threads`` small jobs at once, and one large one; the rest wait in order of
    arrival, each behind its own kind. So a small job never waits for a large one, and the memory of
    one large job is all that they take together."""

    num_threads: int
    large_bytes: int = 256 << 10
    """Input from which on a job is a large one."""
    limiter: trio.CapacityLimiter = field(init=False)
    """Our own: trio's default one is shared with everybody's file and DNS calls."""
    large: trio.CapacityLimiter = field(init=False, factory=lambda: trio.CapacityLimiter(1))

    @limiter.default
    def _make_limiter(self) -> trio.CapacityLimiter:
        return trio.CapacityLimiter(self.num_threads)

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts, num_bytes: int = 0) -> T:
        limiter = self.large if num_bytes >= self.large_bytes else self.limiter
        result = await trio.to_thread.run_sync(fn, *args, abandon_on_cancel=False, limiter=limiter)
        await checkpoint_if_cancelled()
        return result


class InlineOffload:
    """Runs jobs on the spot, in no time: for virtual time, where threads are invisible."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts, num_bytes: int = 0) -> T:
        await checkpoint()
        return fn(*args)
