"""Which name means what in which function, which functions are procedures, and which of their names is `ctx`.

A procedure's body, and every function of the file that it calls, is executed again in each attempt: `replayed`. What a
step, a task or a flow's step executes is recorded and skipped in a replay: `recorded`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tga_sdk.lint.known import BODIES, OPERATIONS

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SDK: Final = "tga_sdk"
_BUILTINS: Final = frozenset(dir(builtins))
_SET_TYPES: Final = frozenset({"set", "frozenset", "Set", "AbstractSet", "FrozenSet", "MutableSet"})


@dataclass(eq=False)
class Scope:
    """The names of a function, or of the module (`node` is None)."""

    node: Function | None
    outer: Scope | None
    parameters: list[ast.arg] = field(default_factory=list)
    assigned: dict[str, list[ast.expr | None]] = field(default_factory=dict)  # what is assigned to a name, where known
    imports: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)  # global and nonlocal names
    ctx: set[str] = field(default_factory=set)

    def owner(self, name: str) -> Scope | None:
        """The scope that binds this name as seen from here; None for builtins and what is unknown."""
        scope: Scope | None = self
        while scope is not None:
            if name not in scope.outside and scope.binds(name):
                return scope
            scope = scope.outer
        return None

    def binds(self, name: str) -> bool:
        return (
            name in self.assigned
            or name in self.imports
            or name in self.functions
            or any(parameter.arg == name for parameter in self.parameters)
        )

    @property
    def is_async(self) -> bool:
        return isinstance(self.node, ast.AsyncFunctionDef)


class Declared(NamedTuple):
    """A procedure, task or flow, as the file declares it. `line` and `column` are those of its declaration."""

    kind: str
    name: str
    version: str
    node: ast.AST
    function: Function | None


@dataclass(eq=False)
class Module:
    """All that is known of a file before its bodies are looked at."""

    tree: ast.Module
    top: Scope = field(default_factory=lambda: Scope(None, None))
    scopes: dict[int, Scope] = field(default_factory=dict)  # by the function's node
    parents: dict[int, ast.AST] = field(default_factory=dict)
    methods: dict[tuple[str, str], Function] = field(default_factory=dict)
    class_of: dict[int, str] = field(default_factory=dict)
    declared: list[Declared] = field(default_factory=list)
    replayed: list[Function] = field(default_factory=list)
    recorded: list[Function] = field(default_factory=list)
    tasks: set[int] = field(default_factory=set)
    _performs: dict[int, bool] = field(default_factory=dict)

    # Names.

    def dotted(self, node: ast.AST, scope: Scope) -> str | None:
        """`time.time` for `clock` after `from time import time as clock`; None for what the function made itself."""
        if isinstance(node, ast.Name):
            owner = scope.owner(node.id)
            if owner is None:
                return f"builtins.{node.id}" if node.id in _BUILTINS else None
            return owner.imports.get(node.id) if node.id not in owner.assigned else None
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value, scope)
            return None if base is None else f"{base}.{node.attr}"
        return None

    def function(self, node: ast.AST, scope: Scope) -> Function | None:
        """The function of this file that an expression names: `helper`, `self.helper`, a lambda, `partial(helper)`."""
        if isinstance(node, ast.Lambda):
            return node
        if isinstance(node, ast.Name):
            owner = scope.owner(node.id)
            if owner is None:
                return None
            if node.id in owner.functions:
                return owner.functions[node.id]
            made = owner.assigned.get(node.id, [])
            return made[0] if len(made) == 1 and isinstance(made[0], ast.Lambda) else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            inside: Scope | None = scope
            while inside is not None and inside.node is not None:
                holder = self.class_of.get(id(inside.node))
                if holder is not None:
                    return self.methods.get((holder, node.attr))
                inside = inside.outer
        if isinstance(node, ast.Call) and self.dotted(node.func, scope) == "functools.partial" and node.args:
            return self.function(node.args[0], scope)
        return None

    def is_ctx(self, node: ast.AST, scope: Scope) -> bool:
        if not isinstance(node, ast.Name):
            return False
        owner = scope.owner(node.id)
        return owner is not None and node.id in owner.ctx

    def operation(self, node: ast.AST, scope: Scope) -> str | None:
        """The name of the operation if this is a call of one of ctx's."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OPERATIONS:
            return node.func.attr if self.is_ctx(node.func.value, scope) else None
        return None

    def body_of(self, call: ast.Call, operation: str, scope: Scope) -> Function | None:
        """The function that a step executes, where the file has it."""
        place = BODIES.get(operation)
        if place is None:
            return None
        for keyword in call.keywords:
            if keyword.arg == "fn":
                return self.function(keyword.value, scope)
        return self.function(call.args[place], scope) if len(call.args) > place else None

    def performs(self, function: Function) -> bool:
        """Whether a function performs operations of ctx, itself or through others of the file."""
        known = self._performs.get(id(function))
        if known is None:
            self._performs[id(function)] = False  # of a recursion: unless something else in it does
            known = self._performs[id(function)] = any(
                self.operation(node, scope) is not None or self.calls_performing(node, scope)
                for node, scope in self.nodes(function)
            )
        return known

    def calls_performing(self, node: ast.AST, scope: Scope) -> bool:
        if not isinstance(node, ast.Call):
            return False
        called = self.function(node.func, scope)
        return called is not None and id(called) not in self.tasks and self.performs(called)

    def nodes(self, function: ast.AST, *, nested: bool = True) -> Iterator[tuple[ast.AST, Scope]]:
        """Every node of a function with its scope; with `nested` also those of lambdas and functions inside it."""
        start = self.scopes[id(function)] if id(function) in self.scopes else self.scope_of(function)
        waiting: list[tuple[ast.AST, Scope]] = [(child, start) for child in reversed(body_nodes(function))]
        while waiting:
            node, scope = waiting.pop()
            yield node, scope
            if isinstance(node, FUNCTIONS):
                if nested:
                    inner = self.scopes[id(node)]
                    waiting.extend((child, inner) for child in reversed(body_nodes(node)))
                continue
            waiting.extend((child, scope) for child in reversed(list(ast.iter_child_nodes(node))))

    def scope_of(self, node: ast.AST) -> Scope:
        """The scope that a node stands in."""
        while True:
            parent = self.parents.get(id(node))
            if parent is None:
                return self.top
            if id(parent) in self.scopes:
                return self.scopes[id(parent)]
            node = parent


