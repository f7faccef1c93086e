"""The scenario format: strict, bounded, without room for text, and as its papers say."""

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from harness.source_tree import ROOT
from kvtrio.replay.scenario import (
    MAX_PIECES,
    Action,
    Adapter,
    Beginning,
    Block,
    Expect,
    Fresh,
    Header,
    Line,
    Origin,
    Part,
    Ref,
    Request,
    Use,
    What,
)
from kvtrio.replay.scenario_file import (
    MAX_LINE_BYTES,
    ScenarioError,
    checked,
    collect,
    encode_line,
    read_lines,
    read_scenario,
    schema_bytes,
    write_scenario,
)

HEADER = Header(origin=Origin.MADE, max_context=1000, purposes=("chat",))
FOLDER = ROOT / "scenarios"


def request(number: int = 0, at_s: float = 0.0, **more: Any) -> Request:
    chosen: dict[str, Any] = {"output_tokens": 5, "prompt": (Fresh(10),), **more}
    return Request(id=number, at_s=at_s, **chosen)


LINES: list[Line] = [
    HEADER,
    Adapter(alias="a0", content="00ff00ff00ff00ff"),
    request(session=3, purpose=0, adapters=(Use(alias="a0", scale=-0.5, start=4),)),
    Action(at_s=1.0, what=What.SCALES, scales=(Use(alias="a0"),)),
    request(1, 2.5, prompt=(Ref(0, Part.PROMPT, 0, 10), Ref(0, Part.OUTPUT, 1, 4), Block(7, 3))),
    Expect(request=1, min_cached=10, output_unlike=0),
]


def test_what_is_written_is_read(tmp_path: Any) -> None:
    """All kinds of lines, through a file."""
    path = tmp_path / "scenario.jsonl"
    write_scenario(path, LINES)
    assert read_scenario(path) == collect(LINES)
    found = read_scenario(path)
    assert (len(found.requests), len(found.adapters), len(found.expects)) == (2, 1, 1)
    assert found.actions == ((1, LINES[3]),)


def test_what_is_refused_leaves_no_scenario(tmp_path: Any) -> None:
    """Half a file could be taken for a whole one. Refused at once, a file stays as it is."""
    path = tmp_path / "scenario.jsonl"
    write_scenario(path, LINES)
    with pytest.raises(ScenarioError):
        write_scenario(path, [request()])
    assert read_scenario(path) == collect(LINES)
    with pytest.raises(ScenarioError):
        write_scenario(path, [HEADER, request(), request()])
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [request()],
        [HEADER, HEADER],
        [HEADER, request(1)],
        [HEADER, request(), request()],
        [HEADER, request(at_s=2.0), request(1, 1.0)],
        [HEADER, request(purpose=1)],
        [HEADER, request(adapters=(Use(alias="a0"),))],
        [HEADER, Adapter(alias="a0"), Adapter(alias="a0")],
        [HEADER, request(prompt=(Ref(0, Part.PROMPT, 0, 1),))],
        [HEADER, request(), request(1, prompt=(Ref(0, Part.PROMPT, 5, 6),))],
        [HEADER, request(), request(1, prompt=(Ref(0, Part.OUTPUT, 0, 6),))],
        [HEADER, request(output_tokens=991)],
        [HEADER, request(same_as=0)],
        [HEADER, request(begins_as=Beginning(0, 1))],
        [HEADER, request(output_tokens=2), request(1, begins_as=Beginning(0, 3))],
        [HEADER, request(output_tokens=2, left_s=0.5, ready_tokens=13)],
        [HEADER, Adapter(alias="a0"), request(adapters=(Use(alias="a0", start=11),))],
        [HEADER, Expect(request=0)],
        [HEADER, Action(at_s=0.0, what=What.SCALES, scales=(Use(alias="a0"),))],
    ],
)
def test_lines_that_do_not_fit_together(lines: list[Line]) -> None:
    """The error names the line, and writing refuses them like reading."""
    with pytest.raises(ScenarioError, match=r"^line \d+: "):
        list(checked(lines))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"},
        {"extra": 1},
        {"at_s": -1},
        {"at_s": "0"},
        {"output_tokens": 1.5},
        {"output_tokens": 10**9},
        {"prompt": []},
        {"prompt": [{"kind": "fresh"}]},
        {"prompt": [{"kind": "fresh", "length": 0}]},
        {"prompt": [{"kind": "fresh", "length": 1}] * (MAX_PIECES + 1)},
        {"prompt": [{"kind": "text", "text": "hello"}]},
        {"adapters": [{"alias": "my adapter"}]},
        {"retain": "always"},
    ],
)
def test_lines_that_are_none(change: dict[str, Any]) -> None:
    """The format is strict, and its errors do not repeat what they are about."""
    line = json.loads(encode_line(request())) | change
    file = io.BytesIO(encode_line(HEADER) + json.dumps(line).encode())
    with pytest.raises(ScenarioError, match=r"^line 2: not a line of a kvtrio.scenario/1 file$"):
        list(read_lines(file))


@pytest.mark.parametrize("raw", [b"", b"\xff\n", b"[" * 100_000, b"{}\n", b"null\n", b"\n"])
def test_files_that_are_none(raw: bytes) -> None:
    """Whatever they hold."""
    with pytest.raises(ScenarioError, match=r"^line 1: "):
        list(read_lines(io.BytesIO(raw)))


def test_a_line_without_end() -> None:
    """No more of it is read than a line may be long."""
    with pytest.raises(ScenarioError, match="longer than"):
        list(read_lines(io.BytesIO(encode_line(HEADER) + b" " * (2 * MAX_LINE_BYTES))))


def test_a_newer_version() -> None:
    """It is refused at its first line."""
    raw = encode_line(HEADER).replace(b"scenario/1", b"scenario/2")
    with pytest.raises(ScenarioError, match="not the header"):
        list(read_lines(io.BytesIO(raw)))


def test_the_schema_file_is_ours() -> None:
    """``scenario.schema.json`` describes what the reader reads."""
    assert (FOLDER / "scenario.schema.json").read_bytes() == schema_bytes()


def test_the_examples_are_scenarios() -> None:
    """Those of the README."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        assert list(read_lines(io.BytesIO(example.encode())))


def test_no_field_has_room_for_text() -> None:
    """Every text has a pattern of its own, but the operator's purposes."""
    free = {path for path, kind in _texts(msgspec.inspect.type_info(Line), "") if not kind.pattern}
    assert free == {"Header.purposes"}


def _texts(kind: Any, path: str) -> Iterator[tuple[str, msgspec.inspect.StrType]]:
    """Every place in a line where a text may stand."""
    inspect = msgspec.inspect
    match kind:
        case inspect.StrType():
            yield path, kind
        case inspect.StructType():
            for field in kind.fields:
                yield from _texts(field.type, f"{kind.cls.__name__}.{field.name}")
        case inspect.UnionType():
            for each in kind.types:
                yield from _texts(each, path)
        case inspect.VarTupleType():
            yield from _texts(kind.item_type, path)
        case (
            inspect.IntType()
            | inspect.FloatType()
            | inspect.BoolType()
            | inspect.NoneType()
            | inspect.EnumType()
            | inspect.LiteralType()
        ):
            pass
        case _:
            raise AssertionError(f"{path}: {kind}")
