"""What the policies of a file say, read from Cedar's JSON form: names, scopes, and mistakes that Cedar lets pass.

Cedar takes an action, role or attribute that does not exist for one that never matches. A `forbid` with such a slip
forbids nothing and says nothing, so the slip is an error here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from app.core.limits import NAME_CHARS_MAX
from app.domain.identity import Role
from app.domain.policy.encoding import CEDAR_KEYS, JSON_TYPE, RUN_FIELDS
from app.domain.policy.source import Statement
from app.domain.tools import ToolClass

Action = Literal["call", "call_unattended", "approve", "start", "submit"]
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)

_SCOPE_TYPES: Final = {
    "principal": ("Principal", "Role"),
    "resource": ("Tool", "Server", "Procedure"),
    "action": ("Action",),
}
_TYPES: Final = ("Principal", "Role", "Tool", "Server", "Procedure", "Action", JSON_TYPE)
# What only tools and calls of them have, and what only procedures and their starts have.
_OF_CALLS: Final = {
    "resource": ("server", "class"),
    "context": ("arguments", "intent", "idempotency_key", "tool_definition_digest", "run", "requester"),
}
_OF_STARTS: Final = {"resource": ("version", "program_digest"), "context": ("input", "trigger")}
_ATTRIBUTES: Final = {
    "principal": ("id", "tenant", "roles"),
    "resource": (*_OF_CALLS["resource"], "name", "tags", "tenant", *_OF_STARTS["resource"]),
    "context": (*_OF_CALLS["context"], *_OF_STARTS["context"], "language"),
    "context.run": RUN_FIELDS,
    "context.trigger": ("type", "id"),
}
_ARGUMENTS: Final = {".": {"left": {"Var": "context"}, "attr": "arguments"}}
_NAMED: Final = tuple(
    ({".": {"left": {"Var": "context"}, "attr": attribute}}, name)
    for attribute, name in (("requester", "principal"), ("run", "context.run"), ("trigger", "context.trigger"))
)
# Attributes that can have only these values, and what they are compared with them by.
_ONLY: Final = {("resource", "class"): get_args(ToolClass), ("principal", "roles"): get_args(Role)}
_COMPARISONS: Final = ("==", "!=", "contains", "containsAny", "containsAll")
# A request may lack these; a policy that reads one without `has` cannot be evaluated for it, and so denies it.
_OPTIONAL: Final = ("intent", "idempotency_key", "tool_definition_digest", "run")


@dataclass(frozen=True, slots=True)
class Rule:
    """One policy. `name` goes on the record: its `@id`, else the id that Cedar gives it by its place."""

    place: int
    name: str
    effect: Literal["permit", "forbid"]
    statement: Statement
    body: Mapping[str, Any]

    @property
    def line(self) -> int:
        return self.statement.line

    @property
    def cedar_id(self) -> str:
        return f"policy{self.place}"

    def names_action(self, action: Action) -> bool:
        """Whether the scope names it; a policy about all actions names none."""
        return any(entity["id"] == action for entity in scope_entities(self.body["action"]))


def read_rules(policies: Mapping[str, Any], statements: list[Statement]) -> list[Rule]:
    """The rules, in the order of the file. `policies` is Cedar's JSON form of it: ids there count statements."""
    rules = []
    for place, statement in enumerate(statements):
        cedar_id = f"policy{place}"
        body = policies["staticPolicies"][cedar_id]
        stated = body.get("annotations", {}).get("id") or cedar_id
        rules.append(Rule(place, _record_name(stated), body["effect"], statement, body))
    return rules


def _record_name(stated: str) -> str:
    """As the record can hold it: printable ASCII without spaces."""
    return re.sub(r"[^!-~]", "-", stated)[:NAME_CHARS_MAX]


def find_mistakes(rules: Iterable[Rule]) -> Iterator[str]:
    """What makes a policy other than its author means, with the line of the policy."""
    lines: dict[str, int] = {}
    for rule in rules:
        if rule.name in lines:
            yield f"line {rule.line}: the id {rule.name} is taken by the policy at line {lines[rule.name]}"
        lines.setdefault(rule.name, rule.line)
        for variable, types in _SCOPE_TYPES.items():
            for entity_type in _scope_types(rule.body[variable]):
                if entity_type not in types:
                    yield f"line {rule.line}: {variable} is never a {entity_type}; there is {_listed(types)}"
            for entity in scope_entities(rule.body[variable]):
                yield from _unknown_entity(rule, entity)
        for node in nodes_of(rule.body["conditions"]):
            yield from _mistakes_of_node(rule, node)


