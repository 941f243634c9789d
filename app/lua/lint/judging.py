"""The rules applied to a program: each finding with its line, and why."""

from __future__ import annotations

import difflib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from tree_sitter import Node

from app.lua.lint.known import CHEAP, GLOBALS, MEMBERS, MISSING, NONDETERMINISTIC
from app.lua.lint.rules import RULE_OF
from app.lua.lint.scopes import Binding, Call, Function, Program, path_of
from app.lua.lint.source import line_of, text_of, within

_LOOPS: Final = ("for_statement", "while_statement", "repeat_statement")


class Found(NamedTuple):
    line: int
    column: int
    end_line: int
    code: str
    what: str
    why: str
    fix: str
    procedure: str | None


def judged(program: Program) -> list[Found]:
    judge = _Judge(program)
    found = [
        *judge.nondeterminism(),
        *judge.across_checkpoints(),
        *judge.state_writes(),
        *judge.bare_checkpoints(),
        *judge.unknown_names(),
        *judge.unknown_members(),
        *judge.missing_main(),
    ]
    return sorted(set(found))


class _Judge:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._calls = {call.node.id: call for call in program.calls}
        # Of each function what it performs, and what may take long in it, in the order of the text.
        self._operations: dict[Function, list[Call]] = {}
        self._dear: dict[Function, list[tuple[int, str, Node]]] = {}
        for call in sorted(program.calls, key=lambda one: one.node.start_byte):
            if program.operation(call) is not None:
                self._operations.setdefault(call.function, []).append(call)
            elif (name := self._dear_name(call)) is not None:
                self._dear.setdefault(call.function, []).append((call.node.start_byte, name, call.node))
        self._add_loops()
        self._tainted = self._find_tainted()

    # What differs each time.

    def _differs(self, call: Call) -> str | None:
        """The name of one of the seven functions, if the call is one that asks for it."""
        path = self._program.meaning(call)
        if path not in NONDETERMINISTIC or path is None:
            return None
        if path in (("os", "time"), ("os", "date")) and _is_fixed(path, call):
            return None  # of a time that is given: the same each time
        return ".".join(path)

    def nondeterminism(self) -> Iterator[Found]:
        for call in self._program.calls:
            name = self._differs(call)
            if name is None:
                continue
            if not call.function.is_within_recorded():
                yield self._found("TGL101", call.node, f"{name}() outside a checkpoint", NONDETERMINISTIC[_pair(name)])
                continue
            later = self._operation_after(call)
            if later is not None:
                operation = self._program.operation(later)
                yield self._found(
                    "TGL103",
                    call.node,
                    f"{name}() before {operation} at line {line_of(later.node)}, in one body",
                )

    def _operation_after(self, call: Call) -> Call | None:
        return self._next_operation(call.function, call.node.start_byte)

    def _next_operation(self, function: Function, after: int) -> Call | None:
        operations = self._operations.get(function, [])
        place = bisect_right(operations, after, key=lambda one: one.node.start_byte)
        return operations[place] if place < len(operations) else None

    def _find_tainted(self) -> dict[Binding, tuple[str, int, Function]]:
        """Variables that hold what differs each time: from which function, and since where."""
        tainted: dict[Binding, tuple[str, int, Function]] = {}
        for _ in range(2):  # what a loop assigns at its end is read at its beginning
            for target, value, function in self._program.writes:
                if value is None or target.type != "identifier" or function.is_within_recorded():
                    continue
                source = self._taint_of(value, tainted)
                binding = self._program.bindings.get(target.id)
                if source is not None and binding is not None and binding not in tainted:
                    tainted[binding] = source, target.start_byte, function
        return tainted

    def _taint_of(self, value: Node, tainted: dict[Binding, tuple[str, int, Function]]) -> str | None:
        """Which function makes the value differ; what a recorded body returns does not."""
        waiting = [value]
        while waiting:
            node = waiting.pop()
            if node.type in ("function_definition", "function_declaration"):
                continue
            call = self._calls.get(node.id)
            if call is not None:
                if (name := self._differs(call)) is not None:
                    return name
                if self._program.operation(call) is not None:
                    continue  # its result is recorded
            binding = self._program.bindings.get(node.id)
            if node.type == "identifier" and binding in tainted:
                return tainted[binding][0]
            waiting.extend(node.named_children)
        return None

    def across_checkpoints(self) -> Iterator[Found]:
        told: set[Binding] = set()
        for reference in sorted(self._program.reads, key=lambda one: one.node.start_byte):
            known = self._tainted.get(reference.binding)
            if known is None or reference.binding in told:
                continue
            name, since, function = known
            between = self._next_operation(function, since)
            if between is not None and between.node.end_byte <= reference.node.start_byte:
                told.add(reference.binding)
                kind = "the local" if reference.binding.is_local else "the global"
                what = (
                    f"{kind} {reference.binding.name} holds what {name}() gave, and is used after "
                    f"{self._program.operation(between)} at line {line_of(between.node)}"
                )
                fix = f"state.{reference.binding.name} = checkpoint(function() return {name}() end)"
                yield self._found("TGL102", reference.node, what, fix=fix)

    def state_writes(self) -> Iterator[Found]:
        for target, value, function in self._program.writes:
            path = path_of(target) or _owner_path(target)
            if path is None or path[0] != "state" or len(path) < 2 or value is None or function.is_within_recorded():
                continue
            name = self._taint_of(value, self._tainted)
            if name is not None:
                shown = ".".join(path)
                fix = f"{shown} = checkpoint(function() return ... end), with {name}() inside"
                yield self._found(
                    "TGL201", target, f"{shown} is given what {name}() gave, outside a checkpoint", fix=fix
                )

    # What a replay computes again.

    def bare_checkpoints(self) -> Iterator[Found]:
        for call in self._program.calls:
            if self._program.meaning(call) not in (("checkpoint",), ("Step", "checkpoint")) or call.arguments:
                continue
            operations = self._operations.get(call.function, [])
            place = bisect_left(operations, call.node.start_byte, key=lambda one: one.node.start_byte)
            begins = operations[place - 1].node.end_byte if place else 0
            dear = self._dear.get(call.function, [])
            at = bisect_left(dear, begins, key=lambda one: one[0])
            if at < len(dear) and dear[at][2].end_byte <= call.node.start_byte:
                _, name, node = dear[at]
                what = f"checkpoint() after {name} at line {line_of(node)}, which each replay computes again"
                yield self._found("TGL301", call.node, what)

    def _dear_name(self, call: Call) -> str | None:
        """What a call is called that may take long: of a function of the program's own, or one that nothing defines."""
        path, binding = call.path, call.binding
        if path is None or binding is None or path[0] in CHEAP or self._program.kind(binding) is not None:
            return None
        is_own = binding.is_local or bool(binding.values) or binding.name not in GLOBALS
        return f"{'.'.join(path)}()" if is_own and self._program.meaning(call) not in NONDETERMINISTIC else None

    def _add_loops(self) -> None:
        for node in within(self._program.root):
            if node.type in _LOOPS:
                self._dear.setdefault(self._function_around(node), []).append((node.start_byte, "a loop", node))
        for dear in self._dear.values():
            dear.sort(key=lambda one: one[0])

    def _function_around(self, node: Node) -> Function:
        inner: Node | None = node.parent
        while inner is not None:
            if (found := self._program.function_of.get(inner.id)) is not None:
                return found
            inner = inner.parent
        return self._program.main

    # What is not there.

    def unknown_names(self) -> Iterator[Found]:
        told: set[str] = set()
        assigned = {name for name, binding in self._program.globals.items() if binding.values}
        for reference in self._program.reads:
            name = reference.binding.name
            if reference.binding.is_local or name in GLOBALS or name in assigned or name in told:
                continue
            told.add(name)
            if name in MISSING:
                yield self._found("TGL401", reference.node, f"{name} is not there", fix=MISSING[name])
                continue
            close = difflib.get_close_matches(name, sorted(GLOBALS | assigned), n=1)
            fix = f"perhaps {close[0]} is meant" if close else None
            yield self._found("TGL401", reference.node, f"nothing defines {name}", fix=fix)

    def unknown_members(self) -> Iterator[Found]:
        for reference in self._program.reads:
            node, binding = reference.node, reference.binding
            known = MEMBERS.get(binding.name)
            around = node.parent
            if known is None or binding.is_local or binding.values or around is None:
                continue
            path = path_of(around)
            if path is None or len(path) != 2 or path[1] in known:
                continue
            close = difflib.get_close_matches(path[1], sorted(known), n=1)
            there = ", ".join(f"{binding.name}.{name}" for name in sorted(known))
            fix = f"perhaps {binding.name}.{close[0]} is meant" if close else f"there is {there}"
            yield self._found("TGL402", around, f"{binding.name} has no {path[1]}", fix=fix)

    def missing_main(self) -> Iterator[Found]:
        """Procedures, of which none is the entry, in a file that does nothing itself. What a function of the program
        does at the top of the file is not followed: then nothing is said."""
        top, last = self._program.main, None
        for call in self._program.calls:
            name = procedure_name(call.node)
            if name == "main" or (name is None and call.function is top and (not call.binding or call.binding.values)):
                return
            if name is not None and (last is None or call.node.start_byte > last.start_byte):
                last = call.node
        entry = self._program.globals.get("main")
        returns = any(node.type == "return_statement" for node in self._program.root.named_children)
        if last is None or returns or (entry is not None and entry.values) or self._operations.get(top):
            return
        yield self._found("TGL403", last, "procedures, and none of them is main")

    def _found(self, code: str, node: Node, what: str, why: str | None = None, *, fix: str | None = None) -> Found:
        rule = RULE_OF[code]
        said = rule.why if why is None else f"the program is executed again in each attempt; {why}"
        start, end = node.start_point, node.end_point
        procedure = procedure_around(node)
        return Found(start.row + 1, start.column + 1, end.row + 1, code, what, said, fix or rule.fix, procedure)


