"""The declarations for ctypes against the C headers."""

import ctypes
import re

import pytest

from harness.native import library
from harness.source_tree import ROOT
from kvtrio.kernels import cpu_abi, cpu_single

FOLDER = ROOT / "kernels/cpu"
KINDS = {ctypes.c_int32: "int32_t", ctypes.c_int64: "int64_t", ctypes.c_float: "float",
         ctypes.c_double: "double"}  # fmt: skip


def headers() -> str:
    """All C headers, without comments."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.h"))]
    return re.sub(r"/\*.*?\*/", "", "".join(texts), flags=re.DOTALL)


def c_fields(name: str) -> list[tuple[str, str]]:
    """(name, type) of a structure's fields as the header has them; "*": any pointer."""
    match = re.search(r"typedef struct \{([^}]*)\} kvt_" + name + ";", headers())
    assert match is not None, name
    fields = []
    for declaration in match[1].split(";")[:-1]:
        kind, names = re.fullmatch(
            r"\s*((?:const )?\w+\*?)\s+(.*)", declaration, re.DOTALL
        ).groups()
        for each in names.split(","):
            plain, _, count = each.strip().partition("[")
            is_pointer = kind.endswith("*")
            fields.append((plain, "*" if is_pointer else kind + ("[" + count if count else "")))
    return fields


def python_fields(structure: type[ctypes.Structure]) -> list[tuple[str, str]]:
    return [(name, c_name(kind)) for name, kind in structure._fields_]


def c_name(kind: type) -> str:
    if issubclass(kind, ctypes.Array):
        return f"{KINDS[kind._type_]}[{kind._length_}]"
    if issubclass(kind, ctypes.Structure):
        return f"kvt_{kind.__name__.lower()}"
    return KINDS.get(kind, "*")


@pytest.mark.parametrize("structure", cpu_abi.STRUCTURES, ids=lambda s: s.__name__)
def test_structures_have_the_fields_of_the_header(structure):
    """Names, types and order are the same on both sides."""
    name = re.sub(r"(?<!^)([A-Z])", r"_\1", structure.__name__).lower()
    assert python_fields(structure) == c_fields(name)


def test_the_structures_are_numbered_as_in_the_header():
    """``kvt_struct_bytes`` is asked for the right ones."""
    names = re.findall(r"KVT_STRUCT_(\w+)", headers())
    mine = [each.__name__.replace("Desc", "") for each in cpu_abi.STRUCTURES]
    assert [name.replace("_", "") for name in names] == [name.upper() for name in mine]


def test_all_functions_of_the_headers_are_declared():
    """Each with as many arguments as it takes."""
    found = re.findall(r"KVT_API [\w ]+?[ *]+(kvt_\w+)\(([^)]*)\);", headers())
    counts = {each: 0 if args == "void" else args.count(",") + 1 for each, args in found}
    declared = {**cpu_abi.FUNCTIONS, **cpu_single.FUNCTIONS}
    assert counts == {each: len(args) for each, (_, args) in declared.items()}


@pytest.mark.parametrize(
    ("prefix", "enum"),
    [
        ("KVT_OP_", cpu_abi.OpKind),
        ("KVT_ROPE_", cpu_abi.RopePairs),
        ("KVT_", cpu_abi.Buffer),
        ("KVT_", cpu_abi.Activation),
    ],
)
def test_numbers_are_those_of_the_header(prefix, enum):
    """Every member has the value that the header gives it."""
    text = headers()
    for member in enum:
        assert re.search(rf"\b{prefix}{member.name} = {member.value}\b", text), member


def test_a_library_has_what_is_declared():
    """All functions are there, and all structures have the compiler's sizes."""
    cdll = library("portable").cdll
    cpu_abi.declare(cdll)
    cpu_single.declare(cdll)
    with pytest.raises(RuntimeError, match="kernel error -1"):
        cpu_abi.check(cdll, -1)
