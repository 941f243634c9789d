"""A JSON document that records how it is changed: what to tell others, how to undo it, and how to do it again.

A change is recorded as the worker protocol wants it (`{op, at, to}`), and made by edits of single lists and objects.
Recorded changes that are applied are made by the same edits, so a list or an object that is the same one after a change
was made is the same one after it was applied: a program that holds on to it sees the same in a replay. A list that is
rearranged, and stays the same list, is recorded as set to [] and then to its items; one that is replaced is set once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from tga_sdk.errors import ValueInvalid
from tga_sdk.plain import copied
from tga_sdk.shapes import normal

Change = dict[str, Any]
Edits = tuple["Edit", ...]
Part = str | int
MISSING: Final[Any] = object()
POINTER_CHARS_MAX: Final = 256
DEFAULTS_MAX: Final = 4_096
SCALARS: Final = frozenset({str, int, float, bool, type(None)})


class Edit:
    """One edit of one list or object. It is made for a moment: `do` then, `undo` right after, `do` again ..."""

    __slots__ = ()

    def do(self) -> None:
        raise NotImplementedError

    def undo(self) -> None:
        raise NotImplementedError


class SetMember(Edit):
    __slots__ = ("after", "before", "holder", "key")

    def __init__(self, holder: dict[str, Any], key: str, after: Any) -> None:
        self.holder = holder
        self.key = key
        self.before = holder.get(key, MISSING)
        self.after = after

    def do(self) -> None:
        self.holder[self.key] = self.after

    def undo(self) -> None:
        if self.before is MISSING:
            del self.holder[self.key]
        else:
            self.holder[self.key] = self.before


class RemoveMember(Edit):
    __slots__ = ("before", "holder", "key", "order")

    def __init__(self, holder: dict[str, Any], key: str) -> None:
        self.holder = holder
        self.key = key
        self.before = holder[key]
        # Programs go through objects in their order, so undoing restores that, too.
        self.order = None if next(reversed(holder)) == key else list(holder)

    def do(self) -> None:
        del self.holder[self.key]

    def undo(self) -> None:
        self.holder[self.key] = self.before
        if self.order is not None:
            _fill(self.holder, {key: self.holder[key] for key in self.order})


class SetItem(Edit):
    __slots__ = ("after", "before", "holder", "index")

    def __init__(self, holder: list[Any], index: int, after: Any) -> None:
        self.holder = holder
        self.index = index
        self.before = holder[index]
        self.after = after

    def do(self) -> None:
        self.holder[self.index] = self.after

    def undo(self) -> None:
        self.holder[self.index] = self.before


class Append(Edit):
    __slots__ = ("after", "holder")

    def __init__(self, holder: list[Any], after: Any) -> None:
        self.holder = holder
        self.after = after

    def do(self) -> None:
        self.holder.append(self.after)

    def undo(self) -> None:
        self.holder.pop()


class RemoveItem(Edit):
    __slots__ = ("before", "holder", "index")

    def __init__(self, holder: list[Any], index: int) -> None:
        self.holder = holder
        self.index = index
        self.before = holder[index]

    def do(self) -> None:
        del self.holder[self.index]

    def undo(self) -> None:
        self.holder.insert(self.index, self.before)


class Fill(Edit):
    """All that a list or an object holds; it stays the same one."""

    __slots__ = ("after", "before", "holder")

    def __init__(self, holder: Any, after: Any) -> None:
        self.holder = holder
        self.before = holder.copy()
        self.after = after

    def do(self) -> None:
        _fill(self.holder, self.after)

    def undo(self) -> None:
        _fill(self.holder, self.before)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """Where the log of changes stood, and from where on they were pending."""

    position: int
    pending_from: int


class Follower(Protocol):
    """The keeper of a copy of a document in another place, as a Lua program's of its state."""

    def made(self, change: Mapping[str, Any], edits: Edits) -> None:
        """The change was just made."""

    def undone(self, change: Mapping[str, Any], edits: Edits) -> None:
        """The change was just undone; what stood before stands again."""