def _pair(name: str) -> tuple[str, str]:
    library, _, member = name.partition(".")
    return library, member


def _is_fixed(path: tuple[str, ...], call: Call) -> bool:
    """os.time of a table, and os.date of a time: they ask no clock."""
    return len(call.arguments) >= (1 if path[1] == "time" else 2)


def _owner_path(target: Node) -> tuple[str, ...] | None:
    """`state.items[i]` is written by a name that is computed: the path up to there."""
    owner = target.child_by_field_name("table") if target.type == "bracket_index_expression" else None
    return None if owner is None else path_of(owner)


def procedure_around(node: Node) -> str | None:
    """The name of the procedure in whose declaration the node stands."""
    inner: Node | None = node
    while inner is not None:
        if inner.type == "function_call" and (name := procedure_name(inner)) is not None:
            return name
        inner = inner.parent
    return None


def procedure_name(call: Node) -> str | None:
    """The name in `procedure "name" {...}` and `procedure("name", ...)`."""
    root = call
    while root.type == "function_call":
        called = root.child_by_field_name("name")
        if called is None:
            return None
        if path_of(called) in (("procedure",), ("Procedure",)):
            given = root.child_by_field_name("arguments")
            first = given.named_children[0] if given is not None and given.named_children else None
            content = first.child_by_field_name("content") if first is not None and first.type == "string" else None
            return "main" if content is None else text_of(content)
        root = called
    return None
