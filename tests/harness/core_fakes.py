"""Small stand-ins for what the core is given."""

from attrs import define, field

from kvtrio.core.batch import Batch, Sampled, StepResult
from kvtrio.core.config import CoreConfig, Group, RamBudget
from kvtrio.core.events import Piece, Submit
from kvtrio.core.identity import KeyMaker
from kvtrio.core.machine import Core
from kvtrio.core.policy import Policy
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import RequestId, StateClass
from kvtrio.schedulers.fcfs import FCFS


@define
class NumberMatcher:
    """Text of a token is its id; a token of ``stops`` ends the request."""

    stops: frozenset[int] = frozenset()
    held: list[int] = field(factory=list)

    def push(self, token_id: int) -> Piece:
        return Piece("", stopped=True) if token_id in self.stops else Piece(f"{token_id} ")

    def flush(self) -> str:
        return "."


def config(**changes: object) -> CoreConfig:
    """Two groups, small blocks, three places."""
    sizes: dict[str, object] = {
        "groups": (Group(StateClass.TOKEN, None, 8), Group(StateClass.WINDOW, 16, 8)),
        "block_size": 4,
        "num_places": 3,
        "max_context": 40,
        "max_waiting": 5,
        "max_batch_tokens": 16,
        "num_host_blocks": 12,
    }
    return CoreConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def shared_ram(num_bytes: int, groups: tuple[Group, ...], block_size: int) -> dict[str, object]:
    """Sizes for ``config``: one budget for all kinds of state that ``groups`` have."""
    sizes = dict.fromkeys(StateClass, 0)
    for group in groups:
        sizes[group.state_class] += group.part_bytes(block_size)
    budget = RamBudget(
        num_bytes=num_bytes,
        block_bytes=sizes[StateClass.TOKEN] or 8,
        part_bytes=sizes[StateClass.WINDOW],
        state_bytes=sizes[StateClass.POINT],
    )
    return {
        "ram": budget,
        "num_host_blocks": budget.most(budget.block_bytes),
        "num_host_window_blocks": budget.most(budget.part_bytes),
        "num_host_state_slots": budget.most(budget.state_bytes),
    }


def make_core(policy: Policy | None = None, **changes: object) -> Core:
    """A core on ``config``."""
    keys = KeyMaker(b"secret of the tests", b"root of the tests")
    return Core(config(**changes), policy or FCFS(), keys)


def submit(number: int, num_tokens: int = 6, **changes: object) -> Submit:
    """A request for three tokens after ``num_tokens`` of a prompt of its own."""
    fields: dict[str, object] = {
        "request_id": RequestId(number),
        "token_ids": tuple(range(100 * number, 100 * number + num_tokens)),
        "max_new_tokens": 3,
        "sampling": SamplingParams(),
        "matcher": NumberMatcher(),
    }
    return Submit(**{**fields, **changes})  # type: ignore[arg-type]


def answer(batch: Batch, token_id: int = 7) -> StepResult:
    """``token_id`` wherever the batch asks for a token."""
    return StepResult(
        tuple(Sampled(token_id) if chunk.sample is not None else None for chunk in batch.chunks)
    )