def body_nodes(function: ast.AST) -> list[ast.AST]:
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return list(function.body)
    return [function.body] if isinstance(function, ast.Lambda) else [function]


def is_set_annotation(annotation: ast.expr | None) -> bool:
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return (isinstance(base, ast.Name) and base.id in _SET_TYPES) or (
        isinstance(base, ast.Attribute) and base.attr in _SET_TYPES
    )


def read_module(tree: ast.Module) -> Module:
    """Everything of a file that its bodies are judged by."""
    module = Module(tree)
    _bind(module, tree, module.top, None)
    _find_declared(module)
    _spread_ctx(module)
    return module


def _bind(module: Module, node: ast.AST, scope: Scope, holder: str | None) -> None:
    """Fill scopes with what their functions bind."""
    for child in ast.iter_child_nodes(node):
        module.parents[id(child)] = node
        if isinstance(child, FUNCTIONS):
            arguments = child.args
            inner = Scope(child, scope)
            inner.parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            inner.parameters += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
            module.scopes[id(child)] = inner
            if not isinstance(child, ast.Lambda):
                if holder is None:
                    scope.functions.setdefault(child.name, child)
                else:
                    module.methods[holder, child.name] = child
                    module.class_of[id(child)] = holder
            _bind(module, child, inner, None)
            continue
        if isinstance(child, ast.ClassDef):
            scope.assigned.setdefault(child.name, []).append(None)
            _bind(module, child, Scope(None, scope) if scope.node is None else scope, child.name)
            continue
        _bind_node(child, scope)
        _bind(module, child, scope, holder)


