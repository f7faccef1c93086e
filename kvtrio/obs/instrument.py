"""Watches the event loop itself."""

from collections.abc import Callable

import trio
from attrs import define, field

from kvtrio.obs.events import LoopStall
from kvtrio.obs.logging import Log

STALL_S = 0.02
"""Longest time that a task may keep the loop before it is reported."""


@define(eq=False)
class StallWatch(trio.abc.Instrument):
    """Logs how long a task held the loop when it was longer than ``limit_s``.

    Trio drops an instrument that raises, so this one does nothing that can.
    """

    log: Log
    now_s: Callable[[], float]
    limit_s: float = STALL_S
    _began_s: float = field(init=False, default=0.0)

    def before_task_step(self, task: object) -> None:
        self._began_s = self.now_s()

    def after_task_step(self, task: object) -> None:
        held_s = self.now_s() - self._began_s
        if held_s > self.limit_s:
            self.log.emit(LoopStall(held_s=held_s))
