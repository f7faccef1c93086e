"""llama-server's own answers: POST /completion."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from kvtrio.core.batch import Sampled
from kvtrio.serve.accounts import is_truncated, prompt_progress, stop_type, timings
from kvtrio.serve.cache_answer import ending
from kvtrio.serve.choice import Choice, Delta, End, Prefill, Tokens
from kvtrio.serve.dialect import Origin, Payload
from kvtrio.serve.generation import Generation
from kvtrio.serve.probabilities import entries
from kvtrio.serve.shown_settings import full_settings


@frozen
class NativeDialect:
    """A ``Dialect``. Its streams have no [DONE]; tokens that were ready together share an event."""

    generation: Generation
    origin: Origin
    end = b""

    def frames(self, delta: Delta) -> list[Payload]:
        choice = delta.choice
        match delta:
            case Prefill() if not choice.job.wants.progress:
                return []
            case Prefill():
                progress, so_far = prompt_progress(delta), delta.num_generated_tokens
                return [self._part(choice, prompt_progress=progress, tokens_predicted=so_far)]
            case Tokens():
                return [self._tokens(choice, delta)]
            case End(_, text, explained):
                # The final object of a stream has no content; what was held back goes before it.
                more = {"content": text, **self._probabilities(choice, explained)}
                tail = [self._part(choice, **more)] if text or explained else []
                return [*tail, self._final(choice, is_stream=True)]

    def last_frames(self) -> list[Payload]:
        return []

    def body(self) -> Any:
        finals = [self._final(choice) for choice in self.generation.in_order]
        return finals[0] if len(finals) == 1 else finals

    def _tokens(self, choice: Choice, delta: Tokens) -> Payload:
        tokens = [token.token_id for token in delta.sampled]
        more = self._probabilities(choice, delta.explained)
        return self._part(choice, content=delta.text, tokens=tokens, **more)

    def _part(self, choice: Choice, **more: Any) -> Payload:
        part = {
            "index": choice.index,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": choice.place,
            "tokens_predicted": choice.num_generated_tokens,
            "tokens_evaluated": choice.num_prompt_tokens,
            **more,
        }
        if choice.job.wants.timings_per_token:
            part["timings"] = timings(choice)
        return part

    def _final(self, choice: Choice, *, is_stream: bool = False) -> Payload:
        final = {
            **self._content(choice, is_stream),
            "stop": True,
            "model": self.origin.model_name,
            "tokens_predicted": choice.num_generated_tokens,
            "tokens_evaluated": choice.num_prompt_tokens,
            "generation_settings": full_settings(choice.job),
            "prompt": choice.job.prompt_texts[choice.prompt_index],
            "has_new_line": choice.has_new_line,
            "truncated": is_truncated(choice, self.origin.n_ctx),
            "stop_type": stop_type(choice),
            "stopping_word": choice.matcher.stop_word or "",
            # What the place holds; the last token was sampled but never computed.
            "tokens_cached": choice.num_prompt_tokens + max(choice.num_generated_tokens - 1, 0),
            **ending(choice),
        }
        fields = choice.job.wants.response_fields
        return _picked(final, fields) if fields else final

    def _content(self, choice: Choice, is_stream: bool) -> Payload:
        shown = [] if is_stream or not choice.job.wants.tokens else choice.sampled
        content: Payload = {
            "index": choice.index,
            "content": "" if is_stream else choice.text,
            "tokens": [token.token_id for token in shown],
            "id_slot": choice.place,
        }
        if not is_stream:
            content.update(self._probabilities(choice, choice.explained))
        return content

    def _probabilities(self, choice: Choice, explained: Sequence[Sampled]) -> Payload:
        if choice.job.sampling.num_logprobs is None:
            return {}
        found = entries(choice, explained, self.origin.model.tokenizer)
        return {"completion_probabilities": found}


def _picked(final: Payload, fields: tuple[str, ...]) -> Payload:
    """Return the members named by ``fields``; "a/b" names b inside a. Missing ones are left out."""
    picked: Payload = {}
    for field in fields:
        value: Any = final
        for name in field.split("/"):
            value = value.get(name, ...) if isinstance(value, dict) else ...
        if value is not ...:
            picked[field] = value
    return picked