def _bind_node(node: ast.AST, scope: Scope) -> None:
    match node:
        case ast.Import(names=names):
            for alias in names:
                scope.imports[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        case ast.ImportFrom(module=source, names=names, level=0) if source:
            for alias in names:
                scope.imports[alias.asname or alias.name] = f"{source}.{alias.name}"
        case ast.Global(names=named) | ast.Nonlocal(names=named):
            scope.outside.update(named)
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            scope.assigned.setdefault(name, []).append(value)
        case (
            ast.AnnAssign(target=ast.Name(id=name), value=value) | ast.NamedExpr(target=ast.Name(id=name), value=value)
        ):
            scope.assigned.setdefault(name, []).append(value)
        case ast.withitem(context_expr=value, optional_vars=ast.Name(id=name)):
            scope.assigned.setdefault(name, []).append(value)
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            scope.assigned.setdefault(name, [])
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            scope.assigned.setdefault(name, []).append(None)


# What is declared.


def _find_declared(module: Module) -> None:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _find_decorated(module, node)
        elif isinstance(node, ast.Call):
            _find_made(module, node)
    for function in module.replayed:
        _name_ctx(module, function, by_position=True)
    for function in module.recorded:
        _name_ctx(module, function, by_position=id(function) not in module.tasks)
    for scope in module.scopes.values():
        for parameter in scope.parameters:
            if _is_context(module, parameter.annotation, scope.outer or module.top):
                scope.ctx.add(parameter.arg)


def _find_decorated(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    scope = module.scope_of(node)
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        kind = _declaring(module, call.func if call else decorator, scope)
        if kind in ("procedure", "task"):
            _declare(module, kind, node, call, node)


def _find_made(module: Module, node: ast.Call) -> None:
    """`procedure(fn)`, `procedure(name=...)(fn)`, `task(fn)`, `Step("name", fn)`, `Flow("name", ...)`."""
    scope = module.scope_of(node)
    inner = node.func if isinstance(node.func, ast.Call) else None
    kind = _declaring(module, inner.func if inner else node.func, scope)
    if kind in ("procedure", "task") and node.args:
        function = module.function(node.args[0], scope)
        if function is not None and not isinstance(function, ast.Lambda):
            _declare(module, kind, function, inner or node, node)
    elif kind == "Step" and inner is None:
        given = argument(node, 1, "run")
        function = None if given is None else module.function(given, scope)
        if function is not None:
            module.recorded.append(function)
    elif kind == "Flow" and inner is None:
        name = argument(node, 0, "name")
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            module.declared.append(Declared("flow", name.value, _text(node, "version", "1"), node, None))


def argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[place] if len(call.args) > place else None


def _declaring(module: Module, node: ast.AST, scope: Scope) -> str | None:
    name = module.dotted(node, scope) or ""
    return name.rpartition(".")[2] if name.partition(".")[0] == _SDK else None


def _declare(
    module: Module, kind: str, function: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call | None, at: ast.AST
) -> None:
    name = _text(call, "name", function.name.replace("_", "-").strip("-"))
    module.declared.append(Declared(kind, name, _text(call, "version", "1"), at, function))
    if kind == "procedure":
        module.replayed.append(function)
    else:
        module.recorded.append(function)
        module.tasks.add(id(function))


def _text(call: ast.Call | None, name: str, default: str) -> str:
    for keyword in call.keywords if call else ():
        if keyword.arg == name and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
            return keyword.value.value
    return default


# Which names are ctx.


def _name_ctx(module: Module, function: Function, *, by_position: bool) -> None:
    scope = module.scopes[id(function)]
    own = [parameter for parameter in scope.parameters if parameter.arg not in ("self", "cls")]
    if own and by_position:
        scope.ctx.add(own[0].arg)


def _is_context(module: Module, annotation: ast.expr | None, scope: Scope) -> bool:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value.partition("[")[0].rpartition(".")[2] in ("Context", "SyncContext")
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    name = None if base is None else module.dotted(base, scope)
    return name is not None and name.partition(".")[0] == _SDK and name.endswith("Context")


def _spread_ctx(module: Module) -> None:
    """A helper that is given ctx has it under the parameter's name; until nothing new is found."""
    calls = [
        (node, scope)
        for function in (one for one in ast.walk(module.tree) if isinstance(one, FUNCTIONS))
        for node, scope in module.nodes(function, nested=False)
        if isinstance(node, ast.Call)
    ]
    found = True
    while found:
        found = False
        for call, scope in calls:
            called = module.function(call.func, scope)
            if called is None and module.operation(call, scope) in ("step", "perform"):
                called = module.body_of(call, module.operation(call, scope) or "", scope)
            if called is None:
                continue
            inner = module.scopes[id(called)]
            own = [parameter.arg for parameter in inner.parameters if parameter.arg not in ("self", "cls")]
            skipped = BODIES.get(module.operation(call, scope) or "", -1) + 1
            given = dict(zip(own, call.args[skipped:], strict=False))
            given.update({keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in own})
            for name, value in given.items():
                if name not in inner.ctx and module.is_ctx(value, scope):
                    inner.ctx.add(name)
                    found = True
