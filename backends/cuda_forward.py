"""The decoder over one stage or several, launched from Python or, where it was captured, whole."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from kvtrio.backends import decoder
from kvtrio.backends.cuda_graphs import Capturing, DecodeGraphs, Graph
from kvtrio.backends.cuda_measure import SAMPLED
from kvtrio.backends.cuda_memory import scratch_places
from kvtrio.backends.cuda_relief import Choices
from kvtrio.backends.cuda_split import SplitOps
from kvtrio.backends.cuda_stage import Stage
from kvtrio.backends.torch_sampling import sample_rows
from kvtrio.core.batch import Batch, Chunk
from kvtrio.core.types import RequestId, Tier
from kvtrio.kernels.triton_matmul import FEW_ROWS, MANY_ROWS
from kvtrio.model.spec import ModelSpec

WARM_ROWS = (2, FEW_ROWS + 1, 2 * FEW_ROWS + 1, MANY_ROWS)
"""The least rows of each kind of product."""


class Forward:
    """Computes chunks; copies and other moves come before. In inference mode."""

    def __init__(self, spec: ModelSpec, stages: Sequence[Stage]) -> None:
        self._spec = spec
        self._stages = tuple(stages)
        self._split = SplitOps(stages) if len(stages) > 1 else None
        self._graphs: DecodeGraphs | None = None

    def capture(
        self, make: Callable[[], Graph], limits: tuple[int, int], is_trial: bool = False
    ) -> None:
        """See ``CudaBackend.capture``; limits: most rows of a step, and positions of a request. A
        trial captures only what takes most memory."""
        stage = self._only()
        self._graphs = DecodeGraphs(
            Capturing(
                frame=stage.loaded.frame,
                forward=partial(decoder.logits, self._spec, stage.ops),
                make=make,
                scratch=scratch_places(stage.pools[Tier.DEVICE]),
                max_rows=limits[0],
                max_context=limits[1],
            )
        )
        self._graphs.capture(is_trial)

    def warm(self, limits: tuple[int, int]) -> None:
        """Read prompts of each size that has tiles of its own, in places that no request has, so
        that no kernel is compiled while requests wait. ``limits`` as ``capture``."""
        stage = self._stages[0]
        block_size = stage.loaded.frame.layout.block_size
        places = scratch_places(stage.pools[Tier.DEVICE])
        for num_rows in sorted({min(size, *limits) for size in WARM_ROWS}):
            tables = tuple((place,) * -(-num_rows // block_size) for place in places)
            chunk = Chunk(RequestId(-1), 0, (0,) * num_rows, tables, SAMPLED)
            self.choices(Batch(0, (chunk,)))

    def choices(self, batch: Batch) -> Choices:
        """One per chunk, None where nothing is sampled, or nothing finite."""
        if not batch.chunks:
            return ()
        if (logits := self._captured(batch)) is not None:
            sampled = sample_rows(logits, [chunk.sample for chunk in batch.chunks if chunk.sample])
        elif self._split is None:
            stage = self._only()
            sampled = decoder.forward(self._spec, stage.ops, stage.begin(batch))
        else:
            sampled = decoder.forward(self._spec, self._split, self._split.begin(batch))
        each = iter(sampled)
        return tuple(next(each) if chunk.sample else None for chunk in batch.chunks)

    def logits(self, batch: Batch) -> Tensor:
        """Raw ones of the sampled rows, float32 [M, vocab]."""
        if (logits := self._captured(batch)) is not None:
            return logits.clone()
        if self._split is None:
            stage = self._only()
            return decoder.logits(self._spec, stage.ops, stage.begin(batch))
        return decoder.logits(self._spec, self._split, self._split.begin(batch)).value

    def _captured(self, batch: Batch) -> Tensor | None:
        """Logits of a captured step; None where this is none."""
        if self._graphs is None or not self._graphs.serves(batch):
            return None
        self._only()
        return self._graphs.logits(batch)

    def _only(self) -> Stage:
        (stage,) = self._stages
        stage.device.activate()
        return stage
