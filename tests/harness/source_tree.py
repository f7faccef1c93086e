"""The source tree as the guard tests see it: packages, their folders, their imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "kvtrio": "kvtrio",
    "kvtrio.schedulers": "schedulers",
    "kvtrio.backends": "backends",
    "kvtrio.kernels": "kernels",
}


def modules() -> Iterator[tuple[str, Path]]:
    """Yield (dotted name, file) for every module of the package."""
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not (path.parent / "__init__.py").exists():
                continue  # the script that builds the kernels is in no package
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            names = parts[:-1] if parts[-1] == "__init__" else parts
            yield ".".join((package, *names)), path


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """Yield every module that ``path`` imports, wherever in the file it does; a ``from x import y``
    yields ``x.y`` too, since y may be a module."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def mentioned(path: Path) -> set[str]:
    """Return every dotted name in ``path``, imported or written out (``trio.lowlevel.x``)."""
    dotted = {
        ast.unparse(node) for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)
    }
    return dotted | set(imported(path))


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield (name, syntax) for every function, nested ones and methods too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
