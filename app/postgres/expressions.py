"""PostgreSQL's own text of an expression, in one form whether it was just made or came out of a dump.

`a BETWEEN 1 AND 6 AND b` is kept as `((a >= 1) AND (a <= 6)) AND b`. Written out and read in again, as a restore does,
it is `(a >= 1) AND (a <= 6) AND b`. So a group of ANDs inside ANDs is opened, and one of ORs inside ORs; nothing else.
"""

from __future__ import annotations

import re
from typing import Final, TypeAlias

# Quoted text and names, parentheses, white space, and whatever stands between them.
_TOKEN: Final = re.compile(r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | [()] | \s+ | [^\s()'"]+""", re.VERBOSE)
_QUALIFIER: Final = re.compile(r"^([a-z_][a-z_0-9]*\.)+(?=[a-z_\"*])")
_Group: TypeAlias = "list[str | _Group]"


def settled_expression(text: str) -> str:
    return _written(_opened(_groups(_TOKEN.findall(text))))


def settled_query(text: str) -> str:
    """The same of a view's query. Which columns are qualified depends on the version: none are, here."""
    tokens = [_QUALIFIER.sub("", token) for token in _TOKEN.findall(text.rstrip(";"))]
    return _written(_opened(_groups(tokens)))


def _groups(tokens: list[str]) -> _Group:
    stack: list[_Group] = [[]]
    for token in tokens:
        if token == "(":  # noqa: S105
            stack.append([])
        elif token == ")" and len(stack) > 1:  # noqa: S105
            group = stack.pop()
            stack[-1].append(group)
        elif not token.isspace():
            stack[-1].append(token)
    while len(stack) > 1:  # not balanced, which PostgreSQL never writes
        group = stack.pop()
        stack[-1].append(group)
    return stack[0]


def _opened(group: _Group) -> _Group:
    inner = [_opened(item) if isinstance(item, list) else item for item in group]
    joined_by = _operator(inner)
    if joined_by is None:
        return inner
    opened: _Group = []
    for item in inner:
        if isinstance(item, list) and _operator(item) == joined_by:
            opened.extend(item)
        else:
            opened.append(item)
    return opened


def _operator(group: _Group) -> str | None:
    """AND or OR, if the group is nothing but operands of one item each with it between them."""
    operators = {item if isinstance(item, str) else "" for item in group[1::2]}
    if len(group) < 3 or len(group) % 2 == 0 or len(operators) > 1:
        return None
    (operator,) = operators
    return operator if operator in ("AND", "OR") else None


def _written(group: _Group) -> str:
    return " ".join(f"({_written(item)})" if isinstance(item, list) else item for item in group)
