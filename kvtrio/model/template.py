"""Chat templates: which one a model uses, what it can do, and the prompt it makes of messages."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from attrs import asdict, evolve, field, frozen

from kvtrio.model.builtin_templates import BUILTIN_TEMPLATES, DEFAULT_TEMPLATE
from kvtrio.model.errors import ModelFileError, safe_name
from kvtrio.model.messages import (
    MessageRules,
    TemplateError,
    lead_with_system,
    normalise,
    plain_copy,
)
from kvtrio.model.template_compile import compile_template
from kvtrio.model.template_probe import Capabilities, probe
from kvtrio.model.template_render import Renderer, RenderRequest

__all__ = ["ChatTemplate", "RenderRequest", "TemplateError", "check_usable", "load_template"]

_HELLO = {"role": "user", "content": "Hello"}
TEMPLATE_KEY = "tokenizer.chat_template"
RESERVED_NAMES = frozenset(
    (
        "messages",
        "tools",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
        "chat_template",
        "tokenize",
        "tokenizer",
    )
)
"""Variables that a request may not set."""


@frozen(eq=False)
class ChatTemplate:
    """A compiled template; may be used from several threads at once."""

    name: str
    """"model" for the file's own, "custom" for a given source, else the built-in's name."""
    source: str = field(repr=False)
    _renderer: Renderer = field(repr=False)
    _rules: MessageRules
    _capabilities: Capabilities

    def caps(self) -> dict[str, bool]:
        """llama-server's ``chat_template_caps``."""
        return asdict(self._capabilities)

    def render(self, request: RenderRequest) -> str:
        """The prompt's text; the request stays as it is.

        Raises TemplateError for a conversation that is none, that the template refuses or cannot
        handle, or that takes it too much work.
        """
        taken = RESERVED_NAMES.intersection(request.variables)
        if taken:
            raise TemplateError(None, f"a request cannot set the variable {min(taken)}")
        messages = normalise(request.messages, self._rules)
        try:
            variables = plain_copy(request.variables)
            tools = plain_copy(request.tools or [])
        except RecursionError:
            raise TemplateError(None, "tools or variables are nested too deeply") from None
        if messages and not self._rules.takes_system:
            messages = lead_with_system(messages)
        num_moved = len(request.messages) - len(messages)
        try:
            return self._renderer.render(
                evolve(request, messages=messages, tools=tools, variables=variables)
            )
        except TemplateError as error:
            if error.message_index is None:
                raise
            raise TemplateError(error.message_index + num_moved, error.text) from None


def load_template(
    metadata: Mapping[str, Any], override: str | None, bos_text: str, eos_text: str
) -> ChatTemplate:
    """The template to use for a model, compiled and probed.

    ``override`` is a built-in's name or jinja source; without it the file's own template counts, or
    "plain" if it has none or an empty one. Raises ModelFileError for an unknown name or a source
    that is no template.
    """
    name, source = _choose(metadata, override)
    renderer = Renderer(compile_template(source), bos_text, eos_text)
    capabilities, rules = probe(renderer)
    return ChatTemplate(name, source, renderer, rules, capabilities)


def check_usable(template: ChatTemplate) -> None:
    """Raise ModelFileError unless ``template`` makes a prompt of one plain user message.

    Without that every chat would fail, so better none begins.
    """
    try:
        made = template.render(RenderRequest(messages=[_HELLO], now=datetime(2024, 1, 1)))
        problem = "" if made else "its prompt is empty"
    except TemplateError as error:
        problem = error.text
    if problem:
        raise ModelFileError(
            f"the chat template ({template.name}) cannot render a plain user message: {problem}; "
            "--chat-template gives another"
        )


def _choose(metadata: Mapping[str, Any], override: str | None) -> tuple[str, str]:
    if override is not None:
        if override in BUILTIN_TEMPLATES:
            return override, BUILTIN_TEMPLATES[override]
        if "{" not in override:
            known = ", ".join(sorted(BUILTIN_TEMPLATES))
            raise ModelFileError(f'no chat template "{safe_name(override)}"; there are {known}')
        return "custom", override
    own = metadata.get(TEMPLATE_KEY, metadata.get(f"{TEMPLATE_KEY}.default"))
    if own is not None and not isinstance(own, str):
        raise ModelFileError(f"{TEMPLATE_KEY} is not a text")
    return ("model", own) if own else (DEFAULT_TEMPLATE, BUILTIN_TEMPLATES[DEFAULT_TEMPLATE])
