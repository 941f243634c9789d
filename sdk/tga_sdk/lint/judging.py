"""The rules, applied: what is executed again in each attempt must do the same again, and what is recorded must be fit
to be recorded."""

from __future__ import annotations

import ast
from typing import NamedTuple

from tga_sdk.lint import known
from tga_sdk.lint.facts import USED, Facts, outside_functions
from tga_sdk.lint.rules import RULE_OF
from tga_sdk.lint.scopes import FUNCTIONS, Function, Module, Scope, argument

_COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.GeneratorExp)
_DECISIONS = (ast.If, ast.While, ast.IfExp, ast.Assert, ast.Match)


class Finding(NamedTuple):
    """One place in a file, and the rule that it breaks; `procedure` is the one that is concerned, if any."""

    line: int
    column: int
    end_line: int
    code: str
    what: str
    why: str
    fix: str
    procedure: str | None


def judged(module: Module) -> list[Finding]:
    """Every finding of a file, in the order of its lines."""
    judge = _Judge(module)
    judge.judge()
    return sorted(judge.findings.values())


class _Judge:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.facts = Facts(module)
        self.findings: dict[tuple[int, int, str], Finding] = {}
        self.procedure: str | None = None
        self._seen: set[tuple[int, bool]] = set()
        self._said: set[int] = set()  # nodes of which another rule has spoken

    def judge(self) -> None:
        self._judge_declared()
        for declared in self.module.declared:
            if declared.kind == "procedure" and declared.function is not None:
                self.procedure = declared.name
                self._judge_body(declared.function, is_replayed=True)
        for function in self.module.recorded:
            self.procedure = getattr(function, "name", None)
            self._judge_recorded(function)

    def _add(self, code: str, node: ast.AST, what: str, fix: str | None = None) -> None:
        rule = RULE_OF[code]
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        end = getattr(node, "end_lineno", None) or line
        finding = Finding(line, column, end, code, what, rule.why, fix or rule.fix, self.procedure)
        self.findings.setdefault((line, column, code), finding)

    # Declarations.

    def _judge_declared(self) -> None:
        known_at: dict[tuple[str, str], int] = {}
        for declared in self.module.declared:
            self.procedure = declared.name
            place = getattr(declared.node, "lineno", 1)
            first = known_at.setdefault((declared.name, declared.version), place)
            if first != place:
                said = f"{declared.name} {declared.version} is declared again; it is declared in line {first}"
                self._add("TGA601", declared.node, said)
            if declared.kind == "procedure" and declared.function is not None:
                self._judge_signature(declared.function)
            if declared.kind == "flow" and isinstance(declared.node, ast.Call):
                self._judge_flow(declared.node)

    def _judge_signature(self, function: Function) -> None:
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        if id(function) in self.module.class_of:
            self._add("TGA603", function, "a method is declared as a procedure: its self would be taken for ctx")
        elif not 1 <= len(positional) <= 2 or arguments.kwonlyargs or arguments.vararg or arguments.kwarg:
            self._add("TGA603", function, f"expected (ctx, input) or (ctx), found {len(positional)} parameters")

    def _judge_flow(self, call: ast.Call) -> None:
        steps = argument(call, 1, "steps")
        names: dict[str, int] = {}
        for step in steps.elts if isinstance(steps, ast.List | ast.Tuple) else ():
            name = argument(step, 0, "name") if isinstance(step, ast.Call) else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                if name.value in names:
                    self._add(
                        "TGA602", step, f"step {name.value} comes twice; it is in line {names[name.value]} already"
                    )
                names.setdefault(name.value, name.lineno)

    # Bodies.

    def _judge_body(self, function: Function, *, is_replayed: bool) -> None:
        """Of a body that is executed again in each attempt; or of a recorded one that performs operations inside."""
        if (id(function), is_replayed) in self._seen:
            return
        self._seen.add((id(function), is_replayed))
        for node, scope in self.module.nodes(function, nested=False):
            if is_replayed:
                self._judge_non_determinism(node, scope)
                self._judge_state(node, scope)
                self._judge_checkpoint(node, scope)
            self._judge_order(node, scope, is_replayed=is_replayed)
            self._judge_errors(node, scope)
            self._judge_attempt(node, scope)
            self._judge_late_binding(node, scope)
            if isinstance(node, ast.Call):
                self._judge_concurrency(node, scope)
                operation = self.module.operation(node, scope)
                if operation is not None:
                    self._judge_operation(node, operation, scope)
                else:
                    self._judge_called(node, scope, is_replayed=is_replayed)
            if isinstance(node, ast.With | ast.AsyncWith):
                self._judge_timeout(node, scope)

    def _judge_called(self, call: ast.Call, scope: Scope, *, is_replayed: bool) -> None:
        """A function of the file that the body calls is part of the body; a task is recorded."""
        called = self.module.function(call.func, scope)
        if called is not None:
            is_task = id(called) in self.module.tasks
            if (
                scope.is_async
                and isinstance(called, ast.AsyncFunctionDef)
                and (is_task or self.module.performs(called))
            ):
                self._judge_await(call, f"{called.name}()", scope)
            if not is_task and is_replayed:
                self._judge_body(called, is_replayed=True)
        if is_replayed and self.module.dotted(call.func, scope) in known.CALLED_AT_ONCE:
            for given in [*call.args, *(keyword.value for keyword in call.keywords)]:
                function = self.module.function(given, scope)
                if function is not None and id(function) not in self.module.tasks:
                    self._judge_body(function, is_replayed=True)

    def _judge_recorded(self, function: Function) -> None:
        """A body that is recorded: skipped in a replay, unless it was under way in a crash."""
        if (id(function), False) in self._seen:
            return
        performed = [
            node.lineno
            for node, scope in self.module.nodes(function)
            if isinstance(node, ast.Call)
            and (self.module.operation(node, scope) is not None or self.module.calls_performing(node, scope))
        ]
        if performed and not isinstance(function, ast.Lambda):
            for node, scope in self.module.nodes(function, nested=False):
                found = self.facts.non_determinism(node, scope)
                if found and getattr(node, "lineno", 0) <= max(performed) and found[0] not in ("TGA107", "TGA104"):
                    self._add("TGA110", node, f"{found[1]} before an operation of the same recorded body")
        self._judge_body(function, is_replayed=False)
        for node, scope in self.module.nodes(function, nested=False):
            self._judge_returned(node, scope)
        for node, scope in self.module.nodes(function):
            self._judge_closure(node, scope, function)

    # Non-determinism.

    def _judge_non_determinism(self, node: ast.AST, scope: Scope) -> None:
        found = self.facts.non_determinism(node, scope) if id(node) not in self._said else None
        if found is not None:
            self._add(found[0], node, f"{found[1]} outside a recorded operation", _specific_fix(found[1]))

    # Sets.

    def _judge_order(self, node: ast.AST, scope: Scope, *, is_replayed: bool) -> None:
        if not is_replayed and not (isinstance(node, ast.For) and self.facts.contains_operation(node.body, scope)):
            return
        iterated: list[ast.expr] = []
        if isinstance(node, ast.For | ast.AsyncFor):
            iterated.append(node.iter)
        elif isinstance(node, _COMPREHENSIONS) and not self.facts.is_order_free(node, scope):
            iterated += [generator.iter for generator in node.generators]
        elif isinstance(node, ast.Starred) and not isinstance(self.module.parents.get(id(node)), ast.Set):
            iterated.append(node.value)
        elif isinstance(node, ast.Call):
            name = self.module.dotted(node.func, scope)
            is_join = isinstance(node.func, ast.Attribute) and node.func.attr == "join"
            if (name in known.ORDER_MATTERS and not self.facts.is_order_free(node, scope)) or is_join:
                iterated += node.args
            if isinstance(node.func, ast.Attribute) and node.func.attr == "pop" and not node.args:
                iterated.append(node.func.value)
        for expression in iterated:
            if self.facts.is_set(expression, scope):
                self._add("TGA106", expression, "the elements of a set are taken in their order")

    # Operations.

    def _judge_operation(self, call: ast.Call, operation: str, scope: Scope) -> None:
        self._judge_await(call, f"ctx.{operation}()", scope)
        self._judge_names(call, operation, scope)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        tier, resume = given.get("tier"), given.get("resume")
        is_skipped = resume is None or (isinstance(resume, ast.Constant) and resume.value != "recompute")
        if isinstance(tier, ast.Constant) and tier.value == "transient" and is_skipped:
            self._add("TGA404", call, "tier='transient' with resume='snapshot'")
        body = self.module.body_of(call, operation, scope)
        if body is not None:
            self._judge_recorded(body)
        if operation in known.BODIES:
            for value in call.args[known.BODIES[operation] + 1 :]:
                self._judge_kept(value, scope, "is given to a step")
            self._judge_changed_arguments(call, body, known.BODIES[operation] + 1, scope)
        if operation == "gather":
            for value in call.args:
                for function in self.facts.functions_in(value, scope):
                    self._judge_body(function, is_replayed=True)

    def _judge_await(self, call: ast.Call, said: str, scope: Scope) -> None:
        if not scope.is_async:
            return
        parent = self.module.parents.get(id(call))
        is_lost = isinstance(parent, (ast.Expr, *USED))
        if isinstance(parent, ast.If | ast.While | ast.IfExp):
            is_lost = parent.test is call
        if isinstance(parent, ast.For | ast.comprehension):
            is_lost = parent.iter is call
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            is_lost = bool(names) and not self.facts.is_passed_on(names, scope)
        if is_lost:
            self._add("TGA201", call, f"{said} is not awaited")

    def _judge_names(self, call: ast.Call, operation: str, scope: Scope) -> None:
        """What an operation is known by must be the same in each attempt."""
        place = {"step": 0, "perform": 1, "signal": 0}.get(operation)
        named = [keyword.value for keyword in call.keywords if keyword.arg in ("name", "run_id")]
        if place is not None and len(call.args) > place:
            named.append(call.args[place])
        for expression in named:
            for node in ast.walk(expression):
                if self.facts.is_unstable(node, scope):
                    self._said.update(id(inner) for inner in ast.walk(node))
                    self._add("TGA108", node, f"the name of ctx.{operation}() is made of what differs in each attempt")

    def _judge_attempt(self, node: ast.AST, scope: Scope) -> None:
        if not self.facts.is_attempt(node, scope) or id(node) in self._said:
            return
        child: ast.AST = node
        parent = self.module.parents.get(id(node))
        while parent is not None and not isinstance(child, ast.stmt):
            decides = isinstance(parent, _DECISIONS) and child in (
                getattr(parent, "test", None),
                getattr(parent, "subject", None),
            )
            if decides or (
                isinstance(parent, ast.Call) and self.module.operation(parent, scope) and child is not parent.func
            ):
                self._add("TGA109", node, "ctx.attempt decides what is performed")
                return
            child, parent = parent, self.module.parents.get(id(parent))

    def _judge_late_binding(self, node: ast.AST, scope: Scope) -> None:
        """`[lambda: ctx.tool(..., item) for item in items]`: each of them sees the last item."""
        if not isinstance(node, ast.Lambda) or not self.module.performs(node):
            return
        inner = self.module.scopes[id(node)]
        used = {one.id for one, _ in self.module.nodes(node) if isinstance(one, ast.Name) and not inner.binds(one.id)}
        child: ast.AST = node
        parent = self.module.parents.get(id(node))
        kept = False
        while parent is not None and not isinstance(parent, FUNCTIONS):
            targets: list[ast.expr] = []
            if isinstance(parent, ast.ListComp | ast.GeneratorExp | ast.SetComp) and child is parent.elt:
                targets = [generator.target for generator in parent.generators]
            elif isinstance(parent, ast.For | ast.AsyncFor) and kept:
                targets = [parent.target]
            elif (
                isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr == "append"
            ):
                kept = True
            bound = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            if used & bound:
                said = ", ".join(sorted(used & bound))
                self._add("TGA204", node, f"the function sees {said} as the loop has left it, not as it is here")
                return
            child, parent = parent, self.module.parents.get(id(parent))

    # Concurrency.

    def _judge_concurrency(self, call: ast.Call, scope: Scope) -> None:
        name = self.module.dotted(call.func, scope) or ""
        is_method = isinstance(call.func, ast.Attribute) and call.func.attr in known.CONCURRENT_METHODS
        if name in known.CONCURRENT or is_method:
            if self.facts.gives_operations(call, scope):
                said = name or f".{call.func.attr}" if isinstance(call.func, ast.Attribute) else name
                self._add("TGA202", call, f"operations of ctx are started with {said}()")
        elif name in known.TIMEOUTS and self.facts.gives_operations(call, scope):
            self._add("TGA203", call, f"{name}() ends an operation of ctx by the clock of this process")

    def _judge_timeout(self, node: ast.With | ast.AsyncWith, scope: Scope) -> None:
        for item in node.items:
            call = item.context_expr
            name = self.module.dotted(call.func, scope) if isinstance(call, ast.Call) else None
            if name in known.TIMEOUTS and self.facts.contains_operation(node.body, scope):
                self._add("TGA203", call, f"{name}() ends operations of ctx by the clock of this process")
            given = call.args if isinstance(call, ast.Call) and name == "contextlib.suppress" else []
            swallows = any(self.module.dotted(one, scope) in known.SWALLOWS for one in given)
            if swallows and self.facts.contains_operation(node.body, scope):
                self._add("TGA301", call, "suppress() holds what stops the run")

    # Errors.

    def _judge_errors(self, node: ast.AST, scope: Scope) -> None:
        if not isinstance(node, ast.Try | ast.TryStar) or not self.facts.contains_operation(node.body, scope):
            return
        for handler in node.handlers:
            caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            names = [None if one is None else self.module.dotted(one, scope) for one in caught]
            swallows = handler.type is None or any(name in known.SWALLOWS for name in names)
            if swallows and not any(isinstance(inner, ast.Raise) for one in handler.body for inner in ast.walk(one)):
                said = "a bare except" if handler.type is None else f"except {ast.unparse(handler.type)}"
                self._add("TGA301", handler, f"{said} holds what stops the run")
        for inner in (inner for one in node.finalbody for inner in outside_functions(one)):
            if isinstance(inner, ast.Return):
                self._add("TGA302", inner, "return in finally discards what stops the run")

    # State.

    def _judge_state(self, node: ast.AST, scope: Scope) -> None:
        for name, place in self.facts.changed_names(node):
            is_outside = scope.owner(name.id) is self.module.top and name.id not in self.module.top.functions
            if is_outside and not self.module.is_ctx(name, scope):
                self._add("TGA401", place, f"{name.id} of the module is changed by the body of a procedure")

    def _judge_closure(self, node: ast.AST, scope: Scope, body: Function) -> None:
        """A recorded body that changes what is around it, or needs what cannot be recorded."""
        for name, place in self.facts.changed_names(node):
            owner = scope.owner(name.id)
            if owner is not None and self.facts.is_around(owner, body) and not self.module.is_ctx(name, scope):
                self._add("TGA402", place, f"{name.id} of the function around is changed by a recorded body")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            owner = scope.owner(node.id)
            if owner is not None and self.facts.is_around(owner, body):
                self._judge_kept(node, scope, "is used by a recorded body that did not make it")

    def _judge_changed_arguments(self, call: ast.Call, body: Function | None, first: int, scope: Scope) -> None:
        """The body gets the caller's own object: what it changes there is missing in a replay."""
        if body is None:
            return
        inner = self.module.scopes[id(body)]
        own = [parameter.arg for parameter in inner.parameters if parameter.arg not in ("self", "cls")]
        shared = {
            name
            for name, value in zip(own, call.args[first:], strict=False)
            if isinstance(value, ast.Name) and not self.module.is_ctx(value, scope) and name not in inner.assigned
        }
        for node, at in self.module.nodes(body, nested=False):
            for name, place in self.facts.changed_names(node):
                if name.id in shared and at.owner(name.id) is inner:
                    said = f"{name.id}, which the procedure gave to the step, is changed by its body"
                    self._add("TGA402", place, said)

    # Values.

    def _judge_kept(self, node: ast.expr, scope: Scope, why: str) -> None:
        found = self.facts.unserialisable(node, scope)
        if found is not None and not (isinstance(node, ast.Name) and found == "a function"):
            self._add("TGA403", node, f"{found} {why}")

    def _judge_returned(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Return) and node.value is not None:
            self._judge_kept(node.value, scope, "is returned from a recorded body")
        if isinstance(node, ast.Yield | ast.YieldFrom):
            self._add("TGA403", node, "a recorded body is a generator: what it returns cannot be recorded")

    # Checkpoint.

    def _judge_checkpoint(self, node: ast.AST, scope: Scope) -> None:
        """What stands before a checkpoint in the same block, back to the last operation that records a result."""
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list):
                self._judge_block(block, scope)
        parent = self.module.parents.get(id(node))
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and parent.body[0] is node:
            self._judge_block(parent.body, scope)

    def _judge_block(self, block: list[ast.stmt], scope: Scope) -> None:
        since: list[ast.stmt] = []
        for statement in block:
            call = _checkpoint_in(statement)
            if call is not None and self.module.operation(call, scope) == "checkpoint":
                dear = next((found for one in since if (found := self.facts.expensive(one, scope)) is not None), None)
                if dear is not None:
                    said = f"ctx.checkpoint() after {dear[1]} in line {dear[0]}, which a replay computes again"
                    self._add("TGA501", call, said)
                since = []
            elif self.facts.contains_operation([statement], scope):
                since = []
            else:
                since.append(statement)


def _specific_fix(said: str) -> str | None:
    return "use ctx.uuid()" if said.startswith("uuid.") else None


def _checkpoint_in(statement: ast.stmt) -> ast.Call | None:
    value = statement.value if isinstance(statement, ast.Expr) else None
    value = value.value if isinstance(value, ast.Await) else value
    return value if isinstance(value, ast.Call) else None
