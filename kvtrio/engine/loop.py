"""The step loop.

1. Each batch that was scheduled is stepped, and its answer booked, before anything else happens to
   the loop: cancellation is looked for only between steps, so the core is never left half-way.
2. While a step runs, other tasks do: they read the last step's outputs, submit and abort. That is
   their turn: the loop gives no further one, since the model would idle through it.
3. A step that raises ends the loop, and with it the engine. There is no second try: what the
   backend holds is unknown.
"""

import trio

from kvtrio.engine.executor import Executor, checkpoint_if_cancelled
from kvtrio.engine.hub import Hub


async def run_steps(hub: Hub, executor: Executor) -> None:
    """Step as long as there is work, wait while there is none; ends by cancellation only."""
    while True:
        await checkpoint_if_cancelled()
        batch = hub.schedule()
        if batch is None:
            await hub.wait_for_input()
            continue
        started_s = trio.current_time()
        result = await executor.step(batch)
        hub.update(batch, result, trio.current_time() - started_s)
