"""A scenario's requests as the core takes them, with tokens of a made-up vocabulary."""

from hashlib import sha256
from itertools import chain

from attrs import define, field

from kvtrio.core.batch import Batch, Sampled, StepResult
from kvtrio.core.events import Piece, Submit
from kvtrio.core.identity import TAG_SHIFT, AdapterUse, Segment
from kvtrio.core.machine import Core
from kvtrio.core.sampling import SamplingParams
from kvtrio.core.types import RequestId
from kvtrio.replay.ranges import Vocabulary
from kvtrio.replay.scenario import Request, Use
from kvtrio.replay.scenario_file import Scenario, ScenarioError

GREEDY = SamplingParams(temperature=0.0)
MAX_TOKENS = (1 << TAG_SHIFT) - 2
UNHEARD = MAX_TOKENS + 1
"""What is sampled where a scenario has no token: behind a prompt that is only read, or when a
client leaves."""


class _Mute:
    """A matcher: no text, no stop."""

    def push(self, token_id: int) -> Piece:
        return _NOTHING

    def flush(self) -> str:
        return ""


_NOTHING, _MUTE = Piece(), _Mute()


@define(eq=False)
class Traffic:
    """``submit`` requests; ``answer`` what the core asks for them, until their ``end``."""

    scenario: Scenario
    _vocabulary: Vocabulary = field(init=False, factory=Vocabulary)
    _handles: dict[str, int] = field(init=False)
    _answers: dict[RequestId, list[int]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        for request in self.scenario.requests:
            self._vocabulary.add(request)
        if self._vocabulary.num_tokens > MAX_TOKENS:
            raise ScenarioError(f"more than {MAX_TOKENS:,} different tokens")
        aliases = (adapter.alias for adapter in self.scenario.adapters)
        self._handles = {alias: handle for handle, alias in enumerate(aliases, 1)}

    def submit(self, request: Request) -> Submit:
        request_id = RequestId(request.id)
        output = list(chain(*self._vocabulary.outputs[request.id]))
        output += [UNHEARD] * (max(request.sampled_tokens, 1) - len(output))
        self._answers[request_id] = output
        return Submit(
            request_id=request_id,
            token_ids=tuple(chain(*self._vocabulary.prompts[request.id])),
            max_new_tokens=len(output),
            sampling=GREEDY,
            matcher=_MUTE,
            namespace=_name("namespace", request.namespace),
            segments=self._segments(request.adapters),
            reuse=request.reuse,
            retain=request.retain,
            retain_s=request.retain_s,
            # A session that was found out from the prompts was never named to a server.
            session=_name("session", request.session)[:8] if request.is_named else None,
            tenant=_name("tenant", request.tenant),
            priority=request.priority,
            purpose=request.purpose,
            checkpoints=request.checkpoints,
            is_silent=request.is_silent,
        )

    def end(self, request_id: RequestId) -> None:
        """It will be asked for nothing more."""
        self._answers.pop(request_id, None)

    def answer(self, batch: Batch, core: Core) -> StepResult:
        """The tokens that the scenario's server sampled."""
        return StepResult(
            tuple(
                Sampled(self._answers[chunk.request_id][_index(core, chunk.request_id)])
                if chunk.sample is not None
                else None
                for chunk in batch.chunks
            )
        )

    def tokens(self, request_id: RequestId, first: int, number: int) -> list[int]:
        """Of an answer, from index ``first`` on."""
        return self._answers[request_id][first : first + number]

    def _segments(self, uses: tuple[Use, ...]) -> tuple[Segment, ...]:
        starts = sorted({0, *(use.start for use in uses)})
        return tuple(
            Segment(start, tuple(self._use(use) for use in uses if use.start <= start))
            for start in starts
        )

    def _use(self, use: Use) -> AdapterUse:
        return AdapterUse(self._handles[use.alias], _name("adapter", use.alias), use.scale)


def _index(core: Core, request_id: RequestId) -> int:
    return core.requests[request_id].num_generated_tokens


def _name(kind: str, which: object) -> bytes:
    """32 bytes that stand for one of a kind; the first namespace is everybody's, as on a server."""
    return b"" if which == 0 and kind != "session" else sha256(f"{kind} {which}".encode()).digest()
