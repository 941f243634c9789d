"""Procedures as a mermaid flowchart: operations in their order, branches, loops, gathers; waits for people stand out.

Shown is what performs operations; computing between them is not. Functions of the file that perform operations are
drawn where they are called.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from tga_sdk.lint.facts import Facts, outside_functions
from tga_sdk.lint.known import PEOPLE
from tga_sdk.lint.scopes import Declared, Function, Module, Scope, argument

if TYPE_CHECKING:
    from collections.abc import Iterator

_LABEL_MAX: Final = 60
DEPTH_MAX: Final = 8
_SHAPES: Final = {
    "round": ("([", "])"),
    "box": ("[", "]"),
    "choice": ("{", "}"),
    "person": ("{{", "}}"),
    "wait": ("[/", "/]"),
}
_WAITS: Final = frozenset({"sleep", "signal"})
_STYLES: Final = ("classDef person fill:#fde68a,stroke:#b45309", "classDef wait fill:#e0e7ff,stroke:#4338ca")


class Ends(list[tuple[str, str | None]]):
    """Nodes from which the next one is reached, each with the label of that arrow."""


def drawn(module: Module) -> str:
    """All procedures and flows of a file."""
    pen = _Pen(module)
    for declared in module.declared:
        if declared.kind == "flow":
            pen.draw_flow(declared)
        elif declared.function is not None:
            pen.draw_procedure(declared, declared.function)
    return pen.text()


def label(text: str) -> str:
    """Text as mermaid takes it between quotes: one line, and nothing that it would read as its own."""
    shown = " ".join(text.split())
    shown = shown if len(shown) <= _LABEL_MAX else shown[: _LABEL_MAX - 1] + "…"
    shown = "".join(c if c.isprintable() else "?" for c in shown)
    shown = "".join(f"#{ord(c)};" if c in '"#;&<>`{}[]()|\\%~' else c for c in shown) or " "
    # Mermaid's lexer takes `direction LR` for a statement wherever it stands in a line, also between quotes.
    return re.sub(r"[dD](?=irection )", lambda found: f"#{ord(found[0])};", shown)


class Chart:
    """Nodes, arrows and frames of a flowchart, whatever language the program is written in."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._nodes = 0
        self._graphs = 0
        self._loops: list[tuple[str, Ends]] = []  # of each loop around: its head, and what has broken out of it
        self._returned: list[Ends] = []  # of each function around: what has returned from it
        self._inside: list[int] = []

    def text(self) -> str:
        return "\n".join(["flowchart TD", *(f"    {line}" for line in [*self.lines, *_STYLES])]) + "\n"

    def _node(self, text: str, shape: str, before: Ends) -> Ends:
        self._nodes += 1
        name = f"n{self._nodes}"
        opened, closed = _SHAPES[shape]
        styled = f":::{shape}" if shape in ("person", "wait") else ""
        self.lines.append(f'{name}{opened}"{label(text)}"{closed}{styled}')
        self._join(before, name)
        return Ends([(name, None)])

    def _join(self, before: Ends, name: str) -> None:
        for start, said in before:
            arrow = f'{start} -->|"{label(said)}"| {name}' if said else f"{start} --> {name}"
            if arrow not in self.lines:
                self.lines.append(arrow)

    @contextmanager
    def _graph(self, title: str) -> Iterator[None]:
        self._graphs += 1
        self.lines.append(f'subgraph g{self._graphs}["{label(title)}"]')
        yield
        self.lines.append("end")


