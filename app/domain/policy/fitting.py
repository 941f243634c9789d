"""Whether the rules fit the tools that there are: what Cedar passes over in silence, because it can never match.

A rule on a tool that does not exist forbids nothing. Neither does one that compares a secret argument with a value:
rules see a commitment in its place. Both may be meant (one file for several gateways), so they are warnings, not
mistakes.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from app.domain.policy.encoding import named_id, plain_name, tool_uid
from app.domain.policy.rules import Rule, attribute_of, nodes_of, scope_entities
from app.domain.tools import REDACTED, Tool

_ID_CHARS_TOLD_MAX: Final = 200
_TOOLS_TOLD_MAX: Final = 3

Path = tuple[str, ...]


def find_misfits(rules: Iterable[Rule], tools: Iterable[Tool], *, undiscovered: Collection[str] = ()) -> list[str]:
    """What to tell the author of the rules, with the line and what to write instead.

    `undiscovered`: ids of servers that have told nothing, or not all, of their tools; any tool may be theirs.
    Only the head of a rule narrows the tools that it is about: one that narrows them in its condition may be told of
    secret arguments that it never reads.
    """
    known = list(tools)
    names = _Names(known, undiscovered)
    secret = [(tool, [_steps(pointer) for pointer in tool.secret_arguments]) for tool in known]
    secret = [(tool, paths) for tool, paths in secret if paths]
    told: dict[str, None] = {}
    for rule in rules:
        told |= dict.fromkeys(
            f"line {rule.line}: {rule.name} {misfit}"
            for misfit in (*names.find_unknown(rule), *_find_secrets_read(rule, secret))
        )
    return list(told)


class _Names:
    def __init__(self, tools: list[Tool], undiscovered: Collection[str]) -> None:
        self._undiscovered = undiscovered
        self._servers = {tool.server_id for tool in tools} | set(undiscovered)
        self._tools = {tool_uid(tool)["id"] for tool in tools}
        # As everything but Cedar writes them: other/bank/charge.
        self._natural = {f"{tool.server_id}/{tool.tool_name}": tool_uid(tool)["id"] for tool in tools}

    def find_unknown(self, rule: Rule) -> Iterator[str]:
        for entity in _entities(rule):
            kind, found = entity["type"], entity["id"]
            if kind == "Tool" and not self._is_tool(found):
                instead = self._instead_of_tool(found)
                yield f"names {_told('Tool', found)}, which no tool is: it never matches. {instead}"
            elif kind == "Server" and found not in self._servers:
                instead = _perhaps("Server", found, self._servers)
                plain = found.replace("%2F", "/").replace("%25", "%")
                if plain in self._servers:
                    instead = f"Write {_told('Server', plain)}."
                yield f"names {_told('Server', found)}, which no server with tools is: it never matches. {instead}"

    def _is_tool(self, found: str) -> bool:
        if found in self._tools:
            return True
        # Before what a server may still have: this is surely what was meant.
        return found not in self._natural and any(
            found.startswith(named_id(server, "")) for server in self._undiscovered
        )

    def _instead_of_tool(self, found: str) -> str:
        if found in self._natural:
            return f"Write {_told('Tool', self._natural[found])}."
        for server in self._undiscovered:
            if "/" in server and found.startswith(f"{server}/"):
                return f"Write {_told('Tool', named_id(server, found[len(server) + 1 :]))}."
        return _perhaps("Tool", found, self._tools)


def _entities(rule: Rule) -> Iterator[Mapping[str, str]]:
    yield from scope_entities(rule.body["resource"])
    for node in nodes_of(rule.body["conditions"]):
        value = node.get("Value")
        if isinstance(value, dict) and isinstance(value.get("__entity"), dict):
            yield value["__entity"]


def _find_secrets_read(rule: Rule, secret: list[tuple[Tool, list[Path]]]) -> Iterator[str]:
    about = [(tool, paths) for tool, paths in secret if _can_match(rule.body["resource"], tool)]
    if not about:
        return
    for path, is_asked_for in dict.fromkeys(_paths_read(rule)):
        among = [tool for tool, paths in about if any(_meets(path, is_asked_for, one) for one in paths)]
        if among:
            yield (
                f"reads {_told_path(path)}, where {_listed(among)} has a secret argument: rules see a commitment in "
                "its place, never the value, so that == with a value is never true. Ask only whether it is there "
                "(`has`), or take it out of the tool's secret_arguments."
            )


def _steps(pointer: str) -> Path:
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:])


def _can_match(scope: Mapping[str, Any], tool: Tool) -> bool:
    """Whether the head of a rule can be about the tool: it names none, or it, or its server."""
    its = (tool_uid(tool), {"type": "Server", "id": tool.server_id})
    named = list(scope_entities(scope))
    return not named or any(entity in its for entity in named)


def _paths_read(rule: Rule) -> Iterator[tuple[Path, bool]]:
    """Every place of the arguments that the conditions look at, and whether only for its being there (`has`).

    The longest paths only: who reads arguments.a.b has not looked at arguments.a. Whatever takes the whole context
    takes all arguments.
    """
    waiting: list[Any] = [condition["body"] for condition in rule.body["conditions"]]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting.extend(node)
        elif isinstance(node, dict):
            path = _path_in_context(node)
            if path is None:
                waiting.extend(node.values())
            elif path[:1] in ((), ("arguments",)):
                yield tuple(map(plain_name, path[1:])), "has" in node


def _path_in_context(expression: dict[str, Any]) -> Path | None:
    """("arguments", "card") of `context.arguments.card`, and of `context.arguments has card`; None: something else."""
    path: list[str] = []
    operators: tuple[str, ...] = (".", "has")
    node: Any = expression
    while isinstance(node, dict):
        if node.get("Var") == "context":
            return tuple(reversed(path))
        operands = next((node[operator] for operator in operators if operator in node), None)
        attribute = attribute_of(operands) if isinstance(operands, dict) else None
        if not isinstance(operands, dict) or attribute is None:
            return None
        path.append(attribute)
        node, operators = operands["left"], (".",)
    return None


def _meets(read: Path, is_asked_for: bool, secret: Path) -> bool:
    """Whether what is read is the secret, within it, or around it."""
    if read[: len(secret)] == secret and len(read) > len(secret):
        return read[len(secret)] != REDACTED  # who reads the commitment itself knows of it
    return secret[: len(read)] == read and not is_asked_for


def _told_path(path: Path) -> str:
    return "context.arguments" + "".join(f".{name}" if name.isidentifier() else f"[{_quoted(name)}]" for name in path)


def _listed(tools: list[Tool]) -> str:
    more = len(tools) - _TOOLS_TOLD_MAX
    named = ", ".join(_told("Tool", tool_uid(tool)["id"]) for tool in tools[:_TOOLS_TOLD_MAX])
    return named + (f" and {more} more" if more > 0 else "")


def _perhaps(kind: str, found: str, known: Collection[str]) -> str:
    for close in difflib.get_close_matches(found[:_ID_CHARS_TOLD_MAX], sorted(known), n=1):
        return f"Perhaps you mean {_told(kind, close)}."
    return "`tga servers` lists what there is, and `tga policy explain` writes its id as rules must."


def _told(kind: str, entity_id: str) -> str:
    return f"{kind}::{_quoted(entity_id)}"


def _quoted(text: str) -> str:
    return json.dumps(text[:_ID_CHARS_TOLD_MAX])
