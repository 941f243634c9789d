"""Procedures in Lua as a mermaid flowchart, drawn as those in Python: operations in their order, branches, loops.

Shown is what performs operations; computing between them is not. Functions of the file that perform operations are
drawn where they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from tree_sitter import Node

from app.lua.lint.judging import procedure_name
from app.lua.lint.known import PEOPLE, RECORDING, WAITS
from app.lua.lint.scopes import Call, Function, Program, literal
from app.lua.lint.source import text_of, within
from tga_sdk.lint.diagram import DEPTH_MAX, Chart, Ends

Declared = tuple[str, Function]


def declared(program: Program, file: str) -> list[Declared]:
    """The procedures of the file with their bodies; of a script the file itself."""
    found: list[Declared] = []
    for call in program.calls:
        is_inner = call.node.parent is not None and call.node.parent.type == "function_call"
        name = None if is_inner or (call.binding is not None and call.path is None) else procedure_name(call.node)
        body = None if name is None else _body_of(program, call.node)
        if name is not None and body is not None:
            found.append((name, body))
    if found:
        return found
    name = PurePath(file).name
    for ending in (".lua", ".tactus", ".tac"):
        name = name.removesuffix(ending)
    return [(name, program.main)]


def drawn(program: Program, file: str) -> str:
    """All procedures of a file."""
    pen = _Pen(program)
    for name, body in declared(program, file):
        pen.draw(name, body)
    return pen.text()


def _body_of(program: Program, call: Node) -> Function | None:
    """The function in `run = function() ... end`, or the last one that is given."""
    body: Function | None = None
    given: Node | None = call
    while given is not None and given.type == "function_call":
        arguments = given.child_by_field_name("arguments")
        for one in () if arguments is None else arguments.named_children:
            if one.type == "function_definition":
                body = body or program.function_of[one.id]
            for entry in one.named_children if one.type == "table_constructor" else ():
                name, value = entry.child_by_field_name("name"), entry.child_by_field_name("value")
                is_run = name is None or text_of(name) == "run"
                if is_run and value is not None and value.type == "function_definition":
                    body = body or program.function_of[value.id]
        given = given.child_by_field_name("name")
    return body


class _Pen(Chart):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program
        self._calls = {call.node.id: call for call in program.calls}
        self._performs = self._find_performing()

    def draw(self, name: str, body: Function) -> None:
        with self._graph(name):
            start = self._node("procedure", "round", Ends())
            self._node("end", "round", self._body(body, start))

    def _find_performing(self) -> set[int]:
        """The functions in which operations are performed, themselves or by what they call."""
        called: dict[int, set[int]] = {}
        performing: set[int] = set()
        for call in self._program.calls:
            caller = call.function.node.id
            if self._program.operation(call) is not None:
                performing.add(caller)
            callees = [] if call.binding is None or len(call.path or ()) != 1 else call.binding.functions
            for callee in callees:
                called.setdefault(callee.node.id, set()).add(caller)
        waiting = list(performing)
        while waiting:
            for caller in called.get(waiting.pop(), ()):
                if caller not in performing:
                    performing.add(caller)
                    waiting.append(caller)
        return performing

    def _body(self, function: Function, before: Ends) -> Ends:
        node = function.node
        if len(self._inside) >= DEPTH_MAX or node.id in self._inside:
            return self._node(f"{function.binding.name if function.binding else 'function'} again", "box", before)
        self._inside.append(node.id)
        returned, loops = Ends(), self._loops
        self._loops = []
        self._returned.append(returned)
        body = node if node.type == "chunk" else node.child_by_field_name("body")
        ends = before if body is None else self._block(body.named_children, before)
        self._returned.pop()
        self._loops = loops
        self._inside.pop()
        return Ends([*ends, *returned])

    def _block(self, nodes: Sequence[Node], before: Ends) -> Ends:
        ends = before
        for node in nodes:
            ends = self._statement(node, ends)
        return ends

    def _statement(self, node: Node, before: Ends) -> Ends:
        match node.type:
            case "if_statement" if self._matters(node):
                return self._choice(node, before)
            case "for_statement" | "while_statement" | "repeat_statement" if self._matters(node):
                return self._loop(node, before)
            case "return_statement":
                self._returned[-1].extend(self._expression(node, before))
                return Ends()
            case "break_statement":
                if self._loops:
                    self._loops[-1][1].extend(before)
                return Ends()
            case "do_statement":
                inner = node.child_by_field_name("body")
                return before if inner is None else self._block(inner.named_children, before)
            case "function_declaration" | "comment":
                return before
            case "if_statement" | "for_statement" | "while_statement" | "repeat_statement":
                return before
        return self._expression(node, before)

    def _matters(self, node: Node) -> bool:
        """Whether operations are performed in it, or it decides whether others are."""
        waiting = [node]
        while waiting:
            inner = waiting.pop()
            if inner.type in ("function_definition", "function_declaration"):
                continue
            if inner.type in ("return_statement", "break_statement"):
                return True
            call = self._calls.get(inner.id)
            if call is not None and (self._program.operation(call) is not None or self._called(call) is not None):
                return True
            waiting.extend(inner.named_children)
        return False

    def _choice(self, node: Node, before: Ends) -> Ends:
        condition = node.child_by_field_name("condition")
        first = before if condition is None else self._expression(condition, before)
        name = self._node(_said(condition), "choice", first)[0][0]
        then = node.child_by_field_name("consequence")
        ends = Ends(self._block(then.named_children, Ends([(name, "yes")])) if then is not None else [(name, "yes")])
        no = Ends([(name, "no")])
        for other in node.children_by_field_name("alternative"):
            body = other.child_by_field_name("consequence") or other.child_by_field_name("body")
            if other.type == "elseif_statement":
                name = self._node(_said(other.child_by_field_name("condition")), "choice", no)[0][0]
                yes, no = Ends([(name, "yes")]), Ends([(name, "no")])
            else:
                yes, no = no, Ends()
            ends.extend(yes if body is None else self._block(body.named_children, yes))
        return Ends([*ends, *no])

    def _loop(self, node: Node, before: Ends) -> Ends:
        clause = node.child_by_field_name("clause") or node.child_by_field_name("condition")
        kind = {"for_statement": "for", "while_statement": "while", "repeat_statement": "until"}[node.type]
        name = self._node(f"{kind} {_said(clause)}", "choice", before)[0][0]
        broken, body = Ends(), node.child_by_field_name("body")
        self._loops.append((name, broken))
        inner = Ends([(name, "next")])
        self._join(inner if body is None else self._block(body.named_children, inner), name)
        self._loops.pop()
        is_endless = node.type == "while_statement" and _said(clause) == "true"
        return Ends([*([] if is_endless else [(name, "done")]), *broken])

    def _expression(self, node: Node, before: Ends) -> Ends:
        """Operations in the order in which Lua evaluates them: arguments before the call."""
        if node.type in ("function_definition", "function_declaration"):
            return before
        ends = before
        for child in node.named_children:
            ends = self._expression(child, ends)
        call = self._calls.get(node.id)
        if call is None:
            return ends
        operation = self._program.operation(call)
        if operation is not None:
            return self._operation(call, operation, ends)
        called = self._called(call)
        return ends if called is None else self._body(called, ends)

    def _called(self, call: Call) -> Function | None:
        """The function of the file that is called, if it performs operations."""
        functions = [] if call.binding is None or len(call.path or ()) != 1 else call.binding.functions
        return next((one for one in functions if one.node.id in self._performs), None)

    def _operation(self, call: Call, operation: str, before: Ends) -> Ends:
        path = self._program.meaning(call) or ()
        said = f"{operation} {_title(call)}".strip() if not operation.startswith(("tool ", "call ")) else operation
        if path == ("parallel",):
            return self._parallel(call, before)
        if path in RECORDING:
            body = self._given_body(call)
            if body is not None and body.node.id in self._performs:
                with self._graph(said):
                    return self._body(body, before)
        is_person = path[:1] == ("Human",) and path[-1] in PEOPLE
        return self._node(said, "person" if is_person else "wait" if path in WAITS else "box", before)

    def _given_body(self, call: Call) -> Function | None:
        for given in call.arguments:
            if given.type == "function_definition":
                return self._program.function_of[given.id]
            binding = self._program.bindings.get(given.id)
            if binding is not None and binding.functions:
                return binding.functions[0]
        return None

    def _parallel(self, call: Call, before: Ends) -> Ends:
        fork = self._node("parallel", "box", before)
        ends = Ends()
        for branch in [one for given in call.arguments for one in within(given) if one.type == "function_definition"]:
            function = self._program.function_of[branch.id]
            if function.around is call.function:
                drawn_branch = self._body(function, fork)
                ends.extend(self._node("branch", "box", fork) if drawn_branch == fork else drawn_branch)
        return self._node("all done", "box", ends or fork)


def _title(call: Call) -> str:
    """What the first argument says: a text, or the message of a table."""
    for given in call.arguments[:1]:
        if (text := literal(given)) is not None:
            return text
        for entry in given.named_children if given.type == "table_constructor" else ():
            name, value = entry.child_by_field_name("name"), entry.child_by_field_name("value")
            if name is not None and value is not None and text_of(name) in ("message", "prompt", "name"):
                return literal(value) or ""
    return ""


def _said(node: Node | None) -> str:
    return "" if node is None else " ".join(text_of(node).split())
