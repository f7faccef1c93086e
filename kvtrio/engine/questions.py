"""What was asked of the core and is answered when coming steps have moved state."""

from itertools import count

import trio
from attrs import define, field

from kvtrio.core.exchange import Answer
from kvtrio.engine.handle import EngineStopped


@define(eq=False)
class _Question:
    answered: trio.Event = field(factory=trio.Event)
    answer: Answer | None = None
    """None: not yet, or never."""


@define(eq=False)
class Questions:
    """For tasks of one run. An answer that nobody waits for any more is dropped."""

    _open: dict[int, _Question] = field(init=False, factory=dict)
    _numbers: "count[int]" = field(init=False, factory=lambda: count(1))

    def new(self) -> int:
        """The number of one more."""
        number = next(self._numbers)
        self._open[number] = _Question()
        return number

    async def answer_to(self, number: int) -> Answer:
        """Wait for it. Raises ``EngineStopped`` when it can come no more."""
        question = self._open[number]
        try:
            await question.answered.wait()
        finally:
            del self._open[number]
        if question.answer is None:
            raise EngineStopped
        return question.answer

    def tell(self, answer: Answer) -> None:
        if question := self._open.get(answer.number):
            question.answer = answer
            question.answered.set()

    def stop(self) -> None:
        for question in self._open.values():
            question.answered.set()
