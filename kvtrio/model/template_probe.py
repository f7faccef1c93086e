"""Finds out what a chat template can do, by rendering conversations with marked words."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from attrs import evolve, frozen

from kvtrio.model.messages import REASONING_NAMES, MessageRules, TemplateError
from kvtrio.model.template_render import Renderer, RenderRequest

_TEXT, _CALL, _OTHER, _ARGUMENT, _THOUGHT = "Kx7q", "call_Zt4", "call_Wp9", "Qm3v", "Vd8r"
_LONG_ID, _OTHER_LONG_ID = "call_00000000000000000001", "call_00000000000000000002"
_SHORT_ID, _OTHER_SHORT_ID = "000000001", "000000002"
PROBE_BUDGET = 20_000
"""Units of work for one probe; the busiest of llama.cpp's 71 templates takes some 3,000."""
_DAY = datetime(2024, 1, 1)
_USER = {"role": "user", "content": "Hello"}


@frozen(kw_only=True)
class Capabilities:
    """llama-server's ``chat_template_caps``, name for name."""

    supports_tools: bool
    supports_tool_calls: bool
    supports_system_role: bool
    supports_parallel_tool_calls: bool
    supports_preserve_reasoning: bool
    supports_reasoning_effort: bool
    supports_string_content: bool
    supports_typed_content: bool
    supports_object_arguments: bool


def probe(renderer: Renderer) -> tuple[Capabilities, MessageRules]:
    """Render some twenty small conversations; what does not render is not supported."""
    return _Prober(evolve(renderer, base_budget=PROBE_BUDGET)).find()


class _Prober:
    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._parts_only = False

    def find(self) -> tuple[Capabilities, MessageRules]:
        takes_text = _TEXT in self._text([{"role": "user", "content": _TEXT}])
        parts = self._text([{"role": "user", "content": [{"type": "text", "text": _TEXT}]}])
        # A template that does not know parts prints them as Python or JSON would.
        takes_parts = _TEXT in parts and "'type'" not in parts and '"type"' not in parts
        self._parts_only = takes_parts and not takes_text
        short = not self._calls(_LONG_ID, True) and not self._calls(_LONG_ID, False)
        call_id = _SHORT_ID if short else _LONG_ID
        as_object, as_text = self._calls(call_id, True), self._calls(call_id, False)
        names = self._renderer.compiled.names & set(REASONING_NAMES) or {REASONING_NAMES[0]}
        shows_system = self._shows_system()
        capabilities = Capabilities(
            supports_tools=self._shows_tools(),
            supports_tool_calls=as_object or as_text,
            supports_system_role=shows_system,
            supports_parallel_tool_calls=self._shows_two_calls(short, as_object),
            supports_preserve_reasoning=self._keeps_reasoning(tuple(sorted(names))),
            supports_reasoning_effort=self._varies("low") != self._varies("high"),
            supports_string_content=takes_text,
            supports_typed_content=takes_parts,
            supports_object_arguments=as_object,
        )
        rules = MessageRules(
            takes_system=shows_system,
            takes_text=not self._parts_only,
            takes_parts=takes_parts,
            takes_objects=as_object or not as_text,
            needs_short_ids=short and (as_object or as_text),
            reasoning_names=tuple(sorted(names)),
        )
        return capabilities, rules

    def _text(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, **variables: Any
    ) -> str:
        """The prompt; empty if the template refuses."""
        if self._parts_only:
            messages = [_as_parts(message) for message in messages]
        request = RenderRequest(
            messages=[dict(message) for message in messages],
            tools=tools,
            variables=variables,
            now=_DAY,
        )
        try:
            return self._renderer.render(request)
        except TemplateError:
            return ""

    def _calls(self, call_id: str, as_object: bool) -> bool:
        arguments: Any = {"word": _ARGUMENT} if as_object else '{"word": "' + _ARGUMENT + '"}'
        text = self._text(_call_messages([(call_id, _CALL, arguments)]), [_tool(_CALL)])
        # Text that the template writes as JSON once more has its quotes escaped.
        return _CALL in text and _ARGUMENT in text and '\\"word' not in text

    def _shows_two_calls(self, short: bool, as_object: bool) -> bool:
        arguments: Any = {"word": _ARGUMENT} if as_object else '{"word": "' + _ARGUMENT + '"}'
        ids = (_SHORT_ID, _OTHER_SHORT_ID) if short else (_LONG_ID, _OTHER_LONG_ID)
        calls = [(ids[0], _CALL, arguments), (ids[1], _OTHER, arguments)]
        text = self._text(_call_messages(calls))
        return _CALL in text and _OTHER in text

    def _shows_tools(self) -> bool:
        return _CALL in self._text([_USER], [_tool(_CALL)])

    def _shows_system(self) -> bool:
        return _TEXT in self._text([{"role": "system", "content": _TEXT}, _USER])

    def _keeps_reasoning(self, names: tuple[str, ...]) -> bool:
        answer = {"role": "assistant", "content": "Hi"} | dict.fromkeys(names, _THOUGHT)
        return _THOUGHT in self._text([_USER, answer, _USER])

    def _varies(self, effort: str) -> str:
        return self._text([_USER], reasoning_effort=effort)


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}] if content else []}


def _call_messages(calls: list[tuple[str, str, Any]]) -> list[dict[str, Any]]:
    """A turn with ``calls`` (id, name, arguments), their answers and the model's last word."""
    return [
        _USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for call_id, name, arguments in calls
            ],
        },
        *(
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": "done"}
            for call_id, name, _ in calls
        ),
        {"role": "assistant", "content": "Done"},
        _USER,
    ]


def _tool(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "A word"}},
                "required": ["word"],
            },
        },
    }