class _Pen(Chart):
    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.facts = Facts(module)

    # What is declared.

    def draw_procedure(self, declared: Declared, function: Function) -> None:
        with self._graph(f"{declared.name} {declared.version}"):
            start = self._node(declared.kind, "round", Ends())
            if declared.kind == "task":
                done = self._node(f"step {declared.name}", "box", start)
            else:
                done = self._body(function, start)
            self._node("end", "round", done)

    def draw_flow(self, declared: Declared) -> None:
        with self._graph(f"{declared.name} {declared.version}"):
            ends = self._node("flow", "round", Ends())
            call = declared.node
            steps = argument(call, 1, "steps") if isinstance(call, ast.Call) else None
            scope = self.module.scope_of(call)
            for step in steps.elts if isinstance(steps, ast.List | ast.Tuple) else ():
                if isinstance(step, ast.Call):
                    named, run = argument(step, 0, "name"), argument(step, 1, "run")
                    ends = self._node(f"step {_said(named)}", "box", ends)
                    function = None if run is None else self.module.function(run, scope)
                    if function is not None and self.module.performs(function):
                        ends = self._body(function, ends)
            self._node("end", "round", ends)

    def _body(self, function: Function, before: Ends) -> Ends:
        """What a function performs, from where it is called to all places at which it returns."""
        if len(self._inside) >= DEPTH_MAX or id(function) in self._inside:
            return self._node(f"{getattr(function, 'name', 'lambda')} again", "box", before)
        self._inside.append(id(function))
        returned, loops = Ends(), self._loops
        self._loops = []
        self._returned.append(returned)
        scope = self.module.scopes[id(function)]
        if isinstance(function, ast.Lambda):
            ends = self._expression(function.body, scope, before)
        else:
            ends = self._block(function.body, scope, before)
        self._returned.pop()
        self._loops = loops
        self._inside.pop()
        return Ends([*ends, *returned])

    # Statements.

    def _block(self, statements: Sequence[ast.stmt], scope: Scope, before: Ends) -> Ends:
        ends = before
        for statement in statements:
            ends = self._statement(statement, scope, ends)
        return ends

    def _statement(self, node: ast.stmt, scope: Scope, before: Ends) -> Ends:
        if not before:
            return before  # nothing comes here
        match node:
            case ast.If() if self._matters([node], scope):
                return self._choice(node, scope, before)
            case ast.For() | ast.AsyncFor() | ast.While() if self._matters([node], scope):
                return self._loop(node, scope, before)
            case ast.Try() | ast.TryStar() if self._matters([node], scope):
                return self._try(node, scope, before)
            case ast.With() | ast.AsyncWith():
                ends = before
                for item in node.items:
                    ends = self._expression(item.context_expr, scope, ends)
                return self._block(node.body, scope, ends)
            case ast.Match() if self._matters([node], scope):
                return self._match(node, scope, before)
            case ast.Return() | ast.Raise():
                ends = self._expressions(node, scope, before)
                if isinstance(node, ast.Raise):
                    ends = self._node(f"raise {_said(node.exc)}", "round", ends)
                elif self._returned:
                    self._returned[-1].extend(ends)
                return Ends()
            case ast.Break() | ast.Continue() if self._loops:
                head, broken = self._loops[-1]
                if isinstance(node, ast.Break):
                    broken.extend(before)
                else:
                    self._join(before, head)
                return Ends()
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return before
            case _:
                return self._expressions(node, scope, before)

    def _matters(self, nodes: Sequence[ast.AST], scope: Scope) -> bool:
        """Whether operations are performed in it, or it decides whether others are."""
        return self.facts.contains_operation(nodes, scope) or any(
            isinstance(inner, ast.Return | ast.Raise | ast.Break | ast.Continue)
            for node in nodes
            for inner in outside_functions(node)
        )

    def _choice(self, node: ast.If, scope: Scope, before: Ends) -> Ends:
        head = self._node(_said(node.test), "choice", self._expression(node.test, scope, before))
        name = head[0][0]
        then = self._block(node.body, scope, Ends([(name, "yes")]))
        other = self._block(node.orelse, scope, Ends([(name, "no")]))
        return Ends([*then, *other])

    def _match(self, node: ast.Match, scope: Scope, before: Ends) -> Ends:
        head = self._node(_said(node.subject), "choice", self._expression(node.subject, scope, before))
        name = head[0][0]
        ends = Ends()
        has_default = False
        for case in node.cases:
            said = ast.unparse(case.pattern)
            has_default = has_default or said == "_"
            ends.extend(self._block(case.body, scope, Ends([(name, said)])))
        return ends if has_default else Ends([*ends, (name, "else")])

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, scope: Scope, before: Ends) -> Ends:
        if isinstance(node, ast.While):
            said, first = f"while {_said(node.test)}", self._expression(node.test, scope, before)
            is_endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        else:
            said = f"for each {_said(node.target)} of {_said(node.iter)}"
            first, is_endless = self._expression(node.iter, scope, before), False
        name = self._node(said, "choice", first)[0][0]
        broken = Ends()
        self._loops.append((name, broken))
        self._join(self._block(node.body, scope, Ends([(name, "next")])), name)
        self._loops.pop()
        done = Ends() if is_endless else self._block(node.orelse, scope, Ends([(name, "done")]))
        return Ends([*done, *broken])

    def _try(self, node: ast.Try | ast.TryStar, scope: Scope, before: Ends) -> Ends:
        head = self._node("try", "choice", before)[0][0] if node.handlers else None
        ends = self._block(node.body, scope, Ends([(head, None)]) if head else before)
        ends = self._block(node.orelse, scope, ends)
        for handler in node.handlers:
            said = f"except {_said(handler.type)}" if handler.type is not None else "except"
            ends = Ends([*ends, *self._block(handler.body, scope, Ends([(head or "", said)]))])
        return self._block(node.finalbody, scope, ends)

    # Expressions.

    def _expressions(self, node: ast.stmt, scope: Scope, before: Ends) -> Ends:
        ends = before
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                ends = self._expression(child, scope, ends)
        return ends

    def _expression(self, node: ast.AST, scope: Scope, before: Ends) -> Ends:
        """Operations in the order in which Python evaluates them: arguments before the call."""
        if isinstance(node, ast.Lambda):
            return before
        operation = self.module.operation(node, scope)
        if isinstance(node, ast.Call) and operation == "gather":
            return self._gather(node, scope, before)
        if isinstance(node, ast.IfExp) and self._matters([node.body, node.orelse], scope):
            name = self._node(_said(node.test), "choice", self._expression(node.test, scope, before))[0][0]
            then = self._expression(node.body, scope, Ends([(name, "yes")]))
            return Ends([*then, *self._expression(node.orelse, scope, Ends([(name, "no")]))])
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) and self._matters(
            [node], scope
        ):
            return self._comprehension(node, scope, before)
        ends = before
        for child in ast.iter_child_nodes(node):
            ends = self._expression(child, scope, ends)
        if isinstance(node, ast.Call) and operation is not None:
            return self._operation(node, operation, scope, ends)
        if isinstance(node, ast.Call):
            called = self.module.function(node.func, scope)
            if called is not None and id(called) in self.module.tasks:
                return self._node(f"task {getattr(called, 'name', '')}", "box", ends)
            if called is not None and self.module.performs(called):
                return self._body(called, ends)
        return ends

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, scope: Scope, before: Ends
    ) -> Ends:
        first = node.generators[0]
        said = f"for each {_said(first.target)} of {_said(first.iter)}"
        name = self._node(said, "choice", self._expression(first.iter, scope, before))[0][0]
        ends = Ends([(name, "next")])
        for part in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            ends = self._expression(part, scope, ends)
        self._join(ends, name)
        return Ends([(name, "done")])

    def _operation(self, call: ast.Call, operation: str, scope: Scope, before: Ends) -> Ends:
        shape = "person" if operation in PEOPLE else "wait" if operation in _WAITS else "box"
        body = self.module.body_of(call, operation, scope)
        said = _title(call, operation)
        if body is not None and self.module.performs(body) and id(body) not in self._inside:
            with self._graph(said):
                return self._body(body, before)
        return self._node(said, shape, before)

    def _gather(self, call: ast.Call, scope: Scope, before: Ends) -> Ends:
        fork = self._node("gather", "box", before)
        ends = Ends()
        for value in call.args:
            is_many = isinstance(value, ast.Starred)
            inner: ast.expr = value.value if isinstance(value, ast.Starred) else value
            if is_many and isinstance(inner, ast.ListComp | ast.GeneratorExp):
                said = f"for each {_said(inner.generators[0].target)} of {_said(inner.generators[0].iter)}"
                branch, inner = Ends([(fork[0][0], said)]), inner.elt
            else:
                branch = Ends([(fork[0][0], _said(inner) if is_many else None)])
            function = self.module.function(inner, scope)
            drawn_branch = (
                self._body(function, branch) if function is not None else self._expression(inner, scope, branch)
            )
            if drawn_branch == branch:
                drawn_branch = self._node(_said(inner), "box", branch)
            ends.extend(drawn_branch)
        return self._node("all done", "box", ends or fork)


def _title(call: ast.Call, operation: str) -> str:
    said = [_said(value) for value in call.args[:2]]
    match operation:
        case "tool":
            return f"tool {'.'.join(said)}"
        case "perform":
            return " ".join(said[:2])
        case "step" | "approve" | "input" | "select" | "review" | "sleep" | "signal" | "call" | "patched":
            return f"{operation} {said[0] if said else ''}".strip()
        case _:
            return operation


def _said(node: ast.AST | None) -> str:
    """An expression for people: a text without its quotes, all else as it is written."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_said(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"<{_said(node.value)}>"
    return ast.unparse(node)
