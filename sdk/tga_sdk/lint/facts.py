"""Questions about the nodes of a file, answered from its text alone: is this a set, is this expensive, does this ask
the clock? The rules that follow from the answers stand in judging.py."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tga_sdk.lint import known
from tga_sdk.lint.scopes import FUNCTIONS, Function, Module, Scope, is_set_annotation

USED = (
    ast.JoinedStr,
    ast.FormattedValue,
    ast.Compare,
    ast.BoolOp,
    ast.BinOp,
    ast.UnaryOp,
    ast.Subscript,
    ast.Attribute,
)


class Facts:
    """What can be said of the nodes of a module."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def non_determinism(self, node: ast.AST, scope: Scope) -> tuple[str, str] | None:
        if isinstance(node, ast.Call):
            name = self.module.dotted(node.func, scope)
            if name is not None:
                return known.non_determinism(name, node)
            if isinstance(node.func, ast.Attribute) and node.func.attr in known.OF_PATHS:
                value = self.made_of(node.func.value, scope)
                if isinstance(value, ast.Call) and self.module.dotted(value.func, scope) in known.PATHS:
                    return "TGA104", f"Path.{node.func.attr}()"
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = self.module.dotted(node, scope)
            return None if name is None else known.non_determinism(name, None)
        return None

    def made_of(self, node: ast.expr, scope: Scope) -> ast.expr:
        """What was assigned to a name, when that is one thing; else the expression itself."""
        if isinstance(node, ast.Name):
            owner = scope.owner(node.id)
            made = owner.assigned.get(node.id, []) if owner is not None else []
            if len(made) == 1 and made[0] is not None:
                return made[0]
        return node

    def is_set(self, node: ast.expr, scope: Scope, depth: int = 8) -> bool:
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if depth == 0:
            return False
        if isinstance(node, ast.Call):
            if self.module.dotted(node.func, scope) in ("builtins.set", "builtins.frozenset"):
                return True
            of = node.func
            return (
                isinstance(of, ast.Attribute)
                and of.attr in known.SET_METHODS
                and self.is_set(of.value, scope, depth - 1)
            )
        if isinstance(node, ast.BinOp) and isinstance(node.op, known.SET_OPERATORS):
            return self.is_set(node.left, scope, depth - 1) or self.is_set(node.right, scope, depth - 1)
        if isinstance(node, ast.Name):
            owner = scope.owner(node.id)
            if owner is None:
                return False
            made = owner.assigned.get(node.id, [])
            if made:
                return all(one is not None and self.is_set(one, owner, depth - 1) for one in made)
            return any(one.arg == node.id and is_set_annotation(one.annotation) for one in owner.parameters)
        return False

    def is_order_free(self, node: ast.AST, scope: Scope) -> bool:
        parent = self.module.parents.get(id(node))
        return isinstance(parent, ast.Call) and self.module.dotted(parent.func, scope) in known.ORDER_DOES_NOT_MATTER

    def functions_in(self, node: ast.expr, scope: Scope) -> Iterator[Function]:
        """The functions of the file among what gather is given: each is a branch, executed again in each attempt."""
        for inner in ast.walk(node):
            function = (
                self.module.function(inner, scope) if isinstance(inner, ast.Lambda | ast.Name | ast.Call) else None
            )
            if function is not None and id(function) not in self.module.tasks:
                yield function

    def is_passed_on(self, names: set[str], scope: Scope) -> bool:
        """Whether one of these names is awaited, returned, or given to code that may await it."""
        for node, _ in self.module.nodes(scope.node) if scope.node is not None else ():
            if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load):
                parent = self.module.parents.get(id(node))
                if not isinstance(parent, (ast.Expr, *USED)):
                    return True
        return False

    def is_unstable(self, node: ast.AST, scope: Scope) -> bool:
        if self.is_attempt(node, scope):
            return True
        found = self.non_determinism(node, scope)
        if found is not None:
            return found[0] in ("TGA101", "TGA102", "TGA103", "TGA105")
        made = self.made_of(node, scope) if isinstance(node, ast.Name) else node
        return made is not node and any(self.non_determinism(inner, scope) for inner in ast.walk(made))

    def is_attempt(self, node: ast.AST, scope: Scope) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "attempt" and self.module.is_ctx(node.value, scope)

    def contains_operation(self, nodes: Iterable[ast.AST], scope: Scope) -> bool:
        for top in nodes:
            for node in ast.walk(top):
                inner = self.module.scope_of(node) if isinstance(node, ast.Call) else scope
                if self.module.operation(node, inner) or self.module.calls_performing(node, inner):
                    return True
        return False

    def gives_operations(self, call: ast.Call, scope: Scope) -> bool:
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if self.contains_operation(given, scope):
            return True
        for node in (inner for value in given for inner in ast.walk(value)):
            function = self.module.function(node, scope) if isinstance(node, ast.Name) else None
            if function is not None and id(function) not in self.module.tasks and self.module.performs(function):
                return True
            if self.module.is_ctx(node, scope) and not isinstance(self.module.parents.get(id(node)), ast.Attribute):
                return True
        return False

    def changed_names(self, node: ast.AST) -> Iterator[tuple[ast.Name, ast.AST]]:
        """The names whose objects a node changes: `name[...] = `, `name.x = `, `name.append()`, and `name = `."""
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in known.MUTATING:
            targets = [ast.Attribute(node.func.value, "", ast.Store())]
        for target in targets:
            root: ast.expr = target
            while isinstance(root, ast.Attribute | ast.Subscript | ast.Starred):
                root = root.value
            if isinstance(root, ast.Name):
                yield root, node

    def is_around(self, owner: Scope, body: Function) -> bool:
        if owner.node is None:
            return False
        outer = self.module.scopes[id(body)].outer
        while outer is not None:
            if outer is owner:
                return True
            outer = outer.outer
        return False

    def unserialisable(self, node: ast.expr, scope: Scope) -> str | None:
        made = self.made_of(node, scope)
        if isinstance(made, ast.Await):
            made = made.value
        if isinstance(made, ast.GeneratorExp):
            return "a generator"
        if isinstance(made, ast.Lambda):
            return "a function"
        if isinstance(made, ast.Call):
            return known.UNSERIALISABLE.get(self.module.dotted(made.func, scope) or "")
        return None

    def expensive(self, statement: ast.stmt, scope: Scope) -> tuple[int, str] | None:
        for node in outside_functions(statement):
            if isinstance(node, ast.While):
                return node.lineno, "a loop"
            if isinstance(node, ast.For | ast.AsyncFor | ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp):
                inside = [inner for inner in ast.walk(node) if inner is not node]
                has_loop = any(isinstance(inner, ast.For | ast.While) for inner in inside)
                if has_loop or any(isinstance(inner, ast.Call) and not self.is_cheap(inner, scope) for inner in inside):
                    return node.lineno, "a loop"
            if isinstance(node, ast.Call) and not self.is_cheap(node, scope):
                name = self.module.dotted(node.func, scope)
                called = self.module.function(node.func, scope)
                if name is not None or (called is not None and self.loops(called)):
                    return node.lineno, f"{ast.unparse(node.func)}()"
        return None

    def loops(self, function: Function) -> bool:
        loops = (ast.For, ast.While, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
        return any(isinstance(node, loops) for node, _ in self.module.nodes(function))

    def is_cheap(self, call: ast.Call, scope: Scope) -> bool:
        name = self.module.dotted(call.func, scope)
        if name is not None:
            last = name.rpartition(".")[2]
            return name.partition(".")[0] in {*known.CHEAP, "tga_sdk"} or last[:1].isupper()
        if self.module.function(call.func, scope) is not None:
            return False
        return not isinstance(call.func, ast.Call)  # methods of values, classes of the file, and what is unknown


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all inside it, but what stands in functions."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        yield one
        if not isinstance(one, FUNCTIONS):
            waiting.extend(reversed(list(ast.iter_child_nodes(one))))
