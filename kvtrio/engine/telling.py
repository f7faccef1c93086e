"""Hands out, on the loop, what the core said: to readers, observers, and those who asked."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio
from attrs import define, field

from kvtrio.core.batch import Chunk
from kvtrio.core.events import Cached, Finished, TokenOut
from kvtrio.core.machine import Core
from kvtrio.core.storage import TierMoves
from kvtrio.core.types import RequestId
from kvtrio.engine.live import Live, record_of
from kvtrio.engine.news import News, Stepped, cost_of
from kvtrio.engine.questions import Questions
from kvtrio.engine.records import Observer, RequestRecord
from kvtrio.engine.tap import Tap

NO_MOVES = TierMoves()
COST_EVERY = 1000
USAGE_EVERY = 250
"""Steps between two reports of what they cost."""


T = TypeVar("T")


class Look(Protocol):
    def __call__(self, at: Callable[[Core], T]) -> T: ...


@define(eq=False, kw_only=True)
class Teller:
    """See the module."""

    live: dict[RequestId, Live]
    """Admitted requests; one whose end was told is taken out."""
    observer: Observer
    tap: Tap | None
    block_size: int
    look: Look
    """At the core, for a moment."""
    questions: Questions = field(init=False, factory=Questions)
    has_ended: trio.Event = field(init=False, factory=trio.Event)
    """Set, and another takes its place, when a request's end is told."""

    def tell(self, news: News) -> None:
        records: list[RequestRecord] = []
        chunks = news.stepped.batch.chunks if news.stepped else ()
        num_decode_rows = sum(map(self._is_decode, chunks))
        for output, is_taken in zip(news.outputs, news.taken, strict=True):
            live = self.live[output.request_id]
            if isinstance(output, Cached):
                # Its numbers reach the reader with the next Progress.
                self.observer.cached(output)
                continue
            if not is_taken:
                live.handle.push(output)
            if self.tap is not None and isinstance(output, TokenOut | Finished):
                self.tap.said(output, news.now)
            if isinstance(output, TokenOut):
                live.gaps.add(news.now)
            elif isinstance(output, Finished):
                del self.live[output.request_id]
                records.append(record_of(output, live))
        for record in records:
            self.observer.request(record)
        self._answer(news, bool(records))
        if news.moves != NO_MOVES:
            self.observer.moved(news.moves)
        if news.stepped is not None and chunks:
            self._report_step(news.stepped, num_decode_rows)

    def stop(self) -> None:
        """Nothing more will be told."""
        self.has_ended.set()
        self.questions.stop()

    def _answer(self, news: News, is_end: bool) -> None:
        for answer in news.answers:
            self.questions.tell(answer)
        if is_end:
            self.has_ended.set()
            self.has_ended = trio.Event()

    def _is_decode(self, chunk: Chunk) -> bool:
        return chunk.start >= len(self.live[chunk.request_id].submit.token_ids)

    def _report_step(self, stepped: Stepped, num_decode_rows: int) -> None:
        step = stepped.batch.step
        self.observer.step(stepped.record(num_decode_rows, self.block_size))
        if (step + 1) % COST_EVERY == 0:
            self.observer.cost(self.look(cost_of))
        if (step + 1) % USAGE_EVERY == 0:
            self.observer.usage(self.look(Core.statistics))
