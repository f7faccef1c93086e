"""The decoder over one stage or several."""

from collections.abc import Sequence

from torch import Tensor

from kvtrio.backends import decoder
from kvtrio.backends.cuda_relief import Choices
from kvtrio.backends.cuda_split import SplitOps
from kvtrio.backends.cuda_stage import Stage
from kvtrio.core.batch import Batch
from kvtrio.model.spec import ModelSpec


class Forward:
    """Computes chunks; copies and other moves come before. In inference mode."""

    def __init__(self, spec: ModelSpec, stages: Sequence[Stage]) -> None:
        self._spec = spec
        self._stages = tuple(stages)
        self._split = SplitOps(stages) if len(stages) > 1 else None

    def choices(self, batch: Batch) -> Choices:
        """One per chunk, None where nothing is sampled, or nothing finite."""
        if not batch.chunks:
            return ()
        if self._split is None:
            stage = self._only()
            sampled = decoder.forward(self._spec, stage.ops, stage.begin(batch))
        else:
            sampled = decoder.forward(self._spec, self._split, self._split.begin(batch))
        each = iter(sampled)
        return tuple(next(each) if chunk.sample else None for chunk in batch.chunks)

    def logits(self, batch: Batch) -> Tensor:
        """Raw ones of the sampled rows, float32 [M, vocab]."""
        if self._split is None:
            stage = self._only()
            return decoder.logits(self._spec, stage.ops, stage.begin(batch))
        return decoder.logits(self._spec, self._split, self._split.begin(batch)).value

    def _only(self) -> Stage:
        (stage,) = self._stages
        stage.device.activate()
        return stage
