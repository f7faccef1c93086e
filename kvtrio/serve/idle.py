"""Idle time: work that waits until nobody is served, and gives way at once when somebody comes.

1. ``_num_served`` is the number of requests under way that somebody waits for.
2. ``_is_quiet`` is set exactly while it is 0, ``_is_busy`` exactly while it is not.
3. At most one piece of work runs in idle time; ``_give_way`` ends it, and is None while none runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio
from attrs import define, field

QUIET_S = 0.25
"""Idle time begins so long after the last request: as long as a step may take. Clients that send
one request right after the other should not meet a step of somebody's idle work each time."""


@define(eq=False)
class IdleTime:
    """Who is served, and what runs when nobody is. Used from the event loop alone."""

    _num_served: int = field(init=False, default=0)
    _is_quiet: trio.Event = field(init=False, factory=trio.Event)
    _is_busy: trio.Event = field(init=False, factory=trio.Event)
    _give_way: Callable[[], None] | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._is_quiet.set()

    @contextmanager
    def served(self) -> Iterator[None]:
        """Somebody is served in this block; idle work ends before it begins."""
        self._num_served += 1
        if self._num_served == 1:
            self._is_quiet = trio.Event()
            self._is_busy.set()
        if self._give_way is not None:
            self._give_way()
        try:
            yield
        finally:
            self._num_served -= 1
            if not self._num_served:
                self._is_busy = trio.Event()
                self._is_quiet.set()

    async def wait(self) -> None:
        """Return in idle time, with no await behind the last look."""
        is_quiet = False
        while not is_quiet:
            await self._is_quiet.wait()
            with trio.move_on_after(QUIET_S):
                await self._is_busy.wait()
            is_quiet = not self._num_served

    @contextmanager
    def used(self, give_way: Callable[[], None]) -> Iterator[None]:
        """Work runs in this block; ``give_way`` is called, once at least, when somebody comes."""
        assert self._give_way is None
        assert not self._num_served
        self._give_way = give_way
        try:
            yield
        finally:
            self._give_way = None
