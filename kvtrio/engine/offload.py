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

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return ``fn(*args)`` or raise what it raises; a checkpoint."""
        ...


@frozen
class ThreadOffload:
    """At most ``num_threads`` jobs at once; the rest wait in order of arrival."""

    num_threads: int
    limiter: trio.CapacityLimiter = field(init=False)
    """Our own: trio's default one is shared with everybody's file and DNS calls."""

    @limiter.default
    def _make_limiter(self) -> trio.CapacityLimiter:
        return trio.CapacityLimiter(self.num_threads)

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        result = await trio.to_thread.run_sync(
            fn, *args, abandon_on_cancel=False, limiter=self.limiter
        )
        await checkpoint_if_cancelled()
        return result


class InlineOffload:
    """Runs jobs on the spot, in no time: for virtual time, where threads are invisible."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        await checkpoint()
        return fn(*args)
