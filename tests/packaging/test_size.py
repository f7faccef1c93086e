"""Size is reviewed: limits that a change has to argue with."""

import ast
import io
import tokenize
from pathlib import Path

from harness.source_tree import ROOT, functions, modules, parsed
from kvtrio.kernels.cpu_digest import source_files

MAX_FUNCTION_LINES = 60
MAX_MEAN_FUNCTION_LINES = 13.0
MAX_MODULE_LINES = 300
SYNCHRONOUS = (
    "kvtrio.core",
    "kvtrio.schedulers",
    "kvtrio.model",
    "kvtrio.store",
    "kvtrio.backends",
    "kvtrio.kernels",
)


def test_functions_fit_on_a_screen() -> None:
    """No function is longer than sixty lines."""
    long = [
        f"{module}.{name}: {lines}"
        for module, path in modules()
        for name, node in functions(path)
        if (lines := num_lines(node)) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_modules_are_small() -> None:
    """No module grows past what a reader keeps in mind."""
    long = [
        f"{module}: {lines}"
        for module, path in modules()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_MODULE_LINES
    ]
    assert long == []


def test_cpp_files_are_small() -> None:
    """The kernels' sources keep to the same limit."""
    sources = source_files(ROOT / "kernels/cpu")
    sizes = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: size for name, size in sizes.items() if size > MAX_MODULE_LINES} == {}


def test_functions_are_short_on_average() -> None:
    """Thirteen lines a function is what readable servers have."""
    sizes = [num_lines(node) for _, path in modules() for _, node in functions(path)]
    assert sum(sizes) / len(sizes) <= MAX_MEAN_FUNCTION_LINES


def test_deciding_layers_are_synchronous() -> None:
    """What cannot block is not async: no coroutine in core, schedulers, model or backends."""
    found = [
        f"{module}.{name}"
        for module, path in modules()
        if f"{module}.".startswith(tuple(f"{layer}." for layer in SYNCHRONOUS))
        for name, node in functions(path)
        if isinstance(node, ast.AsyncFunctionDef)
    ]
    assert found == []


def test_core_explains_itself() -> None:
    """At least a tenth of the core's lines are prose, and asserts guard its hand-offs."""
    paths = [path for module, path in modules() if module.startswith("kvtrio.core")]
    total = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    assert sum(num_prose_lines(path) for path in paths) >= total / 10
    asserts = sum(isinstance(node, ast.Assert) for p in paths for node in ast.walk(parsed(p)))
    assert asserts >= total / 100


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_prose_lines(path: Path) -> int:
    """Count comment lines and lines of free-standing strings."""
    text = path.read_text(encoding="utf-8")
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    strings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return len(comments | strings)
