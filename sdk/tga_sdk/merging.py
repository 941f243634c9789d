"""Whether the changes that branches of a gather made, each to its own copy of the state, can all be made to one.

They are made in the order of the branches. Appending to the same list, and changing different members or items, agree;
of a member that several set, or set and remove, the last branch's word counts; what several remove is gone. Refused is
what would hit another place than the branch meant:

1. One removes items of a list, and another changes or removes items of it by their place.
2. Two append to a list, and one changes by its place what it has appended; or one does, and both set the same item: it
   may have moved one from there, or there (a sorted list is set item by item).
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
    placed: set[str] = field(default_factory=set)  # lists whose items it names by place
    placed_own: set[str] = field(default_factory=set)  # lists of which it names by place what it has appended
    _left: dict[str, int] = field(default_factory=dict)  # how many items that were there it has left in a list
    _emptied: set[str] = field(default_factory=set)  # by the change before

    def add(self, change: Change) -> None:
        at = change["at"]
        if at in self.replaced and change.get("to") and at not in self.rearranged and at in self._emptied:
            self.rearranged.add(at)  # a list that stays the same one: set to [], then to its items
        self._emptied = {at} if change["op"] == "set" and change["to"] in ([], {}) else set()
        if self._follow(at, is_removal=change["op"] == "remove"):
            self.touched.add(at)

    def _follow(self, at: str, *, is_removal: bool) -> bool:
        """Note what the change does on its way from the base to its place; False inside of what the branch has made
        itself."""
        holder: Any = self.base
        around = ""
        steps = at.split("/")[1:]
        for number, step in enumerate(steps):
            if around in self.replaced:
                return False
            if isinstance(holder, list):
                if step == "-":
                    self.grown.add(around)
                    return True
                place, left = int(step), self._left.get(around, len(holder))
                self.placed.add(around)
                if place >= left:
                    self.placed_own.add(around)
                if number == len(steps) - 1 and is_removal:
                    self.shifted.add(around)
                    self._left[around] = left - (place < left)
                    return True
                if around in self.shifted:
                    return True  # which item this was is of no interest: no other branch may name any of them
                holder = holder[place] if place < left else None
            else:
                holder = holder.get(unescaped(step)) if isinstance(holder, Mapping) else None
            around += f"/{step}"
        self.replaced.add(at)
        return True

    def clash(self, other: _Footprint) -> str | None:
        """The pointer at which a change of the other one would hit another place than was meant."""
        for at in self.shifted & other.placed:
            return at
        for at in self.grown & other.placed_own:
            return at
        for at in (one.rpartition("/")[0] for one in self.replaced & other.replaced):
            if at in other.placed_own:
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
