"""OpenAI's chat completions: POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from attrs import define, field

from kvtrio.core.batch import Sampled
from kvtrio.serve import sse
from kvtrio.serve.accounts import finish_reason, prompt_progress, timings, usage
from kvtrio.serve.cache_answer import ending
from kvtrio.serve.choice import Choice, Delta, End, Prefill, Tokens
from kvtrio.serve.dialect import Origin, Payload
from kvtrio.serve.generation import Generation
from kvtrio.serve.probabilities import entries

ROLE: Payload = {"role": "assistant", "content": None}
CHUNK, ANSWER = "chat.completion.chunk", "chat.completion"


@define(eq=False)
class ChatDialect:
    """A ``Dialect``. ``timings`` sit on whatever chunk is the last."""

    generation: Generation
    origin: Origin
    end = sse.DONE
    _opened: set[int] = field(init=False, factory=set)
    """Choices whose role was sent."""
    _num_ended: int = field(init=False, default=0)

    def frames(self, delta: Delta) -> list[Payload]:
        choice, wants = delta.choice, self.generation.job.wants
        match delta:
            case Prefill():
                progress = {"prompt_progress": prompt_progress(delta)}
                return [self._chunk(choice, ROLE, **progress)] if wants.progress else []
            case Tokens(_, _, text, explained):
                return [*self._role(choice), *self._tokens(choice, explained, text)]
            case End(_, text, explained):
                tail = self._tokens(choice, explained, text) if text or explained else []
                return [*self._role(choice), *tail, self._finish(choice)]

    def last_frames(self) -> list[Payload]:
        if not self.generation.job.wants.include_usage:
            return []
        return [{"choices": [], **self.origin.envelope(CHUNK), **self._totals()}]

    def body(self) -> Payload:
        choices = [self._answer(choice) for choice in self.generation.in_order]
        return {"choices": choices, **self.origin.envelope(ANSWER), **self._totals()}

    def _answer(self, choice: Choice) -> Payload:
        answer: Payload = {
            "finish_reason": finish_reason(choice),
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
        }
        if choice.job.sampling.num_logprobs is not None:
            answer["logprobs"] = self._logprobs(choice, choice.explained)
        return answer

    def _totals(self) -> Payload:
        return {
            "usage": usage(self.generation),
            **ending(self.generation.in_order[0]),
        }

    def _role(self, choice: Choice) -> list[Payload]:
        """The role goes out together with the first token: clients time the first chunk."""
        if choice.index in self._opened:
            return []
        self._opened.add(choice.index)
        return [self._chunk(choice, ROLE)]

    def _tokens(self, choice: Choice, explained: Sequence[Sampled], text: str) -> list[Payload]:
        has_logprobs = choice.job.sampling.num_logprobs is not None
        if not text and not has_logprobs:
            return []
        wants_timings = choice.job.wants.timings_per_token
        chunk = self._chunk(
            choice, {"content": text}, **({"timings": timings(choice)} if wants_timings else {})
        )
        if has_logprobs:
            chunk["choices"][0]["logprobs"] = self._logprobs(choice, explained)
        return [chunk]

    def _finish(self, choice: Choice) -> Payload:
        self._num_ended += 1
        is_last = self._num_ended == self.generation.job.num_answers
        has_totals = is_last and not choice.job.wants.include_usage
        chunk = self._chunk(choice, {}, **(ending(choice) if has_totals else {}))
        chunk["choices"][0]["finish_reason"] = finish_reason(choice)
        return chunk

    def _chunk(self, choice: Choice, delta: Payload, **more: Any) -> Payload:
        part = {"finish_reason": None, "index": choice.index, "delta": delta}
        if self.generation.job.wants.include_usage:
            more = {"usage": None, **more}
        return {"choices": [part], **self.origin.envelope(CHUNK), **more}

    def _logprobs(self, choice: Choice, explained: Sequence[Sampled]) -> Payload:
        return {"content": entries(choice, explained, self.origin.model.tokenizer)}
