"""From chat messages to the prompt's text."""

from datetime import datetime
from typing import Any

from kvtrio.model.template import RESERVED_NAMES, RenderRequest, TemplateError
from kvtrio.serve.errors import (
    BAD_MESSAGE,
    BAD_TEMPLATE_INPUT,
    CONFLICT,
    MISSING,
    ONLY_TEXT,
    TEMPLATE_FAILED,
    TOO_DEEP,
    WRONG_VALUE,
    ApiError,
)
from kvtrio.serve.outline import Outline
from kvtrio.serve.schema import MAX_NAME_CHARS, ChatBody
from kvtrio.serve.served import ServedModel

Message = dict[str, Any]


def chat_outline(body: ChatBody, model: ServedModel, now: float) -> Outline:
    """Return the rendered conversation; ``now``: Unix time, for templates that print a date.

    An assistant message at the end is continued: it is appended to the prompt as it stands.
    Raises ``ApiError``.
    """
    messages = _checked(body.messages)
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(CONFLICT, "continue_final_message", other="add_generation_prompt")
    prefill = _prefill(messages) if body.continue_final_message is not False else None
    request = RenderRequest(
        messages=messages if prefill is None else messages[:-1],
        tools=None,
        add_generation_prompt=prefill is not None or body.add_generation_prompt is not False,
        variables=_variables(body),
        now=datetime.fromtimestamp(now),
    )
    return Outline(_rendered(request, model) + (prefill or ""), model.template, request)


def _rendered(request: RenderRequest, model: ServedModel) -> str:
    try:
        return model.template.render(request)
    except TemplateError as error:
        if error.message_index is None:
            raise ApiError(TEMPLATE_FAILED, "messages") from None
        raise ApiError(BAD_TEMPLATE_INPUT, "messages", index=error.message_index) from None
    except RecursionError:
        raise ApiError(TOO_DEEP) from None


def _checked(messages: list[Message] | None) -> list[Message]:
    if messages is None:
        raise ApiError(MISSING, "messages")
    if not messages:
        raise ApiError(WRONG_VALUE, "messages", expected="expected at least one message")
    for index, message in enumerate(messages):
        _check_message(index, message)
    if len(messages) > 1 and all(_is_text_answer(message) for message in messages[-2:]):
        raise ApiError(
            BAD_MESSAGE,
            "messages",
            index=len(messages) - 1,
            expected="only one assistant message can stand at the end",
        )
    return messages


def _check_message(index: int, message: Message) -> None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_NAME_CHARS:
        raise ApiError(BAD_MESSAGE, "messages", index=index, expected="'role' must be a name")
    if not isinstance(content, str | list | None):
        raise ApiError(
            BAD_MESSAGE, "messages", index=index, expected="'content' must be text or a list"
        )
    for part in content if isinstance(content, list) else []:
        _check_part(index, part)


def _check_part(index: int, part: Any) -> None:
    match part:
        case {"type": "text", "text": str()}:
            return
        case {"type": str(kind)} if kind != "text":
            raise ApiError(ONLY_TEXT, "messages", index=index)
        case _:
            raise ApiError(
                BAD_MESSAGE, "messages", index=index, expected="a part needs 'type' and 'text'"
            )


def _is_text_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _prefill(messages: list[Message]) -> str | None:
    """Return the text of the assistant message at the end, if there is one."""
    if not _is_text_answer(messages[-1]):
        return None
    content = messages[-1].get("content") or ""
    return content if isinstance(content, str) else "\n\n".join(part["text"] for part in content)


def _variables(body: ChatBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if RESERVED_NAMES & variables.keys():
        raise ApiError(WRONG_VALUE, "chat_template_kwargs", expected="sets a reserved name")
    if not isinstance(variables.get("enable_thinking", True), bool):
        raise ApiError(
            WRONG_VALUE, "chat_template_kwargs.enable_thinking", expected="expected bool"
        )
    if body.reasoning_effort == "none":
        variables.setdefault("enable_thinking", False)
    elif body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables
