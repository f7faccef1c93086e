"""The step loop.

1. Each batch that was scheduled is stepped, and its answer booked, before the loop ends: a
   cancellation makes the step under way the last, so the core is never left half-way.
2. While a step runs, other tasks do: they read the last step's outputs, submit and abort. The loop
   itself sleeps while step follows step; it decides the first, and waits when there is none.
3. A step that raises ends the loop, and with it the engine. There is no second try: what the
   backend holds is unknown.
"""

import math

import trio

from kvtrio.engine.executor import Executor, checkpoint_if_cancelled
from kvtrio.engine.hub import Hub

RETRY_S = 0.05
"""A policy that plans nothing is asked again after this, and deadlines are looked at."""


async def _wait(hub: Hub) -> None:
    """For input; not for long while requests are there, whatever the policy thinks of them."""
    with trio.move_on_after(RETRY_S if hub.has_work else math.inf):
        await hub.wait_for_input()


async def run_steps(hub: Hub, executor: Executor) -> None:
    """Step as long as there is work, wait while there is none; ends by cancellation only."""
    while True:
        await checkpoint_if_cancelled()
        batch = hub.schedule()
        if batch is None:
            await _wait(hub)
            continue
        await executor.run(batch, hub)
