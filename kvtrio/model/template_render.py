"""Runs a compiled chat template on messages, within limits, and says what went wrong."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from attrs import field, frozen

from kvtrio.model.messages import TemplateError
from kvtrio.model.meter import CHARS_PER_UNIT, LimitExceeded, Meter, weight
from kvtrio.model.template_compile import Compiled
from kvtrio.model.template_sandbox import Refusal, Sandbox, run_template

BASE_BUDGET = 500_000
BUDGET_FACTOR = 128
"""Units of work for each unit that the request weighs (see ``meter``)."""
BASE_CHARS = 1_048_576
CHARS_FACTOR = 8
"""Longest prompt for each character that the request weighs."""
MAX_DATE_FORMAT = 256


@frozen(kw_only=True)
class RenderRequest:
    """What one prompt is made of."""

    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(factory=dict)
    """The request's own variables for the template (``chat_template_kwargs``)."""
    now: datetime


@frozen(eq=False)
class Renderer:
    """A compiled template and the texts of its model's start and end tokens."""

    compiled: Compiled
    bos_text: str
    eos_text: str
    base_budget: int = BASE_BUDGET
    """Units of work that even an empty request may take."""

    def render(self, request: RenderRequest) -> str:
        """The prompt's text; messages, tools and variables must be plain copies, which the template
        may change. Raises TemplateError for whatever the template provokes."""
        messages = list(request.messages)
        size = weight([messages, request.tools, request.variables])
        sandbox = Sandbox(Meter(self.base_budget + BUDGET_FACTOR * size), messages)
        max_chars = BASE_CHARS + CHARS_FACTOR * CHARS_PER_UNIT * size
        try:
            return run_template(
                self.compiled.code, sandbox, self._variables(request, messages), max_chars
            )
        except Refusal as refusal:
            # A reason put together from the messages would show what they say.
            fixed = isinstance(refusal.reason, str) and refusal.reason in self.compiled.reasons
            text = str(refusal.reason) if fixed else "the chat template refuses this conversation"
        except LimitExceeded:
            text = "the chat template does too much work for this conversation"
        except Exception:  # a template can provoke any error that Python and jinja2 know
            text = "the chat template cannot handle this conversation"
        raise TemplateError(sandbox.message_index, text)

    def _variables(self, request: RenderRequest, messages: list[Any]) -> dict[str, Any]:
        def strftime_now(form: str) -> str:
            if len(form) > MAX_DATE_FORMAT:
                raise ValueError("date format too long")
            return request.now.strftime(form)

        def raise_exception(reason: object = "") -> None:
            raise Refusal(reason)

        variables: dict[str, Any] = {
            "enable_thinking": True,
            "preserve_thinking": True,
            "clear_thinking": False,
            "truncate_history_thinking": False,
            "drop_thinking": False,
            # Llama 3.x prints a day of 2024 without these.
            "datetime": request.now.strftime("%b %d %Y"),
            "date_string": request.now.strftime("%d %b %Y"),
            "bos_token": self.bos_text,
            "eos_token": self.eos_text,
        }
        variables |= request.variables
        variables |= {
            "messages": messages,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }
        # Some templates loop over tools without asking whether there are any.
        if request.tools:
            variables["tools"] = list(request.tools)
        if request.add_generation_prompt:
            variables["add_generation_prompt"] = True
        return variables