def _mistakes_of_node(rule: Rule, node: Mapping[str, Any]) -> Iterator[str]:
    value = node.get("Value")
    if isinstance(value, dict) and isinstance(value.get("__entity"), dict):
        yield from _unknown_entity(rule, value["__entity"])
    test = node.get("is")
    if isinstance(test, dict) and isinstance(test.get("entity_type"), str) and test["entity_type"] not in _TYPES:
        yield f"line {rule.line}: there is no entity type {test['entity_type']}; there is {_listed(_TYPES)}"
    for owner, attribute in _attributes(node):
        known = _ATTRIBUTES.get(owner)
        if known is not None and attribute not in known:
            yield f"line {rule.line}: {owner} has no attribute {attribute}; there is {_listed(known)}"
        if known is None and attribute in CEDAR_KEYS:
            yield f'line {rule.line}: the argument {attribute} stands in the context as "${attribute}"'


def _unknown_entity(rule: Rule, entity: Mapping[str, str]) -> Iterator[str]:
    known: dict[str, tuple[str, ...]] = {"Action": ACTIONS, "Role": get_args(Role)}
    if entity["type"] not in _TYPES:
        yield f"line {rule.line}: there is no entity type {entity['type']}; there is {_listed(_TYPES)}"
    elif entity["type"] in known and entity["id"] not in known[entity["type"]]:
        yield (
            f'line {rule.line}: there is no {entity["type"]}::"{entity["id"]}"; there is '
            + _listed(known[entity["type"]])
        )


def find_warnings(rules: Iterable[Rule]) -> Iterator[str]:
    """What is allowed and probably not meant."""
    rules = tuple(rules)
    # Where nothing permits a start, all starts are denied anyway.
    is_started = any(rule.effect == "permit" and _looks_at(rule)[0] for rule in rules)
    for rule in rules:
        read, tested = set[str](), set[str]()
        for node in nodes_of(rule.body["conditions"]):
            yield from _impossible_values(rule, node)
            for owner, attribute in _attributes(node):
                if owner == "context":
                    (tested if "has" in node else read).add(attribute)
        if is_started:
            yield from _of_the_other(rule)
        named = [action for action in ACTIONS if rule.names_action(action)]
        if "requester" in read - tested and named != ["approve"]:
            yield (
                f"line {rule.line}: {rule.name} reads context.requester, which only approve has: "
                'calls it looks at are denied. Write action == Action::"approve".'
            )
        if _is_one_server(rule.body["resource"]):
            yield (
                f"line {rule.line}: {rule.name} says resource == Server::…, but what is called is a tool: it never "
                "matches. Write resource in Server::…"
            )
        for attribute in sorted((read - tested) & set(_OPTIONAL)):
            yield (
                f"line {rule.line}: {rule.name} reads context.{attribute}, which a request may lack: such requests "
                f"are denied. Ask `context has {attribute}` first."
            )


def _of_the_other(rule: Rule) -> Iterator[str]:
    """What the rule reads that a start, or a call, never has, though its head lets it look at both."""
    about_starts, about_calls = _looks_at(rule)
    if not (about_starts and about_calls):
        return
    read, tested = set[tuple[str, str]](), set[tuple[str, str]]()
    for node in nodes_of(rule.body["conditions"]):
        for owned in _attributes(node):
            (tested if "has" in node else read).add(owned)
        if "is" in node:
            return  # it asks of which kind the resource is
    for kind, other, has in (("starts", "calls", _OF_CALLS), ("calls", "starts", _OF_STARTS)):
        for owner, attribute in sorted(read - tested):
            if attribute in has.get(owner, ()) and attribute not in _OPTIONAL and attribute != "requester":
                yield (
                    f"line {rule.line}: {rule.name} reads {owner}.{attribute}, which only {other} have, and looks at "
                    f"{kind} too: these are denied. Name the actions in the head of the rule."
                )


def _looks_at(rule: Rule) -> tuple[bool, bool]:
    """Whether its head lets it look at starts, and at calls."""
    named = [action for action in ACTIONS if rule.names_action(action)]
    types = set(_scope_types(rule.body["resource"]))
    starts = (not named or "start" in named) and not types & {"Tool", "Server"}
    calls = (not named or bool(set(named) - {"start", "submit"})) and "Procedure" not in types
    return starts, calls


