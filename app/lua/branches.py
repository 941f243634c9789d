"""How many branches of one attempt are open, and what they keep in the process that performs its operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from app.lua.limits import Limits

_HOLDERS: Final = (dict, list)
_HOLDER_COUNTS: Final = 8  # a list or object costs as much to copy as so many other values


class OpenBranches:
    """What branches take in this process: each has a task, and a copy of the state. The limits of a program's Lua state
    do not see that, and all of them are made before the first one runs."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._count = 0
        self._values = 0

    @contextlib.contextmanager
    def opened(self, count: int, document: Any) -> Iterator[tuple[str, str] | None]:
        """Count these branches while they are open; or which limit they would exceed, and how to say it."""
        limits = self._limits
        if self._count + count > limits.open_branches:
            yield "THREADS", f"expected at most {limits.open_branches} branches that are open, found more"
            return
        values = count * _values_in(document, limits.branch_values // max(1, count))
        if self._values + values > limits.branch_values:
            yield (
                "MEMORY",
                f"expected at most {limits.branch_values} values in the copies of the state that branches have, found"
                " more. Keep less in the state, or start fewer branches at a time",
            )
            return
        self._count += count
        self._values += values
        try:
            yield None
        finally:
            self._count -= count
            self._values -= values


def _values_in(document: Any, enough: int) -> int:
    """How many values the document has, lists and objects with what they cost; beyond `enough` few are looked at."""
    found, rest = 0, [document]
    while rest and found <= enough:
        one = rest.pop()
        if isinstance(one, _HOLDERS):
            found += _HOLDER_COUNTS + len(one)
            rest.extend(inner for inner in (one.values() if isinstance(one, dict) else one) if type(inner) in _HOLDERS)
    return found
