"""A log line has no place for text."""

from enum import Enum, StrEnum
from typing import Any

import pytest

from kvtrio.core.types import FinishReason, RequestId
from kvtrio.obs import events
from kvtrio.obs.schema import Digest, Level, event, name_of, plain

TEXT = "the user's words"


class Colour(Enum):
    RED = "red"


class Words(StrEnum):
    """Its members are strings, so any string type-checks by accident."""

    RED = "red"


@event("test.line", Level.INFO)
class Line:
    """One field of each kind."""

    count: int
    share: float
    flag: bool
    colour: Colour
    name: Digest
    request_id: RequestId
    error: type[BaseException] | None
    maybe: int | None


def a_line(**changes: Any) -> Line:
    values: dict[str, Any] = {
        "count": 3,
        "share": 0.5,
        "flag": True,
        "colour": Colour.RED,
        "name": Digest(255),
        "request_id": RequestId(7),
        "error": ValueError,
        "maybe": None,
    }
    return Line(**(values | changes))


@pytest.mark.parametrize(
    "kind",
    [
        str,
        bytes,
        object,
        Any,
        list[int],
        dict[str, int],
        tuple[int, ...],
        int | str,
        Words,
        type[int],
        type,
        Exception,
        "int",
    ],
)
def test_a_field_that_may_hold_text_is_refused(kind: Any) -> None:
    """The class cannot even be made."""
    with pytest.raises(TypeError, match=r"Bad\.field"):
        event("test.bad", Level.INFO)(type("Bad", (), {"__annotations__": {"field": kind}}))


@pytest.mark.parametrize("field", ["count", "share", "flag", "colour", "name", "error", "maybe"])
@pytest.mark.parametrize("value", [TEXT, TEXT.encode(), [TEXT], ValueError(TEXT)])
def test_text_in_any_field_is_refused_without_being_quoted(field: str, value: Any) -> None:
    """A wrong value raises where the line is made, and the error does not repeat it."""
    with pytest.raises(TypeError) as caught:
        a_line(**{field: value})
    assert TEXT not in str(caught.value)


def test_plain_values() -> None:
    """Each kind has one JSON form."""
    assert plain(a_line()) == {
        "count": 3,
        "share": 0.5,
        "flag": True,
        "colour": "red",
        "name": "00000000000000ff",
        "request_id": 7,
        "error": "builtins.ValueError",
        "maybe": None,
    }


def test_digest_needs_the_key() -> None:
    """The same name gives the same digest under one key and another under another."""
    key, other = bytes(32), bytes(31) + b"\1"
    assert Digest.of("a", key) == Digest.of("a", key)
    assert Digest.of("a", key) != Digest.of("b", key)
    assert Digest.of("a", key) != Digest.of("a", other)
    assert Digest.of("\udcff", key) != Digest.of("a", key)


def test_the_catalogue_is_complete() -> None:
    """Every event class of the module is listed, under a name of its own."""
    made = {value for value in vars(events).values() if hasattr(value, "_kvtrio_event")}
    assert made == set(events.CATALOGUE)
    assert len({name_of(line) for line in events.CATALOGUE}) == len(events.CATALOGUE)


def test_an_event_cannot_be_changed() -> None:
    """What was checked when it was made stays so."""
    line = events.LoopStall(held_s=0.5)
    with pytest.raises(AttributeError):
        line.held_s = TEXT  # type: ignore[assignment,misc]


def test_enums_of_the_core_are_words_of_ours() -> None:
    """Finish reasons are logged under OpenAI's names where it has them."""
    known = {"stop", "length", "abort", "deadline", "error", "no_memory"}
    assert {reason.value for reason in FinishReason} == known
