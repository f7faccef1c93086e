"""A request of a scenario as the body that a server takes."""

from typing import Any

from attrs import frozen

from kvtrio.core.types import Retain
from kvtrio.replay.results import Api, ServerKind
from kvtrio.replay.scenario import Request
from kvtrio.replay.target import Target

PATHS = {
    Api.TOKENS: "/completion",
    Api.WORDS: "/v1/completions",
    Api.CHAT: "/v1/chat/completions",
}
Body = dict[str, Any]
WIDE: Body = {"temperature": 10.0, "top_k": 200, "top_p": 1.0, "min_p": 0.0}
"""Answers to one prompt have to differ, unless they have one seed, also where a model is sure."""


@frozen
class Ask:
    """What is sent for one request."""

    request: Request
    prompt: list[int] | str
    """Token ids, or text."""
    seed: int
    purposes: tuple[str, ...]
    """Of the scenario."""
    num_tokens: int
    """To ask for, if anything is to be written."""

    def body(self, target: Target) -> Body:
        body: Body = {"stream": True, "temperature": 1.0, "seed": self.seed}
        if target.kind is not ServerKind.OPENAI:
            body |= WIDE
        if target.api is Api.TOKENS:
            body |= {"prompt": self.prompt, "n_predict": self.num_wanted, "return_tokens": True}
        else:
            body |= self._text(target)
        if target.kind is not ServerKind.OPENAI:
            body |= {"ignore_eos": True, "cache_prompt": self.request.reuse}
            body |= self._lora(target)
        if target.kind is ServerKind.KVTRIO:
            body |= self._ours(target)
        return body | dict(target.more)

    @property
    def num_wanted(self) -> int:
        return 0 if self.request.is_silent else self.num_tokens

    def _text(self, target: Target) -> Body:
        uses = self.request.adapters
        name = target.adapter_names.get(uses[0].alias, target.model) if uses else target.model
        messages = [{"role": "user", "content": self.prompt}]
        is_chat = target.api is Api.CHAT
        return {
            **({"messages": messages} if is_chat else {"prompt": self.prompt}),
            "model": name,
            "max_tokens": max(self.num_wanted, 1),
            "stream_options": {"include_usage": True},
        }

    def _lora(self, target: Target) -> Body:
        """All are named, at scale 0 too: to llama-server an empty list means the global scales."""
        if not target.all_ids or self.request.is_global:
            return {}
        scales = dict.fromkeys(target.all_ids, 0.0)
        for use in self.request.adapters:
            if use.alias in target.adapter_ids:
                scales[target.adapter_ids[use.alias]] = use.scale
        return {"lora": [{"id": number, "scale": scale} for number, scale in scales.items()]}

    def _ours(self, target: Target) -> Body:
        request = self.request
        ours: Body = {"retain": request.retain.value}
        if request.retain is Retain.PIN:
            ours["retain_s"] = request.retain_s
        if request.is_named:
            ours["session"] = f"scenario {request.session}"
        if request.priority:
            ours["priority"] = request.priority
        if request.purpose is not None and self.purposes[request.purpose] in target.purposes:
            ours["purpose"] = self.purposes[request.purpose]
        body: Body = {"kvtrio": ours}
        if request.tenant:
            body["user"] = f"tenant {request.tenant}"
        if request.namespace:
            body["cache_salt"] = f"namespace {request.namespace}"
        return body
