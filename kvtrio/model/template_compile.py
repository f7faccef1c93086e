"""Compiles chat templates after making them pay for their work.

The syntax tree is rewritten: each loop turn and macro call pays for the nodes below it, and
concatenations, literals and comparisons pay for their values, through filters of ``Sandbox`` that
no template can name. No result changes.
"""

from collections.abc import Iterator
from types import CodeType

from attrs import frozen
from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

from kvtrio.model.errors import ModelFileError
from kvtrio.model.meter import CHARS_PER_UNIT, Meter
from kvtrio.model.template_sandbox import BUILT, COMPARED, JOIN, TICK, Sandbox

MAX_SOURCE_CHARS = 262_144
COMPILE_BUDGET = 1_000_000
NODES_PER_UNIT = 16
_FORBIDDEN = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)


@frozen(eq=False)
class Compiled:
    """A template ready to run, as often and in as many threads as wanted."""

    code: CodeType
    reasons: frozenset[str]
    """Texts that stand in the template as arguments of ``raise_exception``: safe to show."""
    names: frozenset[str]
    """Attributes and keys that the template names."""


class _Metering(NodeTransformer):
    """Puts the filters of ours around whatever makes work."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        cost = _cost(node)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_apply(TICK, nodes.Const(cost))))
        if node.test is not None:
            node.test = nodes.And(_apply(TICK, nodes.Const(cost)), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        cost = _cost(node)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_apply(TICK, nodes.Const(cost))))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _apply(JOIN, nodes.List(node.nodes))

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _apply(BUILT, node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _apply(BUILT, node) if node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        holders: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        for holder in holders:
            if not isinstance(holder.expr, nodes.Const):
                holder.expr = _apply(COMPARED, holder.expr)
        return node


def compile_template(source: str) -> Compiled:
    """Raises ModelFileError, with the line where there is one, if ``source`` is no template."""
    if len(source) > MAX_SOURCE_CHARS:
        raise ModelFileError(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
    environment = Sandbox(Meter(COMPILE_BUDGET))
    try:
        tree = environment.parse(source)
        if next(tree.find_all(_FORBIDDEN), None) is not None:
            raise ModelFileError("the chat template uses blocks or other templates")
        reasons, names = frozenset(_reasons(tree)), frozenset(_names(tree))
        tree = _Metering().visit(tree)
        tree.set_environment(environment)
        return Compiled(environment.compile(tree), reasons, names)
    except ModelFileError:
        raise
    except TemplateSyntaxError as error:
        what = "".join(c if c.isprintable() else "?" for c in error.message or "")[:200]
        raise ModelFileError(f"chat template, line {error.lineno}: {what}") from None
    except Exception:  # jinja2 and Python have many ways to refuse a tree that is too deep or odd
        raise ModelFileError("the chat template does not compile") from None


def _apply(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno or 1)


def _cost(node: nodes.Node) -> int:
    """Units for one pass over all below ``node``, taken or not."""
    size = 0
    for child in node.find_all(nodes.Node):
        text = getattr(child, "value", getattr(child, "data", ""))
        size += 1 + (len(text) // CHARS_PER_UNIT if isinstance(text, str) else 0)
    return 1 + size // NODES_PER_UNIT


def _reasons(tree: nodes.Template) -> Iterator[str]:
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "raise_exception":
            for argument in call.args:
                if isinstance(argument, nodes.Const) and isinstance(argument.value, str):
                    yield argument.value


def _names(tree: nodes.Template) -> Iterator[str]:
    for node in tree.find_all(nodes.Getattr):
        yield node.attr
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value
