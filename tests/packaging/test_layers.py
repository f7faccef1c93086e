"""Who may import whom: the table of the architecture, checked on the syntax trees."""

import ast
import sys

import pytest
from attrs import frozen

from harness.source_tree import ROOT, imported, mentioned, modules, parsed

CLOCKS_AND_IO = frozenset(
    {
        "asyncio",
        "multiprocessing",
        "os",
        "random",
        "secrets",
        "select",
        "signal",
        "socket",
        "subprocess",
        "threading",
        "time",
        "uuid",
    }
)


@frozen
class Rule:
    """What one layer may import besides itself and the standard library."""

    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    banned_stdlib: frozenset[str] = frozenset()


FILE_TOOLS = ("attrs", "blake3", "gguf", "jinja2", "msgspec", "numpy", "tokenizers", "tqdm")
RULES = {
    "kvtrio.core": Rule((), ("attrs", "msgspec"), CLOCKS_AND_IO),
    "kvtrio.schedulers": Rule(("kvtrio.core",), ("attrs",), CLOCKS_AND_IO),
    "kvtrio.model": Rule(("kvtrio.core.types", "kvtrio.core.events"), FILE_TOOLS),
    "kvtrio.kernels": Rule((), ("torch", "triton", "numpy")),
    "kvtrio.backends": Rule(
        ("kvtrio.core", "kvtrio.model", "kvtrio.kernels"),
        ("attrs", "gguf", "numpy", "torch", "tqdm"),
    ),
    "kvtrio.engine": Rule(("kvtrio.core",), ("attrs", "outcome", "trio"), frozenset({"asyncio"})),
    "kvtrio.obs": Rule(
        ("kvtrio.core", "kvtrio.engine.records"),
        ("attrs", "msgspec", "prometheus_client", "structlog", "trio"),
        frozenset({"asyncio"}),
    ),
    "kvtrio.serve": Rule(
        ("kvtrio.core", "kvtrio.engine", "kvtrio.model", "kvtrio.obs", "kvtrio.__version__"),
        ("attrs", "hypercorn", "msgspec", "quart", "quart_trio", "trio", "werkzeug"),
        frozenset({"asyncio"}),
    ),
    "kvtrio.replay": Rule(
        ("kvtrio.core", "kvtrio.engine", "kvtrio.model", "kvtrio.obs", "kvtrio.__version__"),
        ("attrs", "duckdb", "msgspec", "numpy", "tqdm", "trio"),
        frozenset({"asyncio"}),
    ),
    "kvtrio.store": Rule(
        ("kvtrio.core",), ("attrs", "blake3", "msgspec"), CLOCKS_AND_IO - {"os", "threading"}
    ),
    "kvtrio.bench": Rule((), ("attrs", "trio"), frozenset({"asyncio"})),
    "kvtrio.plugins": Rule(),
    "kvtrio.config": Rule(("kvtrio.config_model",), ("attrs", "cyclopts")),
    "kvtrio.config_model": Rule((), ("attrs", "cyclopts")),
    "kvtrio.__main__": Rule(("kvtrio.cli",)),
}
ANYTHING = ("kvtrio.cli",)


def is_under(name: str, parents: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{parent}.") for parent in parents)


def layer_of(module: str) -> str | None:
    return max((layer for layer in RULES if is_under(module, (layer,))), key=len, default=None)


def is_allowed(layer: str, name: str) -> bool:
    rule, top = RULES[layer], name.partition(".")[0]
    if top == "kvtrio":
        return is_under(name, (layer, *rule.ours))
    if top in sys.stdlib_module_names:
        return top not in rule.banned_stdlib
    return top in rule.others


def test_each_layer_imports_only_what_the_table_allows() -> None:
    """No module of a layer reaches outside its row, not even inside a function."""
    wrong = [
        f"{module} imports {name}"
        for module, path in modules()
        if (layer := layer_of(module)) is not None
        for name in imported(path)
        if not is_allowed(layer, name)
    ]
    assert wrong == []


def test_every_module_belongs_to_a_layer() -> None:
    """A new package has to be given a row of its own."""
    homeless = [
        module
        for module, _ in modules()
        if layer_of(module) is None and module != "kvtrio" and not is_under(module, ANYTHING)
    ]
    assert homeless == []


def test_the_top_package_imports_nothing() -> None:
    """``import kvtrio`` costs nothing."""
    assert list(imported(ROOT / "kvtrio/__init__.py")) == []


def test_the_decoder_knows_no_tensor_library() -> None:
    """The forward pass is written over opaque values, so that any kernel set can run it."""
    path = ROOT / "backends/decoder.py"
    assert not [name for name in imported(path) if is_under(name, ("torch", "numpy"))]


@pytest.mark.parametrize(
    ("name", "homes"),
    [
        ("trio.run", ("kvtrio.cli",)),
        ("trio.lowlevel", ("kvtrio.engine.executor", "kvtrio.engine.model_thread")),
    ],
)
def test_one_home_only(name: str, homes: tuple[str, ...]) -> None:
    """The event loop is started in one layer and its low-level door is used by two modules."""
    users = {
        module
        for module, path in modules()
        if any(is_under(used, (name,)) for used in mentioned(path))
    }
    assert [user for user in users if not is_under(user, homes)] == []


def test_only_the_command_line_splits_exception_groups() -> None:
    """``except*`` maps failures to exit codes, in one place."""
    users = {
        module
        for module, path in modules()
        if any(isinstance(node, ast.TryStar) for node in ast.walk(parsed(path)))
    }
    assert [user for user in users if not is_under(user, ANYTHING)] == []
