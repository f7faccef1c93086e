"""What a log line may hold: numbers, truth values, members of enums, digests, error classes.

There is no kind of field into which a user's text could be put, so the log is free of it at every
level by construction, not by care. ``event`` refuses a class with any other field, and every value
is checked again when an event is made.
"""

import hashlib
from collections.abc import Callable
from enum import Enum
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import (
    Any,
    NewType,
    TypeAlias,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

import attrs

T = TypeVar("T")
Plain = int | float | bool | str | None
Meta = tuple[str, "Level"]
Attribute: TypeAlias = "attrs.Attribute[Any]"
_META = "_kvtrio_event"


class Level(Enum):
    """How loud a line is; the words are those of the standard library."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @cached_property
    def rank(self) -> int:
        """Larger is louder."""
        return list(Level).index(self)


@attrs.frozen
class Digest:
    """64 bits that tell whether two names are equal, to nobody who lacks the key."""

    value: int = attrs.field(validator=attrs.validators.instance_of(int))

    @classmethod
    def of(cls, name: str, key: bytes) -> "Digest":
        """Digest of ``name`` under the process's secret ``key`` (32 bytes)."""
        return cls.of_bytes(name.encode("utf-8", "surrogatepass"), key)

    @classmethod
    def of_bytes(cls, data: bytes, key: bytes) -> "Digest":
        return cls(int.from_bytes(hashlib.blake2b(data, key=key, digest_size=8).digest()))

    def __str__(self) -> str:
        return f"{self.value:016x}"


@dataclass_transform(frozen_default=True, kw_only_default=True)
def event(name: str, level: Level) -> Callable[[type[T]], type[T]]:
    """Make a class one kind of log line called ``name``.

    Raises ``TypeError`` if a field is of a kind that could hold text.
    """

    def decorate(cls: type[T]) -> type[T]:
        made = attrs.define(frozen=True, kw_only=True, field_transformer=_guarded)(cls)
        setattr(made, _META, (name, level))
        return made

    return decorate


def name_of(event_or_class: object) -> str:
    meta: Meta = getattr(event_or_class, _META)
    return meta[0]


def level_of(event_or_class: object) -> Level:
    meta: Meta = getattr(event_or_class, _META)
    return meta[1]


def plain(line: object) -> dict[str, Plain]:
    """Return the event's fields as JSON values, in order."""
    kind: Any = type(line)
    return {name: _plain_value(getattr(line, name)) for name in _field_names(kind)}


@cache
def _field_names(kind: "type[attrs.AttrsInstance]") -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(kind))


def _plain_value(value: Any) -> Plain:
    if isinstance(value, Enum):
        word: Plain = value.value
        return word
    if isinstance(value, Digest):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    assert value is None or isinstance(value, int | float)
    return value


def _guarded(cls: type, fields: "list[Attribute]") -> "list[Attribute]":
    """Give each field the check that its kind asks for."""
    return [field.evolve(validator=_check(_kinds(cls, field))) for field in fields]


def _kinds(cls: type, field: Attribute) -> tuple[Any, ...]:
    """Flatten the field's annotation; raise ``TypeError`` at a kind that may hold text."""
    union = get_origin(field.type) in (Union, UnionType)
    kinds = tuple(map(_base, get_args(field.type) if union else (field.type,)))
    for kind in kinds:
        if not _is_safe(kind):
            raise TypeError(f"{cls.__name__}.{field.name}: a log line may not hold {kind!r}")
    return kinds


def _base(kind: Any) -> Any:
    return kind.__supertype__ if isinstance(kind, NewType) else kind


def _is_safe(kind: Any) -> bool:
    if get_origin(kind) is type:
        (bound,) = get_args(kind)
        return isinstance(bound, type) and issubclass(bound, BaseException)
    if not isinstance(kind, type):
        return False
    return kind in (int, float, bool, NoneType, Digest) or _is_closed_enum(kind)


def _is_closed_enum(kind: type) -> bool:
    """An enum whose members are not themselves strings that could be swapped for others."""
    return issubclass(kind, Enum) and not issubclass(kind, str)


def _check(kinds: tuple[Any, ...]) -> Callable[[Any, Attribute, Any], None]:
    plain_kinds = tuple(kind for kind in kinds if isinstance(kind, type))
    numeric = (*plain_kinds, int) if float in plain_kinds else plain_kinds
    classes = len(plain_kinds) < len(kinds)

    def check(instance: Any, attribute: Attribute, value: Any) -> None:
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if not (isinstance(value, numeric) or (classes and is_error)):
            # The value itself must not appear here: it may be the text that has to stay out.
            raise TypeError(f"{type(instance).__name__}.{attribute.name}: {type(value).__name__}")

    return check
