"""Changes of a run's state: each is made, looked at by the parts around it that mind, and recorded, or undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from tga_sdk.changes import MISSING, SCALARS, Document, Edit, Edits, Fill, Part, SetMember, pointer_of
from tga_sdk.errors import ValueInvalid
from tga_sdk.plain import copied
from tga_sdk.tracked.node import Node, Where, set_key

EDITS_MAX: Final = 16
"""A list that is rearranged is recorded item by item up to here, and as a whole beyond."""

Step = Callable[[], tuple[Edit, str, Any, Any]]  # the edit, set or remove, which part, and to what


class Place:
    """Where a node stands just now. `attach`: what makes it part of the document, if so far it is a default."""

    __slots__ = ("attach", "attached_at", "parts")

    def __init__(self, node: Node) -> None:
        self.parts: list[Part] = []
        self.attach: list[tuple[Edit, int]] = []
        while (up := node._tga_up) is not None:
            key, holder, plain = node._tga_key, up._tga_plain, node._tga_plain
            if type(holder) is list:
                if not (key < len(holder) and holder[key] is plain):
                    key = next((index for index, item in enumerate(holder) if item is plain), None)
                    if key is None:
                        raise _gone(node)
                    set_key(node, key)
            elif holder.get(key) is not plain:
                if key in holder or node._tga_doc.default_of(holder, key) is not plain:
                    raise _gone(node)
                self.attach.append((SetMember(holder, key, plain), len(self.parts)))
            self.parts.append(key)
            node = up
        self.parts.reverse()


def _gone(node: Node) -> ValueInvalid:
    where = str(Where(node))
    return ValueInvalid(f"{where} was removed or replaced: read it from the state again to change it", where=where)


def change(node: Node, edit: Edit, op: str, part: Part, to: Any, key: Any) -> None:
    """One change inside this node: of the member `key`, or of an item."""
    place = Place(node)
    if place.attach:
        change_many(node, [lambda: (edit, op, part, to)], key)
        return
    edit.do()
    try:
        _verify_around(node, key)
    except BaseException:
        edit.undo()
        raise
    _record(node, place.parts, (edit,), op, part, to)


def change_many(node: Node, steps: Iterable[Step], key: Any = MISSING) -> None:
    """Several changes inside this node; all of them, or none."""
    place = Place(node)
    done: list[tuple[Edits, list[Part], str, Part, Any]] = []
    try:
        for attach, below in reversed(place.attach):  # the outermost first
            parts = place.parts[: len(place.parts) - below]
            attach.do()
            done.append(((attach,), parts[:-1], "set", parts[-1], copied(attach.after)))  # type: ignore[attr-defined]
        for step in steps:
            edit, op, part, to = step()
            edit.do()
            done.append(((edit,), place.parts, op, part, to))
        _verify_around(node, key)
    except BaseException:
        for edits, *_ in reversed(done):
            edits[0].undo()
        raise
    if any(pointer_of([*parts, part]) is None for _, parts, _, part, _ in done):
        _record_around(node, done[0][1], tuple(edit for edits, *_ in done for edit in edits))
        return
    for edits, parts, op, part, to in done:
        _record(node, parts, edits, op, part, to)


def fill(node: Node, after: Any) -> None:
    """All that this node holds is another; it stays the same one."""
    place = Place(node)
    edit = Fill(node._tga_plain, after)
    edit.do()
    try:
        _verify_around(node, MISSING)
    except BaseException:
        edit.undo()
        raise
    pointer = pointer_of(place.parts)
    if pointer is None:
        _record_around(node, place.parts, (edit,))
    else:
        node._tga_doc.record_filled(pointer, node._tga_plain, (edit,))


def _verify_around(node: Node, key: Any) -> None:
    up: Node | None = node
    while up is not None:
        shape, slot = up._tga_shape, up._tga_slot
        if slot.is_checked or shape.is_checked:
            slot.verify(up._tga_plain, Where(up))
        elif shape.kind == "record":
            fields = shape.fields
            if fields.is_checked or (key in fields.by_key and fields.by_key[key].by_record):
                slot.verify(up._tga_plain, Where(up))
        key, up = up._tga_key, up._tga_up


def _record(node: Node, parts: list[Part], edits: Edits, op: str, part: Part, to: Any) -> None:
    pointer = pointer_of([*parts, part])
    if pointer is None:
        _record_around(node, parts, edits)
    elif op == "set":
        node._tga_doc.record({"op": "set", "at": pointer, "to": to}, edits)
    else:
        node._tga_doc.record({"op": "remove", "at": pointer}, edits)


def _record_around(node: Node, parts: list[Part], edits: Edits) -> None:
    """The protocol has no pointer for the place: the nearest one around it that has one is set as a whole."""
    doc = node._tga_doc
    while (pointer := pointer_of(parts)) is None:
        parts = parts[:-1]
    holder: Any = doc.root
    for part in parts:
        holder = holder[part]
    doc.record_filled(pointer, holder, edits)


def set_part(node: Node, key: Any, to: Any) -> None:
    """Set a member, or an item that is there."""
    holder = node._tga_plain
    before = holder[key] if type(holder) is list else holder.get(key, MISSING)
    kind = type(to)
    if kind in SCALARS:
        if type(before) is kind and before == to:
            return  # nothing changes
        change(node, node._tga_doc.put(holder, key, to), "set", key, to, key)
    else:
        change(node, node._tga_doc.put(holder, key, to), "set", key, copied(to), key)


def remove_part(node: Node, key: Any) -> None:
    change(node, node._tga_doc.remove(node._tga_plain, key), "remove", key, None, key)


def is_itself(node: Node, key: Any, value: Any) -> bool:
    """Whether a part is put where it stands, as `state.items += [1]` does after it has changed the list."""
    if not isinstance(value, Node) or value._tga_doc is not node._tga_doc:
        return False
    holder = node._tga_plain
    if type(holder) is list:
        return holder[key] is value._tga_plain
    if key in holder:
        return holder[key] is value._tga_plain
    return node._tga_doc.default_of(holder, key) is value._tga_plain


def removed_at(doc: Document, holder: Any, at: Any) -> Step:
    return lambda: (doc.remove(holder, at), "remove", at, None)


def is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in SCALARS and one == other)
