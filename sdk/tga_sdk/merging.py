"""Whether the changes that branches of a gather made, each to its own copy of the state, can all be made to one.

They are made in the order of the branches. Appending to the same list, and changing different members or items, agree;
of a member that several set, or set and remove, the last branch's word counts; what several remove is gone. Refused is
what would hit another place than the branch meant:

1. One removes items of a list, and another changes or removes items of it by their place.
2. Two append to a list, and one changes by its place what it has appended.
3. One replaces, rearranges or removes something as a whole, and another changes what is inside, or rearranges it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from tga_sdk.changes import Change, unescaped


@dataclass(slots=True)
class _Footprint:
    """What one branch has changed of what was there: pointers, and lists by theirs."""

    base: Mapping[str, Any]
    touched: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    rearranged: set[str] = field(default_factory=set)
    shifted: set[str] = field(default_factory=set)
    grown: set[str] = field(default_factory=set)
    placed: dict[str, int] = field(default_factory=dict)  # lists whose items it names by place, and the last place
    _emptied: set[str] = field(default_factory=set)  # by the change before

    def add(self, change: Change) -> None:
        at = change["at"]
        if at in self.replaced and change.get("to") and at not in self.rearranged and at in self._emptied:
            self.rearranged.add(at)  # a list that stays the same one: set to [], then to its items
        self._emptied = {at} if change["op"] == "set" and change["to"] in ([], {}) else set()
        if any(at == one or at.startswith(f"{one}/") for one in self.replaced):
            return  # inside of what it has made itself
        self.touched.add(at)
        holder: Any = self.base
        around = ""
        steps = at.split("/")[1:]
        for number, step in enumerate(steps):
            if isinstance(holder, list):
                if step == "-":
                    self.grown.add(around)
                    return
                self.placed[around] = max(int(step), self.placed.get(around, 0))
                if number == len(steps) - 1 and change["op"] == "remove":
                    self.shifted.add(around)
                    return
                holder = holder[int(step)] if int(step) < len(holder) else None
            else:
                holder = holder.get(unescaped(step)) if isinstance(holder, Mapping) else None
            around += f"/{step}"
        self.replaced.add(at)

    def clash(self, other: _Footprint) -> str | None:
        """The pointer at which a change of the other one would hit another place than was meant."""
        for at in self.shifted & other.placed.keys():
            return at
        for at in self.grown & other.grown & other.placed.keys():
            if other.placed[at] >= len(_found(self.base, at)):
                return at
        for at in self.rearranged & other.replaced:
            return at
        for one in self.replaced:
            if any(at.startswith(f"{one}/") for at in other.touched):
                return one
        return None


def clash_of(base: Mapping[str, Any], branches: Sequence[Iterable[Change]]) -> tuple[int, int, str] | None:
    """Two branches, counted from 1, that do not agree, and where; None when all do."""
    footprints = []
    for changes in branches:
        footprint = _Footprint(base)
        for change in changes:
            footprint.add(change)
        footprints.append(footprint)
    for (first, one), (second, other) in combinations(enumerate(footprints, 1), 2):
        at = one.clash(other)
        if at is None:
            at = other.clash(one)
        if at is not None:
            return first, second, at or "/"
    return None


def _found(base: Any, at: str) -> Any:
    for step in at.split("/")[1:]:
        base = base[int(step)] if isinstance(base, list) else base[unescaped(step)]
    return base
