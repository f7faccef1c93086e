"""Brings chat messages of many clients into the one form that templates expect.

Rules of common practice (llama-server's, clients' habits): null means absent; a missing text is
empty; tool arguments are objects; ``developer`` is ``system``; past reasoning has one name.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
SHORT_ID_CHARS = 9


class TemplateError(ValueError):
    """A conversation cannot be rendered; ``text`` says why in words that hold nothing of it."""

    def __init__(self, message_index: int | None, text: str) -> None:
        where = "" if message_index is None else f" (message {message_index})"
        super().__init__(text + where)
        self.message_index = message_index
        """Index of the message that was being handled; None if none was."""
        self.text = text


@frozen(kw_only=True)
class MessageRules:
    """What one template accepts, found by rendering probes."""

    takes_system: bool = True
    """The first message may be the system's."""
    takes_text: bool = True
    """Content may be a string."""
    takes_parts: bool = False
    """Content may be a list of typed parts."""
    takes_objects: bool = True
    """Tool arguments are objects; otherwise JSON text."""
    needs_short_ids: bool = False
    """Tool call ids must be nine letters or digits (Mistral)."""
    reasoning_names: tuple[str, ...] = REASONING_NAMES[:1]
    """Names under which the template looks for past reasoning."""


def normalise(messages: Sequence[Any], rules: MessageRules) -> list[dict[str, Any]]:
    """Plain copies of ``messages``, one for one. Raises TemplateError for what is no message."""
    result = []
    for index, message in enumerate(messages):
        try:
            result.append(_message(message, rules))
        except TemplateError as error:
            raise TemplateError(index, error.text) from None
        except RecursionError:
            raise TemplateError(index, "the message is nested too deeply") from None
    return result


def lead_with_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template without a system role: its text leads the next message, as in llama-server.

    Without a next message it becomes the user's; nothing is dropped unseen.
    """
    first, rest = messages[0], messages[1:]
    if first["role"] != "system":
        return messages
    if not rest:
        return [first | {"role": "user"}]
    one, two = first["content"], rest[0]["content"]
    if isinstance(one, str) and isinstance(two, str):
        return [rest[0] | {"content": f"{one}\n{two}"}, *rest[1:]]
    return [rest[0] | {"content": _as_parts(one) + _as_parts(two)}, *rest[1:]]


def plain_copy(value: Any) -> Any:
    """A deep copy of JSON data. Raises TemplateError for anything else."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TemplateError(None, "only JSON data can be rendered")
        return {key: plain_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise TemplateError(None, "only JSON data can be rendered")


def _message(message: Any, rules: MessageRules) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TemplateError(None, "a message must be an object")
    copy = {key: value for key, value in plain_copy(message).items() if value is not None}
    if not isinstance(copy.get("role"), str):
        raise TemplateError(None, "a message needs a role")
    if copy["role"] == "developer":
        copy["role"] = "system"
    copy["content"] = _content(copy.get("content", ""), rules)
    if "tool_calls" in copy:
        copy["tool_calls"] = _tool_calls(copy["tool_calls"], rules)
    if rules.needs_short_ids and isinstance(copy.get("tool_call_id"), str):
        copy["tool_call_id"] = short_id(copy["tool_call_id"])
    reasoning = next((copy[name] for name in REASONING_NAMES if name in copy), None)
    if isinstance(reasoning, str):
        copy |= dict.fromkeys(rules.reasoning_names, reasoning)
    return copy


def _content(content: Any, rules: MessageRules) -> Any:
    if isinstance(content, str):
        parts = [content]
    elif isinstance(content, list):
        parts = [_part_text(part) for part in content]
    else:
        raise TemplateError(None, "content must be a text or a list of parts")
    text = "\n".join(parts)
    if not rules.takes_text:
        return [{"type": "text", "text": part} for part in parts if part]
    if isinstance(content, list) and rules.takes_parts and text:
        return [{"type": "text", "text": part} for part in parts]
    return text


def _as_parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        text = part.get("text", "")
        if isinstance(text, str):
            return text
    raise TemplateError(None, "only text parts are supported as content")


def _tool_calls(calls: Any, rules: MessageRules) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise TemplateError(None, "tool_calls must be a list of objects")
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and "arguments" in function:
            function["arguments"] = _arguments(function["arguments"], rules)
        if rules.needs_short_ids and isinstance(call.get("id"), str):
            call["id"] = short_id(call["id"])
    return calls


def _arguments(arguments: Any, rules: MessageRules) -> Any:
    if not rules.takes_objects:
        return arguments if isinstance(arguments, str) else json.dumps(arguments)
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except ValueError:  # a model's own words may be no JSON; its history must still render
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def short_id(text: str) -> str:
    """Nine letters and digits that stand for a tool call's id; such an id stays as it is."""
    if len(text) == SHORT_ID_CHARS and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:SHORT_ID_CHARS]
