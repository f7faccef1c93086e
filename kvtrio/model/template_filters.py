"""Filters a chat template may use, each paying for its work before it does it.

The set is jinja2's without what no chat template needs and what cannot be bounded (center, batch,
pprint, random, ...), with Hugging Face's ``tojson`` and the ``from_json`` of DeepSeek's templates.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.tests import TESTS as DEFAULT_TESTS

from kvtrio.model.meter import CHARS_PER_UNIT, Meter

MAX_WIDTH = 256
_LONG_NUMBER = re.compile(r"[0-9]{4}|\*|\{[^{}]*\{")
"""In a format: a width of thousands, or one taken from the arguments."""

_FREE = "abs d default first float int last length count"
_LINEAR = "items list map reject rejectattr reverse select selectattr"
_DEEP = "capitalize dictsort e escape groupby lower max min safe sort string trim unique upper"
_SLOW = "title truncate urlencode wordcount"
_SLOWNESS = 8
_COMPARING = "== eq equalto != ne < lt lessthan <= le > gt greaterthan >= ge in"


def make_filters(meter: Meter) -> dict[str, Callable[..., Any]]:
    """All filters by name, drawing on ``meter``."""
    filters = {name: DEFAULT_FILTERS[name] for name in _FREE.split()}
    for name in _LINEAR.split():
        filters[name] = _paying(DEFAULT_FILTERS[name], meter, meter.spend_shallow)
    for name in _DEEP.split():
        filters[name] = _paying(DEFAULT_FILTERS[name], meter, meter.spend_deep)
    for name in _SLOW.split():
        filters[name] = _paying(DEFAULT_FILTERS[name], meter, _slowly(meter))
    own = _OwnFilters(meter)
    filters |= {
        "format": own.format,
        "from_json": own.from_json,
        "fromjson": own.from_json,
        "indent": own.indent,
        "join": own.join,
        "replace": own.replace,
        "round": own.round,
        "tojson": own.tojson,
    }
    return filters


def make_tests(meter: Meter) -> dict[str, Any]:
    """jinja2's tests; those that compare pay for both sides."""
    tests: dict[str, Any] = dict(DEFAULT_TESTS)
    for name in _COMPARING.split():
        tests[name] = _paying(tests[name], meter, meter.spend_deep)
    return tests


def check_format(text: str, args: Any, meter: Meter) -> None:
    """Pay for a format string whose every field may show all of ``args``.

    Raises ValueError for widths that are large or come from the arguments.
    """
    if _LONG_NUMBER.search(text):
        raise ValueError("format width too large")
    for _ in range(1 + text.count("{") + text.count("%")):
        meter.spend_deep(args)


def check_replace(text: str, args: tuple[Any, ...], meter: Meter) -> None:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        meter.spend_shallow(text)
        meter.spend(text.count(args[0]) * len(args[1]) // CHARS_PER_UNIT)


def check_join(separator: str, values: Any, meter: Meter) -> None:
    meter.spend_deep(values)
    if hasattr(values, "__len__"):
        meter.spend(len(values) * len(separator) // CHARS_PER_UNIT)


def materialise(value: Any) -> Any:
    """A list for an iterator: its work is done now, and it does not print as an address."""
    return list(value) if isinstance(value, Iterator) else value


def _slowly(meter: Meter) -> Callable[[Any], None]:
    def spend(value: Any) -> None:
        for _ in range(_SLOWNESS):
            meter.spend_deep(value)

    return spend


def _paying(
    function: Callable[..., Any], meter: Meter, spend: Callable[[Any], None]
) -> Callable[..., Any]:
    # Filters that jinja2 gives its context or environment take that as their first argument.
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def pay(*args: Any, **kwargs: Any) -> Any:
        for value in args[at:]:
            spend(value)
        result = materialise(function(*args, **kwargs))
        meter.spend_shallow(result)
        return result

    return pay


class _OwnFilters:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def format(self, value: str, *args: Any, **kwargs: Any) -> str:
        check_format(str(value), [args, kwargs], self._meter)
        return str(value) % (kwargs or args)

    def from_json(self, text: str) -> Any:
        self._meter.spend(1 + len(text) // 4)
        return json.loads(text)

    def indent(
        self, text: str, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        pad = width if isinstance(width, str) else " " * min(width, MAX_WIDTH)
        check_replace(text, ("\n", pad + "\n"), self._meter)
        result: str = DEFAULT_FILTERS["indent"](text, pad, first, blank)
        return result

    def join(self, values: Any, separator: str = "", attribute: str | None = None) -> str:
        values = materialise(values)
        if attribute is not None:
            values = [value[attribute] for value in values]
        check_join(separator, values, self._meter)
        return separator.join(str(value) for value in values)

    def replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        self._meter.spend_deep(text)
        text = str(text)
        check_replace(text, (old, new), self._meter)
        result: str = text.replace(old, new, -1 if count is None else count)
        return result

    def round(self, value: float, precision: int = 0, method: str = "common") -> float:
        if abs(precision) > MAX_WIDTH:
            raise ValueError("precision too large")
        result: float = DEFAULT_FILTERS["round"](value, precision, method)
        return result

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        value = materialise(value)
        self._meter.spend_deep(value)
        if (indent or 0) > MAX_WIDTH or sum(map(len, separators or ())) > MAX_WIDTH:
            raise ValueError("width too large")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            return encoder.encode(value)
        parts = []
        for part in encoder.iterencode(value):  # indented nesting costs depth times entries
            self._meter.spend_shallow(part)
            parts.append(part)
        return "".join(parts)
