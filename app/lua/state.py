"""What a Lua program's own copy of its state must be told: every change that the run made to it by itself.

The parent has the truth. Changes that the program makes come from its copy and need not go back. A replay that brings
what a recorded body did, a failed body whose changes are undone, branches that are merged, a fork: these are collected
here, and sent with the answer to the operation that the program waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tga_sdk.changes import MISSING, Append, Edits, Fill, RemoveItem, RemoveMember, SetItem, SetMember
from tga_sdk.plain import copied
from tga_sdk.state import State

Change = Mapping[str, Any]


class StateCopy:
    """One state that a Lua program has a copy of: that of the run, or of one branch."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._told: list[tuple[Change, Edits | None]] = []  # with the edits of what was undone
        self._is_own = False
        state.follow(self)

    def change(self, changes: list[dict[str, Any]]) -> None:
        """The program has made these changes in its copy."""
        self._is_own = True
        try:
            self.state.change(changes)
        finally:
            self._is_own = False

    def news(self) -> list[Change]:
        """What the copy must be told, in order; nothing of it is told twice."""
        told, self._told = self._told, []
        return [change for change, _ in told]

    def made(self, change: Change, edits: Edits) -> None:
        if self._is_own:
            return
        if self._told and self._told[-1][1] is edits:
            self._told.pop()  # undone and made again: a replay puts what is recorded in the place of what was pending
        elif edits:
            self._told.append(({"op": change["op"], "at": change["at"], "to": copied(change.get("to"))}, None))

    def undone(self, change: Change, edits: Edits) -> None:
        if edits:
            self._told.append((_inverse(change, edits), edits))


def _inverse(change: Change, edits: Edits) -> Change:
    """The change that takes this one back. Later edits of a change copy what is there, and alter nothing."""
    at, edit = change["at"], edits[0]
    if isinstance(edit, SetMember):
        if edit.before is MISSING:
            return {"op": "remove", "at": at}
        return {"op": "set", "at": at, "to": copied(edit.before)}
    if isinstance(edit, SetItem | RemoveMember):
        return {"op": "set", "at": at, "to": copied(edit.before)}
    if isinstance(edit, Append):
        return {"op": "remove", "at": f"{at.rpartition('/')[0]}/{len(edit.holder)}"}
    if isinstance(edit, RemoveItem):
        return {"op": "insert", "at": at, "to": copied(edit.before)}
    if isinstance(edit, Fill):
        return {"op": "set", "at": at, "to": copied(edit.before)}
    raise TypeError(f"expected an edit of a document, found {type(edit).__name__}")
