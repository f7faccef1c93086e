"""OpenAI's text completions: POST /v1/completions.

``logprobs`` has OpenAI's members for this route (``tokens``, ``token_logprobs``, ...) and
llama-server's (``content``): clients of either find theirs, and openai-python's type takes both.
"""

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
from kvtrio.serve.probabilities import entries, text_shape


@define(eq=False)
class TextDialect:
    """A ``Dialect``. Without ``include_usage`` the last chunk carries the usage, as llama-server's
    does; with it a chunk without choices follows, as OpenAI's does. Never both."""

    generation: Generation
    origin: Origin
    end = sse.DONE
    _offsets: dict[int, int] = field(init=False, factory=dict)
    """Per choice, the characters of its tokens so far."""
    _num_ended: int = field(init=False, default=0)

    def frames(self, delta: Delta) -> list[Payload]:
        choice, wants = delta.choice, self.generation.job.wants
        match delta:
            case Prefill():
                progress = {"prompt_progress": prompt_progress(delta)}
                return [self._chunk(choice, "", **progress)] if wants.progress else []
            case Tokens(_, _, text, explained):
                logprobs = self._logprobs(choice, explained)
                if not text and logprobs is None:
                    return []
                more = {"timings": timings(choice)} if wants.timings_per_token else {}
                return [self._chunk(choice, text, logprobs, **more)]
            case End(_, text, explained):
                self._num_ended += 1
                is_last = self._num_ended == self.generation.job.num_answers
                totals = self._totals() if is_last and not wants.include_usage else {}
                logprobs = self._logprobs(choice, explained) if explained else None
                chunk = self._chunk(choice, text, logprobs, **totals)
                chunk["choices"][0]["finish_reason"] = finish_reason(choice)
                return [chunk]

    def last_frames(self) -> list[Payload]:
        if not self.generation.job.wants.include_usage:
            return []
        return [{"choices": [], **self.origin.envelope("text_completion"), **self._totals()}]

    def body(self) -> Payload:
        choices = [
            {
                "text": choice.text,
                "index": choice.index,
                "logprobs": self._logprobs(choice, choice.explained),
                "finish_reason": finish_reason(choice),
            }
            for choice in self.generation.in_order
        ]
        return {"choices": choices, **self.origin.envelope("text_completion"), **self._totals()}

    def _totals(self) -> Payload:
        return {
            "usage": usage(self.generation),
            **ending(self.generation.in_order[0]),
        }

    def _chunk(
        self, choice: Choice, text: str, logprobs: Payload | None = None, **more: Any
    ) -> Payload:
        part = {
            "text": text,
            "index": choice.index,
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if self.generation.job.wants.include_usage:
            more = {"usage": None, **more}
        return {"choices": [part], **self.origin.envelope("text_completion"), **more}

    def _logprobs(self, choice: Choice, explained: Sequence[Sampled]) -> Payload | None:
        if choice.job.sampling.num_logprobs is None:
            return None
        found = entries(choice, explained, self.origin.model.tokenizer)
        offset = self._offsets.get(choice.index, 0)
        self._offsets[choice.index] = offset + sum(len(entry["token"]) for entry in found)
        return text_shape(found, offset)
