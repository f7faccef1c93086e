"""The only mutator of requests and blocks. Three methods; no clock, no I/O, no tensors.

There is no prefill phase and no decode phase. A request has tokens and a number of computed
tokens; a step computes some of the missing ones, and when none is missing a token is sampled.

Rules, recomputed from first principles by ``invariants.check``:

1. Every block is held, cached or gone; its reference count is the number of block tables naming it.
2. A block table only grows until the request ends; a block in it may be replaced by an equal one.
3. num_computed <= num_tokens; a block table covers what is computed and in flight, no more.
4. A request is waiting, running in one place, or gone, and its state says which.
5. A finished request holds nothing.
6. At most one batch is in flight; blocks it names are freed only after its ``update``.
7. A batch has at most ``max_batch_tokens`` tokens.
8. Every admitted request gets exactly one ``Finished``; every other one exactly one ``Rejected``.
9. A block is published after its tokens were computed, and not written after that.
"""

from collections import deque
from collections.abc import Iterable

from attrs import define

from kvtrio.core.admission import refusal
from kvtrio.core.arrival import Arrival
from kvtrio.core.batch import Batch, StepResult
from kvtrio.core.booking import book_step
from kvtrio.core.contents import erase
from kvtrio.core.events import (
    Abort,
    Bring,
    Drain,
    Erase,
    Fetched,
    Hold,
    Input,
    Lost,
    Output,
    Read,
    Submit,
    Tick,
    Written,
)
from kvtrio.core.planning import plan_step
from kvtrio.core.state import CoreStatistics, State
from kvtrio.core.stored import StoredHead
from kvtrio.core.types import FinishReason, RequestId

__all__ = ["Core", "CoreStatistics"]


@define(eq=False)
class Core(State):
    """Requests, blocks and places; see the module's rules."""

    def handle(self, event: Input, now: float) -> list[Output]:
        """Take in one event; what it causes at once is returned. ``now`` in seconds."""
        match event:
            case Submit():
                return self._submit(event, now)
            case Abort(request_id):
                return self._abort(request_id, now)
            case Drain():
                self.is_draining = True
                return []
            case Tick():
                return self._expire(now)
            case Read(number, wanted):
                self.exchange.ask(number, wanted)
                return []
            case Bring(number, trail, pieces):
                self.exchange.bring(Arrival(number, trail, deque(pieces)))
                return []
            case Written(key, state_offset, size):
                assert self.cache.keeper is not None
                self.cache.keeper.written((key, state_offset), size)
                return []
            case Fetched():
                assert self.fetches is not None
                self.fetches.take(event)
                return []
            case Lost(key, state_offset, fault):
                assert self.fetches is not None
                self.fetches.lose((key, state_offset), fault)
                return []
            case Hold(place, trail):
                self.places.replace(place, trail)
                return []
            case Erase(place, namespace):
                erase(self, place, namespace, now)
                return []

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def fill_disk(self, heads: Iterable[StoredHead]) -> None:
        """What lies on disk already, the least recently used first; before anything else."""
        assert self.cache.keeper is not None
        disk = self.cache.keeper.disk
        for head in heads:
            if disk.has_room(head.size):
                disk.add(head, head.size, is_there=True)

    @property
    def is_settled(self) -> bool:
        """Nobody asks for anything, and all state in memory is on disk, or cannot be."""
        keeper = self.cache.keeper
        return not self.requests and (keeper is None or keeper.is_done)

    @property
    def has_fresh(self) -> bool:
        """Some state is to be put on disk in idle moments."""
        return self.cache.keeper is not None and self.cache.keeper.has_fresh

    def schedule(self, now: float) -> Batch | None:
        """Decide the next step and hold its blocks; None if there is nothing to compute."""
        assert self.in_flight is None
        if self.requests or self.exchange.has_work or self.has_fresh:
            self.in_flight = plan_step(self, now)
        return self.in_flight

    def update(self, batch: Batch, result: StepResult, now: float) -> list[Output]:
        """Book a finished step: tokens out, ended requests freed."""
        assert batch is self.in_flight
        self.in_flight = None
        news, self.news = self.news, []
        return news + book_step(self, batch, result, now)

    def _expire(self, now: float) -> list[Output]:
        late = self.waiting.late(now)
        return [self.finish(request, FinishReason.DEADLINE, now) for request in late]

    def _submit(self, submit: Submit, now: float) -> list[Output]:
        assert submit.request_id not in self.requests
        assert submit.max_new_tokens is None or submit.max_new_tokens >= 1
        assert submit.segments[-1].start <= len(submit.token_ids), "what is generated has one set"
        assert submit.place is None or 0 <= submit.place < self.config.num_places
        if rejected := refusal(self, submit, now):
            return [rejected]
        self.add(submit, now)
        return []

    def _abort(self, request_id: RequestId, now: float) -> list[Output]:
        request = self.requests.get(request_id)
        if request is None or request.is_aborted:
            return []
        request.is_aborted = True
        # A launched step still reads and writes the blocks: ``update`` will drop the request.
        return [] if request.in_flight else [self.finish(request, FinishReason.ABORT, now)]
