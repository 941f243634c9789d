"""What the names of a Lua program mean: locals, globals, functions and where each is called, in the text's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tree_sitter import Node

from app.lua.lint.known import GLOBALS, MAKERS, MEMBERS, RECORDING
from app.lua.lint.source import text_of

Path = tuple[str, ...]
_FUNCTIONS: Final = ("function_definition", "function_declaration")


@dataclass(eq=False)
class Function:
    """A function, or the whole file. `is_recorded`: its result is recorded, so that a replay skips it."""

    node: Node
    around: Function | None
    binding: Binding | None = None
    is_recorded: bool = False

    def is_within_recorded(self) -> bool:
        function: Function | None = self
        while function is not None:
            if function.is_recorded:
                return True
            function = function.around
        return False


@dataclass(eq=False)
class Binding:
    """A variable. `values`: what it is given, with the place in the text."""

    name: str
    is_local: bool
    values: list[tuple[Node, int]] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    is_parameter: bool = False


@dataclass(frozen=True, eq=False)
class Reference:
    binding: Binding
    node: Node
    function: Function


@dataclass(frozen=True, eq=False)
class Call:
    node: Node
    path: Path | None  # as it is written: math.random is ("math", "random")
    binding: Binding | None  # of the path's first name
    function: Function

    @property
    def arguments(self) -> list[Node]:
        given = self.node.child_by_field_name("arguments")
        return [] if given is None else [one for one in given.named_children if one.type != "comment"]


@dataclass(eq=False)
class Program:
    """All that a file says."""

    root: Node
    main: Function
    functions: list[Function] = field(default_factory=list)
    globals: dict[str, Binding] = field(default_factory=dict)
    reads: list[Reference] = field(default_factory=list)
    writes: list[tuple[Node, Node | None, Function]] = field(default_factory=list)  # what is given what
    calls: list[Call] = field(default_factory=list)
    bindings: dict[int, Binding] = field(default_factory=dict)  # by the id of the identifier's node
    function_of: dict[int, Function] = field(default_factory=dict)  # by the id of the function's node

    def meaning(self, call: Call) -> Path | None:
        """The path that is called, with a local name for a library's function replaced by what it stands for; None
        where it is nothing of the environment."""
        return self._resolved(call.path, call.binding)

    def _resolved(self, path: Path | None, binding: Binding | None) -> Path | None:
        for _ in range(8):
            if path is None or binding is None:
                return None
            if not binding.values and not binding.is_parameter:
                return path if not binding.is_local else None
            if len(binding.values) != 1:
                return None
            value = binding.values[0][0]
            stands_for = path_of(value)
            if stands_for is None:
                return None
            path, binding = (*stands_for, *path[1:]), self.bindings.get(_first(value).id)
        return None

    def kind(self, binding: Binding | None) -> str | None:
        """`agent`, `model` or `procedure` of a variable that holds one."""
        for value, _ in () if binding is None else binding.values:
            root = value
            while root.type == "function_call":
                root = _named(root, "name")
            maker = MAKERS.get(path_of(root) or ())
            if maker is not None and value.type == "function_call":
                return maker
        return None

    def operation(self, call: Call) -> str | None:
        """What the call performs and records, in words for people; None: nothing."""
        path = self.meaning(call)
        if path is not None:
            match path:
                case ("step" | "checkpoint" | "parallel" | "sleep" | "signal" as alone,):
                    return alone
                case ("Step" | "Human", member) if member in MEMBERS[path[0]]:
                    return f"{path[0]}.{member}"
                case ("tool", server, tool):
                    return f"tool {server}.{tool}"
                case ("http_client", _) | ("tactus", "call" | "emit"):
                    return ".".join(path)
        if call.path is None:
            return None
        binding = call.binding
        if binding is not None and not binding.is_local and not binding.values and binding.name not in GLOBALS:
            # Nothing defines it: it is told of as such, and else taken for the agent that its capital letter says.
            return f"agent {binding.name}" if len(call.path) == 1 and binding.name[:1].isupper() else None
        match self.kind(binding), call.path:
            case "agent", (name,):
                return f"agent {name}"
            case "model", (name, "predict"):
                return f"model {name}"
            case "procedure", (name,):
                return f"call {name}"
        return None


def path_of(node: Node) -> Path | None:
    """The names of `a.b.c`, `a["b"]` and `a:b`; None of anything else."""
    match node.type:
        case "identifier":
            return (text_of(node),)
        case "dot_index_expression" | "method_index_expression" | "bracket_index_expression":
            owner = path_of(_named(node, "table"))
            member = node.child_by_field_name("field") or node.child_by_field_name("method")
            if owner is None or member is None:
                return None
            if node.type != "bracket_index_expression":
                return (*owner, text_of(member))
            content = member.child_by_field_name("content") if member.type == "string" else None
            return None if content is None else (*owner, text_of(content))
        case "parenthesized_expression":
            return path_of(node.named_children[0]) if node.named_children else None
    return None


def literal(node: Node) -> str | None:
    """The text of a string that stands there as such."""
    content = node.child_by_field_name("content") if node.type == "string" else None
    return None if content is None else text_of(content)


def read_program(root: Node) -> Program:
    program = Program(root, Function(root, None))
    program.functions.append(program.main)
    _Reader(program).block(root, program.main, _Scope(None))
    _find_recorded(program)
    return program


class _Scope(dict[str, Binding]):
    def __init__(self, around: _Scope | None) -> None:
        super().__init__()
        self.around = around

    def find(self, name: str) -> Binding | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope:
                return scope[name]
            scope = scope.around
        return None


class _Reader:
    def __init__(self, program: Program) -> None:
        self._program = program

    def block(self, node: Node, function: Function, scope: _Scope) -> None:
        for child in node.named_children:
            self._visit(child, function, scope)

    def _visit(self, node: Node, function: Function, scope: _Scope) -> None:
        match node.type:
            case "comment":
                return
            case "identifier":
                self._read(node, function, scope)
            case "dot_index_expression" | "method_index_expression":
                self._visit(_named(node, "table"), function, scope)
            case "field":
                name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
                if name is not None and name.type != "identifier":
                    self._visit(name, function, scope)
                if value is not None:
                    self._visit(value, function, scope)
            case "function_call":
                self._call(node, function, scope)
            case "variable_declaration":
                self._local(node, function, scope)
            case "assignment_statement":
                self._assign(node, function, scope)
            case "function_declaration":
                self._declare(node, function, scope)
            case "function_definition":
                self._function(node, function, scope, None)
            case "for_statement":
                self._for(node, function, scope)
            case "repeat_statement":
                inner = _Scope(scope)
                body = node.child_by_field_name("body")
                if body is not None:
                    self.block(body, function, inner)
                self._visit(_named(node, "condition"), function, inner)  # it sees the locals of the body
            case "block":
                self.block(node, function, _Scope(scope))
            case "goto_statement" | "label_statement" | "attribute":
                return
            case _:
                for child in node.named_children:
                    self._visit(child, function, scope)

    def _binding(self, name: str, scope: _Scope) -> Binding:
        found = scope.find(name)
        if found is None:
            found = self._program.globals.setdefault(name, Binding(name, is_local=False))
        return found

    def _read(self, node: Node, function: Function, scope: _Scope) -> None:
        binding = self._binding(text_of(node), scope)
        self._program.bindings[node.id] = binding
        self._program.reads.append(Reference(binding, node, function))

    def _call(self, node: Node, function: Function, scope: _Scope) -> None:
        called = _named(node, "name")
        self._visit(called, function, scope)
        given = node.child_by_field_name("arguments")
        if given is not None:
            self.block(given, function, scope)
        path = path_of(called)
        binding = None if path is None else self._program.bindings.get(_first(called).id)
        self._program.calls.append(Call(node, path, binding, function))

    def _local(self, node: Node, function: Function, scope: _Scope) -> None:
        inner = node.named_children[0]
        names, values = _listed(inner) if inner.type == "assignment_statement" else (_names(inner), [])
        for value in values:
            self._visit(value, function, scope)
        for place, name in enumerate(names):
            binding = scope[text_of(name)] = Binding(text_of(name), is_local=True)
            self._program.bindings[name.id] = binding
            self._given(binding, name, _value_at(values, place), function)

    def _assign(self, node: Node, function: Function, scope: _Scope) -> None:
        targets, values = _listed(node)
        for value in values:
            self._visit(value, function, scope)
        for place, target in enumerate(targets):
            value_of_target = _value_at(values, place)
            if target.type == "identifier":
                binding = self._binding(text_of(target), scope)
                self._program.bindings[target.id] = binding
                self._given(binding, target, value_of_target, function)
            else:
                self._visit(target, function, scope)
                self._program.writes.append((target, value_of_target, function))

    def _given(self, binding: Binding, name: Node, value: Node | None, function: Function) -> None:
        if value is not None:
            binding.values.append((value, name.start_byte))
            if value.type in _FUNCTIONS and (made := self._program.function_of.get(value.id)) is not None:
                made.binding = binding
                binding.functions.append(made)
        self._program.writes.append((name, value, function))

    def _declare(self, node: Node, function: Function, scope: _Scope) -> None:
        name = _named(node, "name")
        binding = None
        if name.type == "identifier":
            if any(child.type == "local" for child in node.children):
                binding = scope[text_of(name)] = Binding(text_of(name), is_local=True)
            else:
                binding = self._binding(text_of(name), scope)
            binding.values.append((node, name.start_byte))
            self._program.bindings[name.id] = binding
        else:
            self._visit(name, function, scope)
        self._function(node, function, scope, binding)

    def _function(self, node: Node, around: Function, scope: _Scope, binding: Binding | None) -> None:
        made = Function(node, around, binding)
        self._program.functions.append(made)
        self._program.function_of[node.id] = made
        if binding is not None:
            binding.functions.append(made)
        inner = _Scope(scope)
        name = node.child_by_field_name("name")
        if name is not None and name.type == "method_index_expression":
            inner["self"] = Binding("self", is_local=True, is_parameter=True)
        for parameter in _named(node, "parameters").named_children:
            if parameter.type == "identifier":
                inner[text_of(parameter)] = Binding(text_of(parameter), is_local=True, is_parameter=True)
        body = node.child_by_field_name("body")
        if body is not None:
            self.block(body, made, inner)

    def _for(self, node: Node, function: Function, scope: _Scope) -> None:
        clause, body = _named(node, "clause"), node.child_by_field_name("body")
        inner = _Scope(scope)
        if clause.type == "for_numeric_clause":
            for part in ("start", "end", "step"):
                if (value := clause.child_by_field_name(part)) is not None:
                    self._visit(value, function, scope)
            names = [_named(clause, "name")]
        else:
            names = _names(clause.named_children[0])
            for value in clause.named_children[1:]:
                self._visit(value, function, scope)
        for name in names:
            inner[text_of(name)] = Binding(text_of(name), is_local=True, is_parameter=True)
        if body is not None:
            self.block(body, function, inner)


def _find_recorded(program: Program) -> None:
    """Which functions' results are recorded: those given to checkpoint and step, prompts of agents, and functions that
    only such functions use."""
    for call in program.calls:
        if program.meaning(call) in RECORDING:
            for given in call.arguments:
                if given.type == "function_definition":
                    program.function_of[given.id].is_recorded = True
    for function in program.functions:
        field_of = function.node.parent
        name = field_of.child_by_field_name("name") if field_of is not None and field_of.type == "field" else None
        if name is not None and text_of(name) == "system_prompt":
            function.is_recorded = True
    given_to = {given.id for call in program.calls if program.meaning(call) in RECORDING for given in call.arguments}
    used: dict[Binding, list[Reference]] = {}
    for reference in program.reads:
        used.setdefault(reference.binding, []).append(reference)
    changed = True
    while changed:
        changed = False
        for function in program.functions:
            uses = [] if function.binding is None else used.get(function.binding, [])
            if function.is_recorded or not uses:
                continue
            if all(one.node.id in given_to or one.function.is_within_recorded() for one in uses):
                function.is_recorded = changed = True


def _named(node: Node, name: str) -> Node:
    found = node.child_by_field_name(name)
    return node if found is None else found


def _first(node: Node) -> Node:
    """The identifier with which a path begins."""
    while node.type not in ("identifier",):
        inner = node.child_by_field_name("table") or (node.named_children[0] if node.named_children else None)
        if inner is None:
            return node
        node = inner
    return node


def _listed(node: Node) -> tuple[list[Node], list[Node]]:
    names = [child for child in node.named_children if child.type == "variable_list"]
    values = [child for child in node.named_children if child.type == "expression_list"]
    return [one for found in names for one in _names(found)], [one for found in values for one in _plain(found)]


def _names(node: Node) -> list[Node]:
    return node.children_by_field_name("name") or ([node] if node.type == "identifier" else [])


def _plain(node: Node) -> Iterator[Node]:
    return (child for child in node.named_children if child.type != "comment")


def _value_at(values: Sequence[Node], place: int) -> Node | None:
    return values[min(place, len(values) - 1)] if values else None
