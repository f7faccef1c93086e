"""Several requests read as one: a batch of prompts, or several answers to one prompt.

A group needs no task of its own, so whoever reads it needs no nursery.
"""

import trio
from attrs import define, field

from kvtrio.core.events import Output
from kvtrio.engine.handle import Handle


@define(eq=False)
class HandleGroup:
    """Asynchronous iterator over tuples of outputs of all requests; they name theirs. For one
    reader; ends when every request has. Raises ``EngineStopped`` like ``Handle``."""

    handles: tuple[Handle, ...]
    _news: trio.Event = field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        for handle in self.handles:
            handle.on_news = self._wake
        self._wake()  # there may be news from before

    def __aiter__(self) -> "HandleGroup":
        return self

    async def __anext__(self) -> tuple[Output, ...]:
        """Wait until any request has outputs; take those of all. A cancelled call takes none."""
        while True:
            await self._news.wait()
            outputs = self._take()
            is_over = all(handle.is_over for handle in self.handles)
            if not is_over:
                self._news = trio.Event()
            if outputs:
                return outputs
            if is_over:
                raise StopAsyncIteration

    def _take(self) -> tuple[Output, ...]:
        return tuple(output for handle in self.handles for output in handle.take_nowait())

    def _wake(self) -> None:
        self._news.set()

    def close(self) -> None:
        """Close every handle: abort what still runs. Idempotent."""
        for handle in self.handles:
            handle.close()
