"""Several requests read as one: a batch of prompts, or several answers to one prompt.

A group needs no task of its own, so whoever reads it needs no nursery.
"""

from attrs import define, field

from kvtrio.core.events import Output
from kvtrio.engine.executor import ParkingLot, checkpoint
from kvtrio.engine.handle import Handle, Outlet


@define(eq=False)
class HandleGroup:
    """Asynchronous iterator over tuples of outputs of all requests; they name theirs. For one
    reader; ends when every request has. Raises ``EngineStopped`` like ``Handle``."""

    handles: tuple[Handle, ...]
    outlet: Outlet | None = field(init=False, default=None)
    """Offered the tokens that come while the reader waits; those that it takes are not yielded."""
    _readers: ParkingLot = field(init=False, factory=ParkingLot)

    def __attrs_post_init__(self) -> None:
        for handle in self.handles:
            handle.readers = self._readers

    def __aiter__(self) -> "HandleGroup":
        return self

    async def __anext__(self) -> tuple[Output, ...]:
        """Wait until any request has outputs; take those of all. A cancelled call takes none."""
        if self._has_news:
            await checkpoint()
        while not self._has_news:
            await self._wait()
        if len(self.handles) == 1:
            outputs = self.handles[0].take_nowait()
        else:
            outputs = tuple(each for handle in self.handles for each in handle.take_nowait())
        if outputs:
            return outputs
        raise StopAsyncIteration

    async def _wait(self) -> None:
        for handle in self.handles:
            handle.give(self.outlet)
        try:
            await self._readers.park()
        finally:
            for handle in self.handles:
                handle.give(None)

    @property
    def _has_news(self) -> bool:
        """Of any request, or that all have ended."""
        for handle in self.handles:
            if handle.has_news:
                return True
        return all(handle.is_over for handle in self.handles)

    def close(self) -> None:
        """Close every handle: abort what still runs. Idempotent."""
        for handle in self.handles:
            handle.close()
