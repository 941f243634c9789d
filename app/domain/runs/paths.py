"""Addresses of operations in a run.

An operation has a position, from 1, in its scope. The program itself is the scope `""`; an operation is a scope for
what is performed inside it; each branch of a gather is a scope of its own, so that addresses do not depend on which
branch is faster. `3.1` is the first operation inside operation 3, `3:2.1` the first of branch 2 of gather 3.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from app.core.errors import SchemaViolation
from app.core.limits import RUN_BRANCHES_MAX, RUN_PATH_CHARS_MAX, RUN_PATH_LEVELS_MAX
from app.domain.addresses import PATH_PATTERN

ROOT: Final = ""
_PATH: Final = re.compile(PATH_PATTERN)


class Place(NamedTuple):
    """Where an operation stands: its scope, and its position there."""

    scope: str
    position: int


def place_of(path: str) -> Place:
    """Scope and position of an address; SchemaViolation when it is none."""
    if len(path) > RUN_PATH_CHARS_MAX or _PATH.fullmatch(path) is None:
        raise SchemaViolation("not an address of a run", expected="positions as in 3, 3.1 or 3:2.1", found=path[:64])
    if path.count(".") >= RUN_PATH_LEVELS_MAX:
        raise SchemaViolation("operations are nested too deeply", expected=f"{RUN_PATH_LEVELS_MAX} levels", found=path)
    for branch in re.findall(r":([0-9]+)", path):
        if int(branch) > RUN_BRANCHES_MAX:
            raise SchemaViolation("a gather has too many branches", expected=f"{RUN_BRANCHES_MAX}", found=branch)
    scope, _, position = path.rpartition(".")
    return Place(scope, int(position))


def operation_of(scope: str) -> str:
    """The operation that a scope is inside of; the program's own scope is inside of none."""
    head, dot, last = scope.rpartition(".")
    return f"{head}{dot}{last.partition(':')[0]}"


def path_at(scope: str, position: int) -> str:
    return f"{scope}.{position}" if scope else str(position)


def branch_of(path: str, number: int) -> str:
    """The scope of a gather's branch."""
    return f"{path}:{number}"


def is_scope_inside(scope: str, path: str) -> bool:
    """Whether the scope is that of the operation at `path`, of one of its branches, or anywhere below them."""
    return scope.startswith(path) and (len(scope) == len(path) or scope[len(path)] in ".:")


def is_isolated(path: str) -> bool:
    """Whether the operation is in a branch: what it changes is the branch's own until the gather ends."""
    return ":" in path
