"""What the core said, until the loop has told it."""

from attrs import define, field

from kvtrio.core.batch import Batch
from kvtrio.core.events import Output
from kvtrio.core.exchange import Answer
from kvtrio.core.machine import Core
from kvtrio.core.storage import TierMoves
from kvtrio.engine.records import CostRecord, StepRecord, breach_of


def cost_of(core: Core) -> CostRecord:
    return CostRecord.of(core.cost)


@define(eq=False, kw_only=True)
class Stepped:
    """A finished step, and the core right after it."""

    batch: Batch
    duration_s: float
    num_waiting: int
    num_running: int

    def record(self, num_decode_rows: int, block_size: int) -> StepRecord:
        batch, duration_s = self.batch, self.duration_s
        num_prefill_tokens = batch.num_tokens - num_decode_rows
        return StepRecord(
            step=batch.step,
            num_chunks=len(batch.chunks),
            num_prefill_tokens=num_prefill_tokens,
            num_decode_rows=num_decode_rows,
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            duration_s=duration_s,
            predicted_s=batch.predicted_s,
            limit_s=batch.limit_s,
            breach=breach_of(batch, num_prefill_tokens, block_size, duration_s),
        )


@define(eq=False)
class News:
    """What the core said at one time."""

    now: float
    outputs: list[Output]
    moves: TierMoves
    stepped: Stepped | None = None
    answers: list[Answer] = field(factory=list)
    taken: list[bool] = field(factory=list)
    """For each output, whether an outlet has it."""
