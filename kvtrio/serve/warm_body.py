"""The body of POST /v1/cache/warm: of a chat's or completion's fields, those that its prompt
depends on. So the body of the request that is to come can be sent as it is."""

from typing import Annotated, Any

import msgspec
from attrs import evolve
from msgspec import Meta

from kvtrio.core.types import Retain
from kvtrio.serve.errors import CONFLICT, MISSING, NOT_SUPPORTED, TOO_MANY, WRONG_VALUE, ApiError
from kvtrio.serve.job import Job
from kvtrio.serve.keeping import Asker
from kvtrio.serve.prepare import Preparer
from kvtrio.serve.schema import (
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_SALT_CHARS,
    MAX_USER_CHARS,
    ChatBody,
    Extension,
    LoraList,
    TextBody,
    parse,
)


class WarmBody(msgspec.Struct, kw_only=True):
    """Either ``messages`` or ``prompt``."""

    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    model: str | None = None
    lora: LoraList | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    user: Annotated[str, Meta(max_length=MAX_USER_CHARS)] | None = None
    kvtrio: Extension | None = None

    def as_chat(self) -> ChatBody:
        """Up to the end of its last message, whoever's that is: there the next turn goes on."""
        return ChatBody(
            messages=self.messages,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=bool(self.continue_final_message),
            **self._head(),
        )

    def as_text(self) -> TextBody:
        return TextBody(prompt=self.prompt, **self._head())

    def _head(self) -> dict[str, Any]:
        names = ("model", "lora", "cache_salt", "user", "kvtrio")
        return {"max_tokens": 0, **{name: getattr(self, name) for name in names}}


def warm_job(preparer: Preparer, raw: bytes, asker: Asker) -> Job:
    """Of one prompt and no answer. Raises ``ApiError``; for beside the event loop."""
    body = parse(raw, WarmBody, preparer.bounds.max_values)
    if body.messages is None and body.prompt is None:
        raise ApiError(MISSING, "messages")
    if body.messages is None:
        job = preparer.text_job(body.as_text(), asker)
    elif body.prompt is None:
        job = preparer.chat_job(body.as_chat(), asker)
    else:
        raise ApiError(CONFLICT, "messages", other="prompt")
    if len(job.prompts) > 1:
        raise ApiError(TOO_MANY, "prompt", limit=1)
    if job.is_to_be_saved:
        raise ApiError(NOT_SUPPORTED, "kvtrio.save_session")
    if job.keeping.retain is Retain.AUXILIARY:
        raise ApiError(WRONG_VALUE, "kvtrio.retain", expected="what is not kept is not warm")
    # The server's own limit on waiting is for those who are waited for.
    deadline_ms = body.kvtrio.deadline_ms if body.kvtrio else None
    deadline_s = None if deadline_ms is None else asker.arrived_s + deadline_ms / 1e3
    return evolve(job, queueing=evolve(job.queueing, deadline_s=deadline_s))