class Document:
    """The document, and the log of what was done to it: what is pending, and as much before as a mark may ask for."""

    __slots__ = (
        "_base",
        "_compactions",
        "_defaults",
        "_done",
        "_dropped",
        "_log",
        "_marks",
        "_merge_from",
        "_pending_from",
        "follower",
        "root",
    )

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.follower: Follower | None = None  # keeps a copy elsewhere, and is told of every change made or undone
        self._log: list[Change] = []
        self._done: list[Edits] = []  # what made each of the log
        # Positions count from the beginning, of which the first `_base` are forgotten.
        self._base = 0
        self._pending_from = 0
        self._merge_from = 0  # a change before is not merged with a later one: it was taken, or marked
        self._marks: set[Mark] = set()
        # Of what was taken and is recorded in fewer words: from where to where, and what is recorded instead.
        self._compactions: list[tuple[int, int, list[Change]]] = []
        self._dropped: list[tuple[Change, Edits]] = []  # undone just now, and perhaps about to be applied
        # Containers that a default made and that stand nowhere yet, by the object and member they are to stand in.
        self._defaults: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}

    def default(self, holder: dict[str, Any], key: str, make: Callable[[], Any]) -> Any:
        """The list or object that stands for a member that is not there; the same one each time."""
        found = self._defaults.get((id(holder), key))
        if found is None:
            found = self._defaults[id(holder), key] = (holder, make())
        return found[1]

    def default_of(self, holder: dict[str, Any], key: str) -> Any:
        found = self._defaults.get((id(holder), key))
        return MISSING if found is None else found[1]

    # Edits of a list or an object of this document, made and yet to be done.

    def put(self, holder: Any, key: Any, to: Any) -> Edit:
        """What sets a member, or an item that is there. The document owns `to` from now on."""
        if type(holder) is list:
            return SetItem(holder, key, to)
        if self._defaults and key not in holder:
            made = self.default_of(holder, key)
            if type(made) is type(to) and made == to:
                return SetMember(holder, key, made)  # a program that has read the default goes on with what stands here
        return SetMember(holder, key, to)

    def remove(self, holder: Any, key: Any) -> Edit:
        if type(holder) is list:
            return RemoveItem(holder, key)
        self._defaults.pop((id(holder), key), None)  # it has stood here, and may have changed since
        return RemoveMember(holder, key)

    # The log.

    @property
    def pending(self) -> list[Change]:
        return self._log[self._pending_from - self._base :]

    @property
    def _end(self) -> int:
        return self._base + len(self._log)

    def record(self, change: Change, edits: Edits) -> None:
        """What was just done is pending. A member or an item that is set twice in a row is set once."""
        log = self._log
        if self._dropped:
            self._dropped = []
        if self.follower is not None:
            self.follower.made(change, edits)
        if log and len(edits) == 1 and self._end > self._merge_from and _sets_the_same(self._done[-1], edits[0]):
            # The one edit does what both did; undoing it brings back what was before the first.
            self._done[-1][0].after = edits[0].after  # type: ignore[attr-defined]
            log[-1] = change
            return
        log.append(change)
        self._done.append(edits)

    def record_filled(self, at: str, holder: Any, edits: Edits) -> None:
        """The same for a list or an object whose content is another one, and that stays the same one."""
        self._dropped = []
        if at:  # the whole document always stays the same one
            self._log.append({"op": "set", "at": at, "to": type(holder)()})
            self._done.append(())
        self._log.append({"op": "set", "at": at, "to": copied(holder)})
        self._done.append(edits)
        if self.follower is not None:
            self.follower.made(self._log[-1], edits)

    def take(self, changes_max: int) -> list[Change]:
        changes = self.pending
        if len(changes) > changes_max:
            changes = self._compacted(changes_max)
            self._compactions.append((self._pending_from, self._end, changes))
        self._settle()
        return changes

    def _settle(self) -> None:
        """Nothing is pending any more."""
        self._pending_from = self._merge_from = self._end
        self._dropped = []
        self._forget()
        if len(self._defaults) > DEFAULTS_MAX:
            self._defaults = {}

    def _forget(self) -> None:
        needed = min((min(mark.position, mark.pending_from) for mark in self._marks), default=self._pending_from)
        gone = min(needed, self._pending_from) - self._base
        if gone > 0:
            del self._log[:gone], self._done[:gone]
            self._base += gone
            self._compactions = [one for one in self._compactions if one[1] > self._base]

    def mark(self) -> Mark:
        mark = Mark(self._end, self._pending_from)
        self._marks.add(mark)
        self._merge_from = self._end
        return mark

    def release(self, mark: Mark) -> None:
        self._marks.discard(mark)
        self._forget()

    def since(self, mark: Mark) -> list[Change]:
        """As the journal has them, and so as a replay finds them: what was taken together with much else is there as
        whole members, also here where it was made change by change."""
        position, changes = mark.position, []
        for first, end, recorded in self._compactions:
            if first >= position:
                changes += self._log[position - self._base : first - self._base] + recorded
                position = end
        return changes + self._log[position - self._base :]

    def has_changed_since(self, mark: Mark) -> bool:
        return self._end > mark.position

    def rollback(self, mark: Mark) -> None:
        self._undo(mark.position)
        self._pending_from = mark.pending_from

    def drop(self, floor: Mark | None) -> None:
        position = self._pending_from if floor is None else max(self._pending_from, floor.position)
        first = position - self._base
        dropped = list(zip(self._log[first:], self._done[first:], strict=True))
        self._undo(position)
        self._dropped = dropped

    def _undo(self, position: int) -> None:
        """Undo what comes after this position of the log, the last first."""
        first = position - self._base
        for place in range(len(self._done) - 1, first - 1, -1):
            edits = self._done[place]
            for edit in reversed(edits):
                edit.undo()
            if self.follower is not None:
                self.follower.undone(self._log[place], edits)
        del self._log[first:], self._done[first:]
        self._compactions = [one for one in self._compactions if one[1] <= position]
        self._merge_from = min(self._merge_from, position)
        self._dropped = []

    def _compacted(self, changes_max: int) -> list[Change]:
        """What is pending, as whole members. They are filled with copies here, too: what a program has of their
        insides is lost now as it is in a replay."""
        pending = self.pending
        names = {change["at"].partition("/")[2].partition("/")[0]: None for change in pending}
        changes: list[Change] = []
        if all(change["at"] for change in pending):
            for name in names:
                changes += self._whole_member(name)
        if 0 < len(changes) <= changes_max:
            return changes
        self._fill(self.root)
        return [{"op": "set", "at": "", "to": copied(self.root)}]

    def _fill(self, holder: Any) -> None:
        edit = Fill(holder, normal(holder, "state"))
        edit.do()
        self._done[-1] = (*self._done[-1], edit)  # undone with what it belongs to

    def _whole_member(self, name: str) -> list[Change]:
        at, member = f"/{name}", self.root.get(unescaped(name), MISSING)
        if member is MISSING:  # and perhaps was not there before: then it cannot be removed unless it is set
            return [{"op": "set", "at": at, "to": None}, {"op": "remove", "at": at}]
        if type(member) in SCALARS:
            return [{"op": "set", "at": at, "to": member}]
        self._fill(member)
        return [{"op": "set", "at": at, "to": type(member)()}, {"op": "set", "at": at, "to": copied(member)}]

    # Changes that are recorded.

    def apply(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Make recorded changes. What is pending comes after them."""
        later = self.pending
        if later:
            self.drop(None)
        dropped, self._dropped = self._dropped, []
        again = 0
        for (change, edits), recorded in zip(dropped, changes, strict=False):
            if change != recorded:
                break
            # The program has made this change itself in this attempt: it holds on to these very objects.
            for edit in edits:
                edit.do()
            self._log.append(change)
            self._done.append(edits)
            if self.follower is not None:
                self.follower.made(change, edits)
            again += 1
        self.change(changes[again:])
        self._settle()
        self.change(later)

    def change(self, changes: Sequence[Mapping[str, Any]], *, may_be_gone: bool = False) -> None:
        """Make recorded changes, and have them pending: all of them, or none and ValueInvalid. `may_be_gone`: what is
        to be removed may be gone already."""
        position, filled = self._end, MISSING
        try:
            for index, change in enumerate(changes):
                if may_be_gone and change["op"] == "remove" and self._at(change["at"]) is MISSING:
                    continue
                is_marker = filled is MISSING and index + 1 < len(changes) and _is_pair(change, changes[index + 1])
                if is_marker and type(found := self._at(change["at"])) is type(change["to"]):
                    filled = found
                    edits: Edits = ()
                elif filled is not MISSING:
                    edits = (Fill(filled, copied(change["to"])),)
                    filled = MISSING
                else:
                    edits = (self._edit(change),)
                for edit in edits:
                    edit.do()
                self._log.append(dict(change))
                self._done.append(edits)
                if self.follower is not None:
                    self.follower.made(change, edits)
        except ValueInvalid:
            self._undo(position)
            raise

    def _edit(self, change: Mapping[str, Any]) -> Edit:
        at, is_set = change["at"], change["op"] == "set"
        to = copied(change["to"]) if is_set else None
        if not at:
            if type(to) is not dict:
                raise _not_there(at)
            return Fill(self.root, to)
        around, _, last = at.rpartition("/")
        holder, last = self._at(around), unescaped(last)
        if type(holder) is dict:
            if is_set:
                return self.put(holder, last, to)
            if last in holder:
                return self.remove(holder, last)
        elif type(holder) is list and (last == "-" or last.isdigit()):
            index = len(holder) if last == "-" else int(last)
            if is_set and index == len(holder):
                return Append(holder, to)
            if index < len(holder):
                return self.put(holder, index, to) if is_set else self.remove(holder, index)
        raise _not_there(at)

    def _at(self, at: str) -> Any:
        """What stands at a pointer, or MISSING."""
        found: Any = self.root
        for step in at.split("/")[1:]:
            if type(found) is dict:
                found = found.get(unescaped(step), MISSING)
            elif type(found) is list and step.isdigit() and int(step) < len(found):
                found = found[int(step)]
            else:
                return MISSING
        return found


def pointer_of(parts: Sequence[Part]) -> str | None:
    """The JSON pointer (RFC 6901) of a place, or None when the protocol cannot write it: it is longer than 256
    characters, or a name in it has control characters."""
    pointer = "".join([f"/{part}" if type(part) is int else f"/{escaped(part)}" for part in parts])  # type: ignore[arg-type]
    if len(pointer) > POINTER_CHARS_MAX or (not pointer.isprintable() and min(pointer) < " "):
        return None
    return pointer


def escaped(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1") if "~" in part or "/" in part else part


def unescaped(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~") if "~" in step else step


def _is_pair(change: Mapping[str, Any], following: Mapping[str, Any]) -> bool:
    if change["op"] != "set" or following["op"] != "set" or change["at"] != following["at"]:
        return False
    kind = type(change["to"])
    return (kind is list or kind is dict) and not change["to"] and type(following["to"]) is kind


def _sets_the_same(done: Edits, edit: Edit) -> bool:
    if len(done) != 1:
        return False
    before = done[0]
    if type(edit) is SetMember:
        return type(before) is SetMember and before.holder is edit.holder and before.key == edit.key
    if type(edit) is SetItem:
        return type(before) is SetItem and before.holder is edit.holder and before.index == edit.index
    return False


def _fill(holder: Any, by: Any) -> None:
    if type(holder) is list:
        holder[:] = by
    else:
        holder.clear()
        holder.update(by)


def _not_there(at: str) -> ValueInvalid:
    return ValueInvalid(f"a recorded change of the state names {at or 'the whole'}, which is not there", where=at)
