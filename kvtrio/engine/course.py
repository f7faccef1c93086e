"""What runs the steps of a model, and what decides them, see of each other."""

from typing import Any, Protocol

from kvtrio.core.batch import Batch, StepResult


class Course(Protocol):
    """Decides what is computed, step by step; ``Hub`` is one."""

    def book(self, batch: Batch, result: StepResult) -> None:
        """A step has ended. Called in any thread."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits to hear of it. Called in any thread."""
        ...

    def decide(self) -> Batch | None:
        """The next step, if there is one; it is launched at once. Called in any thread."""
        ...

    def deliver(self) -> None:
        """Tell what was booked. Called on the event loop; what it raises ends the course."""
        ...


class Stepper(Protocol):
    """The part of a backend that computes."""

    def step(self, batch: Batch) -> StepResult: ...

    def load_adapter(self, data: Any) -> int: ...

    def unload_adapter(self, adapter_id: int) -> None: ...
