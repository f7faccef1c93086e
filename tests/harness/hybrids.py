"""Tiny models with recurrent layers behind the whole HTTP stack, and answers without any reuse."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from harness.core_fakes import NumberMatcher
from harness.torch_models import load
from harness.virtual import SimSettings
from kvtrio.backends.groups import core_groups, layer_groups
from kvtrio.backends.torch_backend import TorchBackend
from kvtrio.core.batch import Batch, Sampled, StepResult
from kvtrio.core.config import CoreConfig
from kvtrio.core.events import Finished, Input, Output, Submit, TokenOut
from kvtrio.core.identity import KeyMaker
from kvtrio.core.machine import Core
from kvtrio.core.types import RequestId
from kvtrio.model.architectures import read_spec
from kvtrio.model.gguf_file import open_gguf
from kvtrio.model.template import load_template
from kvtrio.model.tokenizer import load_tokenizer
from kvtrio.serve.served import ServedModel

KEYS = KeyMaker(b"secret of the tests", b"root")


@define(eq=False)
class Told:
    """One request and what became of it."""

    submit: Submit
    sampled: list[Sampled] = field(factory=list)
    finished: Finished | None = None

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.submit.token_ids, *(each.token_id for each in self.sampled))

    @property
    def num_computed(self) -> int:
        assert self.finished is not None
        return self.finished.num_computed_tokens


@define(eq=False)
class TellingCore(Core):
    """Remembers what it was asked and what it answered."""

    told: dict[RequestId, Told] = field(init=False, factory=dict)

    def handle(self, event: Input, now: float) -> list[Output]:
        if isinstance(event, Submit):
            self.told[event.request_id] = Told(event)
        return self._noted(super().handle(event, now))

    def update(self, batch: Batch, result: StepResult, now: float) -> list[Output]:
        return self._noted(super().update(batch, result, now))

    def _noted(self, outputs: list[Output]) -> list[Output]:
        for output in outputs:
            if isinstance(output, TokenOut):
                self.told[output.request_id].sampled.append(output.sampled)
            elif isinstance(output, Finished):
                self.told[output.request_id].finished = output
        return outputs

    @property
    def last(self) -> Told:
        return next(reversed(self.told.values()))


@frozen(kw_only=True)
class TorchSettings(SimSettings):
    """The sizes of a stack whose backend is a loaded one."""

    loaded: TorchBackend

    def core(self) -> TellingCore:
        return TellingCore(self.config, self.policy, KEYS)

    def backend(self) -> Any:
        return self.loaded


def load_hybrid(path: Path, config: CoreConfig) -> TorchBackend:
    """Float32, one memory."""
    return load(
        path,
        block_size=config.block_size,
        num_blocks=config.num_blocks + config.num_host_blocks,
        num_state_slots=config.num_state_slots + config.num_host_state_slots,
        max_context=config.max_context,
        num_threads=1,
    )


def torch_settings(path: Path, **sizes: Any) -> TorchSettings:
    """One place of 2,048 tokens, and room for past requests."""
    chosen: dict[str, Any] = {
        "num_places": 1,
        "max_context": 2048,
        "max_batch_tokens": 512,
        "block_size": 16,
        "num_host_blocks": 1000,
        "num_state_slots": 2,
        "num_host_state_slots": 60,
        **sizes,
    }
    with open_gguf(path) as file:
        groups = core_groups(layer_groups(read_spec(file)), 4, chosen["max_context"])
    plain = SimSettings(groups=groups, **chosen)
    return TorchSettings(groups=groups, loaded=load_hybrid(path, plain.config), **chosen)


def served_file(path: Path, template: str | None = None) -> ServedModel:
    """The file's own tokenizer, and its template unless another is given."""
    with open_gguf(path) as file:
        tokenizer = load_tokenizer(file.metadata)
        bos, eos = tokenizer.bos_text, tokenizer.eos_text
        return ServedModel(
            alias="tiny",
            tokenizer=tokenizer,
            template=load_template(file.metadata, template, bos, eos),
            spec=read_spec(file),
            model_path_name=path.name,
            size=1,
            n_params=1,
            ftype="F32",
        )


@define(eq=False)
class Cold:
    """Answers each prompt from nothing, on a stack of its own."""

    settings: TorchSettings
    core: TellingCore = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.core = self.settings.core()

    def answer(self, submit: Submit) -> list[Sampled]:
        """The tokens that the same request gets without reuse."""
        alone = evolve(submit, matcher=NumberMatcher(), reuse=False, checkpoints=())
        assert self.core.handle(alone, 0.0) == []
        while self.core.has_work:
            batch = self.core.schedule(0.0)
            assert batch is not None
            self.core.update(batch, self.settings.loaded.step(batch), 0.0)
        return self.core.last.sampled


def cold(path: Path) -> Cold:
    return Cold(torch_settings(path, num_host_blocks=0, num_host_state_slots=0))


def assert_same(warm: Sequence[Sampled], cold: Sequence[Sampled]) -> None:
    """Ids are equal; log-probabilities, where they were asked for, nearly."""
    assert [each.token_id for each in warm] == [each.token_id for each in cold]
    for one, other in zip(warm, cold, strict=True):
        assert one.logprob is not None
        assert other.logprob is not None
        assert abs(one.logprob - other.logprob) < 1e-4
