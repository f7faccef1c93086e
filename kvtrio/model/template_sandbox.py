"""Runs chat templates in jinja2's sandbox, with every source of work metered.

Calls, operators, subscripts and filters pay in the hooks here; loops, macros, literals and the like
pay because ``template_compile`` puts the filters named here into the tree. A template can neither
run for long nor hold much, and this needs no watchdog, thread or signal.
"""

from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined, str_join
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Joiner, Namespace

from kvtrio.model.meter import CHARS_PER_UNIT, LimitExceeded, Meter, weight
from kvtrio.model.template_filters import (
    MAX_WIDTH,
    check_format,
    check_join,
    check_replace,
    make_filters,
    make_tests,
)

MAX_RANGE = 100_000
MAX_BITS = 4_096

# Filters of ours that only rewritten trees can name: no template can spell a space in a name.
TICK, JOIN, BUILT, COMPARED = " tick", " join", " built", " compared"

_STR = (
    "capitalize casefold count endswith find format format_map index isalnum isalpha isascii"
    " isdecimal isdigit islower isnumeric isspace istitle isupper join lower lstrip partition"
    " removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines"
    " startswith strip swapcase title upper center ljust rjust zfill"
)
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(_STR.split())),
    (list, frozenset(["append", "copy", "count", "index", "insert", "pop"])),
    (dict, frozenset(["copy", "get", "items", "keys", "pop", "setdefault", "update", "values"])),
    (tuple, frozenset(["count", "index"])),
)
_OBJECTS = (LoopContext, Macro, Namespace, Joiner)


class Refusal(Exception):
    """A template called ``raise_exception``."""

    def __init__(self, reason: object) -> None:
        super().__init__("refused by the template")
        self.reason = reason


class Sandbox(SandboxedEnvironment):
    """One render's environment, with Hugging Face's settings.

    ``message_index`` is the message whose fields were read last.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, meter: Meter, messages: list[Any] | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.meter = meter
        self.finalize = self._shown
        self.message_index: int | None = None
        self._indexes = {id(message): i for i, message in enumerate(messages or [])}
        self.globals = {"range": _range, "dict": _dict, "namespace": Namespace, "joiner": Joiner}
        self.tests = make_tests(meter)
        self.filters = make_filters(meter) | {
            TICK: self._tick,
            JOIN: self._join,
            BUILT: self._built,
            COMPARED: self._built,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        for kind, names in _METHODS:
            if isinstance(obj, kind):
                return attr in names
        return isinstance(obj, _OBJECTS)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        if attribute.startswith("_"):  # no template has an honest use for these
            raise SecurityError
        return super().unsafe_undefined(obj, attribute)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._note(obj)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._note(obj)
        result = super().getitem(obj, argument)
        if isinstance(argument, slice):
            self.meter.spend_shallow(result)
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The double underscores keep keyword arguments of templates apart from these names.
        __self.meter.spend(1)
        _check_call(__obj, args, kwargs, __self.meter)
        result = super().call(__context, __obj, *args, **kwargs)
        __self.meter.spend_shallow(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_ = super().wrap_str_format(value)
        if format_ is None:
            return None
        text, meter = str(value.__self__), self.meter

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(text, [args, kwargs], meter)
            return format_(*args, **kwargs)

        return checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.meter.spend(1)
        if operator == "%" and isinstance(left, str):
            check_format(left, right, self.meter)
        elif operator in ("*", "**"):
            _check_product(operator, left, right, self.meter)
        result = super().call_binop(context, operator, left, right)
        self.meter.spend_shallow(result)
        return result

    @pass_context  # with a context, jinja2 does not evaluate constants while it compiles
    def _shown(self, context: Any, value: Any) -> Any:
        self.meter.spend_deep(value)
        return value

    def _tick(self, units: int) -> bool:
        self.meter.spend(units)
        return True

    def _join(self, parts: list[Any]) -> str:
        self.meter.spend_deep(parts)
        return str_join(parts)

    def _built(self, value: Any) -> Any:
        self.meter.spend_deep(value)
        return value

    def _note(self, obj: Any) -> None:
        index = self._indexes.get(id(obj))
        if index is not None:
            self.message_index = index


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 gives it

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def run_template(
    code: CodeType, sandbox: Sandbox, variables: Mapping[str, Any], max_chars: int
) -> str:
    """Raises LimitExceeded, Refusal, or whatever the template provokes."""
    template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))
    parts, left = [], max_chars
    for part in template.root_render_func(template.new_context(dict(variables))):
        left -= len(part)
        if left < 0:
            raise LimitExceeded
        parts.append(part)
    return "".join(parts)


def _check_call(function: Any, args: tuple[Any, ...], kwargs: Any, meter: Meter) -> None:
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, str):
        if name == "replace":
            check_replace(owner, args, meter)
        elif name == "join" and args:
            check_join(owner, args[0], meter)
        elif name in ("center", "ljust", "rjust", "zfill") and args and args[0] > MAX_WIDTH:
            raise ValueError("width too large")
        else:
            meter.spend_shallow(owner)
    elif isinstance(owner, list | dict) or name in ("changed", "_dict"):
        meter.spend_shallow(owner)
        meter.spend_deep(args)
        meter.spend_deep(kwargs)


def _check_product(operator: str, left: Any, right: Any, meter: Meter) -> None:
    numbers = [value for value in (left, right) if isinstance(value, int)]
    if len(numbers) == 2:
        bits = left.bit_length()
        if (bits * right if operator == "**" else bits + right.bit_length()) > MAX_BITS:
            raise ValueError("number too large")
    elif numbers and not isinstance(left, float) and not isinstance(right, float):
        text = right if numbers[0] is left else left
        meter.spend_deep(text)
        is_text, count = isinstance(text, str | bytes), max(0, numbers[0])
        meter.spend(count * len(text) // CHARS_PER_UNIT if is_text else count * weight(text))


def _range(*args: int) -> range:
    values = range(*args)
    if len(values) > MAX_RANGE:
        raise OverflowError("range too large")
    return values


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