def _impossible_values(rule: Rule, node: Mapping[str, Any]) -> Iterator[str]:
    """Comparisons with a text that the attribute can never be: `resource.class == "wirte"`."""
    for operator in _COMPARISONS:
        operands = node.get(operator)
        if not isinstance(operands, dict):
            continue
        sides = operands.get("left"), operands.get("right")
        for side, other in (sides, sides[::-1]):
            for owned in _attributes(side) if isinstance(side, dict) else ():
                for text in _texts(other):
                    if text not in _ONLY.get(owned, (text,)):
                        compared = f"{rule.name} compares {'.'.join(owned)} with {text!r}"
                        yield f"line {rule.line}: {compared}, which it never is; there is {_listed(_ONLY[owned])}"


def _texts(operand: Any) -> list[str]:
    """The texts that stand there as such, alone or in a set."""
    members = operand.get("Set", [operand]) if isinstance(operand, dict) else []
    values = [member.get("Value") for member in members if isinstance(member, dict)]
    return [value for value in values if isinstance(value, str)]


def arguments_read(rules: Iterable[Rule]) -> frozenset[str] | None:
    """The names of the arguments that the rules look at; None: all of them.

    Nothing else decides: an argument that no rule names need not be put to Cedar. Whatever is not plainly
    `context.arguments.name` counts as all.
    """
    rules = tuple(rules)
    if context_read(rules) is None:
        return None
    return _attributes_read(rules, _is_arguments)


def context_read(rules: Iterable[Rule]) -> frozenset[str] | None:
    """The attributes of the context that the rules look at, likewise; None: all of them."""
    return _attributes_read(rules, lambda node: _is_variable(node, "context"))


def _attributes_read(rules: Iterable[Rule], is_owner: Callable[[Any], bool]) -> frozenset[str] | None:
    names = set[str]()
    for rule in rules:
        for node in nodes_of(rule.body["conditions"]):
            for child in _children(node):
                if is_owner(child):
                    name = attribute_of(node)
                    if name is None:
                        return None
                    names.add(name)
    return frozenset(names)


def nodes_of(conditions: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every object in the conditions, expressions among them; a stack, as they nest deeper than Python recurses."""
    waiting: list[Any] = [{"": condition["body"]} for condition in conditions]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _children(node: dict[str, Any]) -> Iterator[Any]:
    for value in node.values():
        if isinstance(value, list):
            yield from value
        else:
            yield value


def attribute_of(operands: dict[str, Any]) -> str | None:
    """The attribute, if these are the operands of `.` or `has`: {"left": …, "attr": name}, and nothing else."""
    attribute = operands.get("attr")
    return attribute if operands.keys() == {"left", "attr"} and isinstance(attribute, str) else None


def _is_variable(node: Any, name: str) -> bool:
    return isinstance(node, dict) and node.get("Var") == name


def _is_arguments(node: Any) -> bool:
    return bool(node == _ARGUMENTS)


def _attributes(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of `owner.attribute` and `owner has attribute`: both. Owners without a name of their own are ""."""
    for operator in (".", "has"):
        operands = node.get(operator)
        if isinstance(operands, dict) and (attribute := attribute_of(operands)) is not None:
            yield _owner(operands["left"]), attribute


def _owner(expression: Any) -> str:
    # No recursion: a chain of attributes is longer than Python's stack.
    if isinstance(expression, dict) and isinstance(expression.get("Var"), str):
        return str(expression["Var"])
    return next((name for known, name in _NAMED if expression == known), "")


def scope_entities(scope: Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
    """The entities that a scope names: `==`, `in`, `in [..]`, `is .. in`."""
    for part in (scope, scope.get("in")):
        if isinstance(part, dict):
            if "entity" in part:
                yield part["entity"]
            yield from part.get("entities", ())


def _is_one_server(scope: Mapping[str, Any]) -> bool:
    return scope["op"] == "==" and any(entity["type"] == "Server" for entity in scope_entities(scope))


def _scope_types(scope: Mapping[str, Any]) -> Iterator[str]:
    if "entity_type" in scope:
        yield scope["entity_type"]
    for entity in scope_entities(scope):
        if entity["type"] in _TYPES:
            yield entity["type"]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
