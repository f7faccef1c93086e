"""``Ops`` over several devices, each of which has some of the layers.

1. A value knows the stage that made it, and is taken to another one where that first needs it: the
   hidden state once at each border, for both the norm and the residual behind it.
2. What names a weight or a layer runs on that one's stage, all else on the later one of its values.
3. Every stage works on the same chunks; only the last one samples.
"""

from collections.abc import Sequence
from math import floor

from attrs import define, field, frozen
from torch import Tensor

from kvtrio.backends.base import BackendError
from kvtrio.backends.cuda_ops import CudaOps
from kvtrio.backends.cuda_stage import Stage
from kvtrio.backends.cuda_step import CudaStep
from kvtrio.core.batch import Batch, Sampled
from kvtrio.model.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec


@frozen(eq=False)
class SplitStep:
    """The step as each stage sees it."""

    steps: tuple[CudaStep, ...]


@define(eq=False)
class Placed:
    """A value, and where it is."""

    stage: int
    value: Tensor
    brought: dict[int, Tensor] = field(init=False, factory=dict)
    """Copies on later stages."""


class SplitOps:
    """Implements ``Ops[SplitStep, Placed, tuple[Sampled | None, ...]]``."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)
        self._stage_of = {
            layer.index: i
            for i, stage in enumerate(stages)
            for layer in stage.loaded.share.spec.layers
        }
        self._last = len(self._stages) - 1
        self._active: int | None = None

    def begin(self, batch: Batch) -> SplitStep:
        self._active = None
        return SplitStep(tuple(stage.begin(batch) for stage in self._stages))

    def embed(self, step: SplitStep, weight: str, scale: float) -> Placed:
        return Placed(0, self._on(0).embed(step.steps[0], weight, scale))

    def norm(self, x: Placed, weight: str, eps: float) -> Placed:
        i = self._named(weight)
        return Placed(i, self._on(i).norm(self._at(i, x), weight, eps))

    def layer_norm(self, x: Placed, weight: str, bias: bool, eps: float) -> Placed:
        i = self._named(weight)
        return Placed(i, self._on(i).layer_norm(self._at(i, x), weight, bias, eps))

    def narrowed(self, x: Placed) -> Placed:
        return Placed(x.stage, self._on(x.stage).narrowed(x.value))

    def post_norm(self, x: Placed, weight: str, eps: float) -> Placed:
        i = self._named(weight)
        return Placed(i, self._on(i).post_norm(self._at(i, x), weight, eps))

    def linear(self, step: SplitStep, x: Placed, weight: str, bias: bool) -> Placed:
        i = self._named(weight)
        return Placed(i, self._on(i).linear(step.steps[i], self._at(i, x), weight, bias))

    def qkv(self, step: SplitStep, x: Placed, layer: LayerSpec, eps: float) -> Placed:
        i = self._stage_of[layer.index]
        return Placed(i, self._on(i).qkv(step.steps[i], self._at(i, x), layer, eps))

    def attention(self, step: SplitStep, q: Placed, index: int, spec: AttentionSpec) -> Placed:
        i = self._stage_of[index]
        return Placed(i, self._on(i).attention(step.steps[i], self._at(i, q), index, spec))

    def latent_attention(self, step: SplitStep, x: Placed, layer: LayerSpec, eps: float) -> Placed:
        i = self._stage_of[layer.index]
        return Placed(i, self._on(i).latent_attention(step.steps[i], self._at(i, x), layer, eps))

    def short_conv(self, step: SplitStep, x: Placed, layer: LayerSpec) -> Placed:
        i = self._stage_of[layer.index]
        return Placed(i, self._on(i).short_conv(step.steps[i], self._at(i, x), layer))

    def delta_net(self, step: SplitStep, x: Placed, layer: LayerSpec, eps: float) -> Placed:
        i = self._stage_of[layer.index]
        return Placed(i, self._on(i).delta_net(step.steps[i], self._at(i, x), layer, eps))

    def mamba2(self, step: SplitStep, x: Placed, layer: LayerSpec, eps: float) -> Placed:
        i = self._stage_of[layer.index]
        return Placed(i, self._on(i).mamba2(step.steps[i], self._at(i, x), layer, eps))

    def gated_ffn(self, step: SplitStep, x: Placed, prefix: str, spec: FeedForwardSpec) -> Placed:
        i = self._named(prefix)
        return Placed(i, self._on(i).gated_ffn(step.steps[i], self._at(i, x), prefix, spec))

    def plain_ffn(self, step: SplitStep, x: Placed, prefix: str, spec: FeedForwardSpec) -> Placed:
        i = self._named(prefix)
        return Placed(i, self._on(i).plain_ffn(step.steps[i], self._at(i, x), prefix, spec))

    def experts(self, step: SplitStep, x: Placed, index: int, spec: ExpertsSpec) -> Placed:
        i = self._stage_of[index]
        return Placed(i, self._on(i).experts(step.steps[i], self._at(i, x), index, spec))

    def scaled(self, x: Placed, factor: float) -> Placed:
        return Placed(x.stage, self._on(x.stage).scaled(x.value, factor))

    def add(self, x: Placed, y: Placed) -> Placed:
        i = max(x.stage, y.stage)
        return Placed(i, self._on(i).add(self._at(i, x), self._at(i, y)))

    def sampled_rows(self, step: SplitStep, x: Placed) -> Placed:
        # On the stage that has the rows: fewer travel.
        return Placed(x.stage, self._on(x.stage).sampled_rows(step.steps[x.stage], x.value))

    def logits(self, step: SplitStep, x: Placed, weight: str, softcap: float | None) -> Placed:
        i = self._last
        return Placed(i, self._on(i).logits(step.steps[i], self._at(i, x), weight, softcap))

    def sample(self, step: SplitStep, logits: Placed) -> tuple[Sampled | None, ...]:
        i = logits.stage
        return self._on(i).sample(step.steps[i], logits.value)

    def _named(self, weight: str) -> int:
        """The stage of ``blk.INDEX.NAME``; of all other names the last."""
        if not weight.startswith("blk."):
            return self._last
        return self._stage_of[int(weight.split(".", 2)[1])]

    def _on(self, stage: int) -> CudaOps:
        if stage != self._active:
            self._stages[stage].device.activate()
            self._active = stage
        return self._stages[stage].ops

    def _at(self, stage: int, x: Placed) -> Tensor:
        if x.stage == stage:
            return x.value
        if stage not in x.brought:
            self._stages[x.stage].ops.settle(x.value)
            x.brought[stage] = self._stages[stage].device.bring(x.value)
        return x.brought[stage]


def split_layers(num_layers: int, proportions: Sequence[float]) -> tuple[int, ...]:
    """Layers of each device: as ``proportions`` say, each at least one.

    Raises BackendError where there are fewer layers than devices.
    """
    if num_layers < len(proportions):
        raise BackendError(
            f"--tensor-split names {len(proportions)} GPUs; the model has {num_layers} layers"
        )
    total, done, counts = sum(proportions), 0, list[int]()
    for i in range(len(proportions)):
        end = floor(num_layers * sum(proportions[: i + 1]) / total + 0.5)
        left = len(proportions) - i - 1
        end = min(max(end, done + 1), num_layers - left)
        counts.append(end - done)
        done = end
    return tuple(counts)
