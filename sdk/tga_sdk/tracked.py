"""Proxies of a run's state: they read and change its document, check what is put in, and record each change."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, Final, SupportsIndex

from pydantic import BaseModel, ValidationError

from tga_sdk.changes import (
    MISSING,
    SCALARS,
    Append,
    Document,
    Edit,
    Edits,
    Fill,
    Part,
    SetMember,
    pointer_of,
)
from tga_sdk.errors import ValueInvalid
from tga_sdk.shapes import ANY, Field, Shape
from tga_sdk.values import copied, invalid

EDITS_MAX: Final = 16
"""A list that is rearranged is recorded item by item up to here, and as a whole beyond."""

_Step = Callable[[], tuple[Edit, str, Any, Any]]  # the edit, set or remove, which part, and to what


class NotSetYet(ValueInvalid, AttributeError):
    """A required field of the state is read before it was set."""


class Node:
    """A part of the state that has parts inside: an object or a list of the document, and what its type says."""

    __slots__ = ("_tga_doc", "_tga_key", "_tga_plain", "_tga_shape", "_tga_slot", "_tga_up")

    _tga_doc: Document
    _tga_plain: Any  # the object or list of the document itself
    _tga_shape: Shape
    _tga_slot: Shape  # as declared: before a union is told
    _tga_up: Node | None
    _tga_key: Any  # in the part around; an index is where it was last seen

    def __init__(self, doc: Document, plain: Any, shape: Shape, slot: Shape, up: Node | None, key: Any) -> None:
        _set_doc(self, doc)
        _set_plain(self, plain)
        _set_shape(self, shape)
        _set_slot(self, slot)
        _set_up(self, up)
        _set_key(self, key)

    def _tga_value(self) -> Any:
        """What stands here as a value of its own: a model, a list, a dict."""
        return self._tga_shape.codec.load(self._tga_plain, Where(self))

    def _tga_equals(self, other: Any) -> bool:
        if isinstance(other, Node):
            return bool(self._tga_plain == other._tga_plain)
        if self._tga_shape.codec.is_json:
            return bool(self._tga_plain == other)
        return bool(self._tga_value() == other)

    def __eq__(self, other: object) -> bool:
        return self._tga_equals(other)

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Any:
        return self._tga_value()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._tga_value()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise TypeError("a part of a run's state is not pickled: take a value of it with copy() or model_copy()")


# Records refuse attributes that are no fields, so these are set past them.
_set_doc, _set_plain, _set_shape, _set_slot, _set_up, _set_key = (
    vars(Node)[name].__set__ for name in ("_tga_doc", "_tga_plain", "_tga_shape", "_tga_slot", "_tga_up", "_tga_key")
)


class Where:
    """The name of a place, made when somebody wants to read it."""

    __slots__ = ("key", "node")

    def __init__(self, node: Node, key: Any = MISSING) -> None:
        self.node = node
        self.key = key

    def __str__(self) -> str:
        names = [] if self.key is MISSING else [_name_of(self.node, self.key)]
        node = self.node
        while node._tga_up is not None:
            names.append(_name_of(node._tga_up, node._tga_key))
            node = node._tga_up
        return "state" + "".join(reversed(names))


def _name_of(node: Node, key: Any) -> str:
    if type(node._tga_plain) is list:
        return f"[{key}]"
    field = node._tga_shape.fields.by_key.get(key)
    if field is not None:
        return f".{field.name}"
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def root_of(doc: Document, shape: Shape) -> Node:
    """What the program sees as the whole state."""
    return _node(doc, doc.root, shape, None, "")


def _node(doc: Document, plain: Any, slot: Shape, up: Node | None, key: Any) -> Node:
    shape = slot
    if slot.kind == "union":
        shape = slot.told(plain, "state" if up is None else Where(up, key))
    if type(plain) is list:
        return ListProxy(doc, plain, shape if shape.kind == "list" else ANY, slot, up, key)
    if shape.kind == "record":
        made: Node = (shape.proxy or _proxy_of(shape))(doc, plain, shape, slot, up, key)
        return made
    return DictProxy(doc, plain, shape if shape.kind == "dict" else ANY, slot, up, key)


def _read(node: Node, key: Any, plain: Any, shape: Shape) -> Any:
    """What the program gets of a member or an item."""
    kind = type(plain)
    if kind is shape.exact:
        return plain
    if (kind is dict or kind is list) and shape.kind != "leaf":
        return _node(node._tga_doc, plain, shape, node, key)
    if shape is ANY:
        return plain
    value = shape.codec.load(plain, Where(node, key))
    return frozenset(value) if type(value) is set else value  # adding to it would not be recorded


def _take(node: Node, key: Any, shape: Shape, value: Any) -> Any:
    """JSON data of a value that is to stand there."""
    return shape.take(value if type(value) in SCALARS else unproxied(value), Where(node, key))


def unproxied(value: Any) -> Any:
    """The value without proxies in it: `sorted(ctx.state.items)` is a list of them."""
    if isinstance(value, Node):
        return value._tga_value()
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(unproxied(item) for item in value)
    if kind is dict:
        return {key: unproxied(member) for key, member in value.items()}
    return value


# Changes. Each is made, looked at by the places around it that mind, and recorded, or undone.


class _Place:
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
                    _set_key(node, key)
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


def _change(node: Node, edit: Edit, op: str, part: Part, to: Any, key: Any) -> None:
    """One change inside this node: of the member `key`, or of an item."""
    place = _Place(node)
    if place.attach:
        _change_many(node, [lambda: (edit, op, part, to)], key)
        return
    edit.do()
    try:
        _verify_around(node, key)
    except BaseException:
        edit.undo()
        raise
    _record(node, place.parts, (edit,), op, part, to)


def _change_many(node: Node, steps: Iterable[_Step], key: Any = MISSING) -> None:
    """Several changes inside this node; all of them, or none."""
    place = _Place(node)
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


def _fill(node: Node, after: Any) -> None:
    """All that this node holds is another; it stays the same one."""
    place = _Place(node)
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


def _set(node: Node, key: Any, to: Any) -> None:
    """Set a member, or an item that is there."""
    holder = node._tga_plain
    before = holder[key] if type(holder) is list else holder.get(key, MISSING)
    kind = type(to)
    if kind in SCALARS:
        if type(before) is kind and before == to:
            return  # nothing changes
        _change(node, node._tga_doc.put(holder, key, to), "set", key, to, key)
    else:
        _change(node, node._tga_doc.put(holder, key, to), "set", key, copied(to), key)


def _remove(node: Node, key: Any) -> None:
    _change(node, node._tga_doc.remove(node._tga_plain, key), "remove", key, None, key)


def _is_itself(node: Node, key: Any, value: Any) -> bool:
    """Whether a part is put where it stands, as `state.items += [1]` does after it has changed the list."""
    if not isinstance(value, Node) or value._tga_doc is not node._tga_doc:
        return False
    holder = node._tga_plain
    if type(holder) is list:
        return holder[key] is value._tga_plain
    if key in holder:
        return holder[key] is value._tga_plain
    return node._tga_doc.default_of(holder, key) is value._tga_plain


class ListProxy(Node, MutableSequence[Any]):
    """A list of the state."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._tga_plain)

    def __getitem__(self, index: Any) -> Any:
        plain = self._tga_plain
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(plain)))]
        found = plain[index]
        if type(found) is self._tga_shape.item.exact:
            return found
        return _read(self, self._tga_index(index), found, self._tga_shape.item)

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while index < len(self._tga_plain):
            yield self[index]
            index += 1

    def __reversed__(self) -> Iterator[Any]:
        for index in range(len(self._tga_plain) - 1, -1, -1):
            yield self[index]

    def __contains__(self, value: object) -> bool:
        return any(item is value or item == value for item in self)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            places = range(*index.indices(len(self._tga_plain)))
            taken = self._tga_taken(value, places.start)
            after = list(self._tga_plain)
            after[index] = taken
            self._tga_rearrange(after)
            return
        at = self._tga_index(index, "assignment ")
        if not _is_itself(self, at, value):
            _set(self, at, _take(self, at, self._tga_shape.item, value))

    def __delitem__(self, index: Any) -> None:
        if isinstance(index, slice):
            after = list(self._tga_plain)
            del after[index]
            self._tga_rearrange(after)
        else:
            _remove(self, self._tga_index(index, "assignment "))

    def append(self, value: Any) -> None:
        plain = self._tga_plain
        to = _take(self, len(plain), self._tga_shape.item, value)
        _change(self, Append(plain, to), "set", "-", to if type(to) in SCALARS else copied(to), MISSING)

    def extend(self, values: Iterable[Any]) -> None:
        self._tga_append(self._tga_taken(values, len(self._tga_plain)))

    def insert(self, index: SupportsIndex, value: Any) -> None:
        plain = self._tga_plain
        at = index.__index__()
        at = max(at + len(plain), 0) if at < 0 else min(at, len(plain))
        if at == len(plain):
            self.append(value)
            return
        self._tga_rearrange([*plain[:at], _take(self, at, self._tga_shape.item, value), *plain[at:]])

    def pop(self, index: SupportsIndex = -1) -> Any:
        if not self._tga_plain:
            raise IndexError("pop from empty list")
        at = self._tga_index(index, "pop ")
        value = unproxied(self[at])
        _remove(self, at)
        return value

    def remove(self, value: Any) -> None:
        for index, item in enumerate(self):
            if item is value or item == value:
                _remove(self, index)
                return
        raise ValueError("list.remove(x): x not in list")

    def clear(self) -> None:
        self._tga_rearrange([])

    def reverse(self) -> None:
        self._tga_rearrange(self._tga_plain[::-1])

    def sort(self, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> None:
        items = list(self)
        order = sorted(range(len(items)), key=lambda at: items[at] if key is None else key(items[at]), reverse=reverse)
        self._tga_rearrange([self._tga_plain[at] for at in order])

    def copy(self) -> list[Any]:
        """A list of its own; changing it changes nothing in the state."""
        value = self._tga_value()
        return value if isinstance(value, list) else list(value)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        for at in range(*slice(start, stop).indices(len(self._tga_plain))):
            item = self[at]
            if item is value or item == value:
                return at
        raise ValueError(f"{value!r} is not in list")

    def count(self, value: Any) -> int:
        return sum(1 for item in self if item is value or item == value)

    def __iadd__(self, values: Iterable[Any]) -> ListProxy:
        self.extend(values)
        return self

    def __imul__(self, times: int) -> ListProxy:
        if times < 1:
            self.clear()
        else:
            items = self._tga_plain
            self._tga_append([copied(item) for _ in range(times - 1) for item in items])
        return self

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self.copy(), *unproxied(list(other))]

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*unproxied(list(other)), *self.copy()]

    def __mul__(self, times: int) -> list[Any]:
        return self.copy() * times

    __rmul__ = __mul__

    def __lt__(self, other: Any) -> bool:
        return bool(self.copy() < unproxied(other))

    def __le__(self, other: Any) -> bool:
        return bool(self.copy() <= unproxied(other))

    def __gt__(self, other: Any) -> bool:
        return bool(self.copy() > unproxied(other))

    def __ge__(self, other: Any) -> bool:
        return bool(self.copy() >= unproxied(other))

    def __repr__(self) -> str:
        return repr(list(self))

    def _tga_index(self, index: Any, what: str = "") -> int:
        at = index.__index__()
        length = len(self._tga_plain)
        if at < 0:
            at += length
        if not 0 <= at < length:
            raise IndexError(f"list {what}index out of range")
        return int(at)

    def _tga_taken(self, values: Iterable[Any], first: int) -> list[Any]:
        shape = self._tga_shape.item
        return [_take(self, first + index, shape, value) for index, value in enumerate(list(values))]

    def _tga_append(self, items: list[Any]) -> None:
        if items:
            plain = self._tga_plain
            _change_many(self, [_appended(plain, item) for item in items])

    def _tga_rearrange(self, after: list[Any]) -> None:
        """Other items, some of which may be items that stand here now."""
        before, doc = self._tga_plain, self._tga_doc
        first = _same_at_the_start(before, after)
        last = _same_at_the_end(before, after, first)
        old, new = len(before) - first - last, len(after) - first - last
        if not old and not new:
            return
        shifted = old != new and new and last
        changes = len(after) - first + max(old - new, 0) if shifted else max(old, new)
        if changes > EDITS_MAX and not _Place(self).attach:
            # In a replay these are copies, so they are here, too.
            _fill(self, copied(after))
            return
        until = len(after) if shifted else first + new
        steps: list[_Step] = [_set_at(doc, before, at, after[at]) for at in range(first, min(until, len(before)))]
        steps += [_appended(before, copied(after[at])) for at in range(len(before), until)]
        gone_from, gone_until = (len(after), len(before)) if shifted else (first + new, first + old)
        steps += [_removed_at(doc, before, at) for at in range(gone_until - 1, gone_from - 1, -1)]
        _change_many(self, steps)


def _appended(holder: list[Any], item: Any) -> _Step:
    return lambda: (Append(holder, item), "set", "-", copied(item))


def _set_at(doc: Document, holder: list[Any], at: int, item: Any) -> _Step:
    return lambda: (doc.put(holder, at, copied(item)), "set", at, copied(item))


def _removed_at(doc: Document, holder: Any, at: Any) -> _Step:
    return lambda: (doc.remove(holder, at), "remove", at, None)


def _same_at_the_start(before: list[Any], after: list[Any]) -> int:
    same = 0
    for one, other in zip(before, after, strict=False):
        if not _is_same(one, other):
            break
        same += 1
    return same


def _same_at_the_end(before: list[Any], after: list[Any], first: int) -> int:
    same = 0
    while same < min(len(before), len(after)) - first and _is_same(before[-1 - same], after[-1 - same]):
        same += 1
    return same


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in SCALARS and one == other)


class DictProxy(Node, MutableMapping[Any, Any]):
    """A dict of the state."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._tga_plain)

    def __iter__(self) -> Iterator[Any]:
        codec = self._tga_shape.key
        if codec is None:
            yield from self._tga_plain
            return
        for key in self._tga_plain:
            yield codec.load(key, Where(self, key))

    def __reversed__(self) -> Iterator[Any]:
        yield from list(self)[::-1]

    def __contains__(self, key: object) -> bool:
        return self._tga_has(key)[1]

    def __getitem__(self, key: Any) -> Any:
        name, is_there = self._tga_has(key)
        if not is_there:
            raise KeyError(key)
        return _read(self, name, self._tga_plain[name], self._tga_shape.item)

    def __setitem__(self, key: Any, value: Any) -> None:
        name = self._tga_name(key)
        if not _is_itself(self, name, value):
            _set(self, name, _take(self, name, self._tga_shape.item, value))

    def __delitem__(self, key: Any) -> None:
        name, is_there = self._tga_has(key)
        if not is_there:
            raise KeyError(key)
        _remove(self, name)

    def pop(self, key: Any, default: Any = MISSING) -> Any:
        name, is_there = self._tga_has(key)
        if not is_there:
            if default is MISSING:
                raise KeyError(key)
            return default
        value = unproxied(self[key])
        _remove(self, name)
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def popitem(self) -> tuple[Any, Any]:
        if not self._tga_plain:
            raise KeyError("popitem(): dictionary is empty")
        key = next(reversed(list(self)))
        return key, self.pop(key)

    def clear(self) -> None:
        if len(self._tga_plain) > EDITS_MAX and not _Place(self).attach:
            _fill(self, {})
        else:
            _change_many(self, [_removed_at(self._tga_doc, self._tga_plain, key) for key in self._tga_plain])

    def update(self, other: Any = (), /, **more: Any) -> None:
        """All of them, or, when one is refused, none."""
        taken = {
            (name := self._tga_name(key)): _take(self, name, self._tga_shape.item, value)
            for key, value in dict(other, **more).items()
        }
        plain, doc = self._tga_plain, self._tga_doc
        steps = [
            _set_member(doc, plain, name, to)
            for name, to in taken.items()
            if not (name in plain and type(to) in SCALARS and _is_same(plain[name], to))
        ]
        if steps:
            _change_many(self, steps)

    def copy(self) -> dict[Any, Any]:
        """A dict of its own; changing it changes nothing in the state."""
        value = self._tga_value()
        return value if isinstance(value, dict) else dict(value)

    def __or__(self, other: Mapping[Any, Any]) -> dict[Any, Any]:
        return {**self.copy(), **unproxied(dict(other))}

    def __ror__(self, other: Mapping[Any, Any]) -> dict[Any, Any]:
        return {**unproxied(dict(other)), **self.copy()}

    def __ior__(self, other: Any) -> DictProxy:  # type: ignore[misc]
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))

    def _tga_has(self, key: Any) -> tuple[str, bool]:
        if self._tga_shape.key is None:
            return key, key in self._tga_plain
        try:
            name = self._tga_name(key)
        except ValueInvalid:
            return "", False
        return name, name in self._tga_plain

    def _tga_name(self, key: Any) -> str:
        """The name of a key in the document."""
        codec = self._tga_shape.key
        if codec is None:
            if type(key) is str and key.isascii() and "\x00" not in key:
                return key
            name = key
        else:
            name = codec.dump(key, Where(self))
            name = name if isinstance(name, str) else str(name)
        if not isinstance(name, str) or "\x00" in name or any("\ud800" <= char <= "\udfff" for char in name):
            where = str(Where(self))
            raise ValueInvalid(f"{where} has no room for the key {key!r}: a key is text", where=where)
        return str.__str__(name)


def _set_member(doc: Document, holder: dict[str, Any], name: str, to: Any) -> _Step:
    return lambda: (doc.put(holder, name, to), "set", name, copied(to))


class RecordProxy(Node):
    """A model or a dataclass of the state. Each has a class of its own below, with its fields and methods."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        # Fields are properties of the classes below, which this does not hide: it sees every assignment first.
        field = self._tga_shape.fields.by_name.get(name)
        if field is not None:
            _set_field(self, field, value)
        elif isinstance(own := getattr(type(self), name, None), property) and own.fset is not None:
            own.fset(self, value)
        elif self._tga_has_extra() and not name.startswith("_"):
            if not _is_itself(self, name, value):
                _set(self, name, _take(self, name, ANY, value))
        else:
            raise _no_field(self, name)

    def __delattr__(self, name: str) -> None:
        field = self._tga_shape.fields.by_name.get(name)
        key = name if field is None else field.key
        if key not in self._tga_plain:
            raise AttributeError(name)
        if field is not None and (field.is_required or field.is_frozen):
            where = str(Where(self, key))
            raise ValueInvalid(f"{where} is required, or frozen, and cannot be deleted", where=where)
        _remove(self, key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        shape = self._tga_shape
        field = shape.fields.by_name.get(name)
        if field is not None:
            where = str(Where(self, field.key))
            raise NotSetYet(f"{where} is required and was not set yet", where=where)
        if name in self._tga_plain and self._tga_has_extra():
            return _read(self, name, self._tga_plain[name], ANY)
        if not hasattr(shape.bare, name):
            raise AttributeError(f"{shape.bare.__name__!r} object has no attribute {name!r}")
        return getattr(self._tga_value(), name)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        fields = self._tga_shape.fields
        for name, field in fields.by_name.items():
            if field.key in self._tga_plain or not field.is_required:
                yield name, getattr(self, name)
        if self._tga_has_extra():
            for key in self._tga_plain:
                if key not in fields.by_key:
                    yield key, getattr(self, key)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in RecordProxy.__iter__(self))
        return f"{self._tga_shape.bare.__name__}({shown})"

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._tga_shape.bare), *self._tga_shape.fields.by_name})

    def _tga_has_extra(self) -> bool:
        config = getattr(self._tga_shape.bare, "model_config", None)
        return config is not None and config.get("extra") == "allow"

    def _tga_value(self) -> Any:
        """An instance; of what is not complete yet, one with what is there."""
        shape = self._tga_shape
        try:
            return shape.codec.load(self._tga_plain, Where(self))
        except ValueInvalid:
            missing = [
                field
                for field in shape.fields.by_name.values()
                if field.is_required and field.key not in self._tga_plain
            ]
            if not missing or not issubclass(shape.bare, BaseModel):
                raise
            return shape.bare.model_construct(**{name: unproxied(value) for name, value in RecordProxy.__iter__(self)})


def _get_field(node: Node, field: Field) -> Any:
    plain = node._tga_plain.get(field.key, MISSING)
    if plain is MISSING:
        return _default_of(node, field)
    if field.is_written_by_record:
        return getattr(node._tga_value(), field.name)
    return _read(node, field.key, plain, field.shape)


def _default_of(node: Node, field: Field) -> Any:
    if field.is_required:
        raise AttributeError(field.name)  # __getattr__ says it better
    value = field.default()
    if type(value) in SCALARS or field.shape.kind == "leaf":
        return frozenset(value) if type(value) is set else value
    shape, key = field.shape, field.key
    plain = node._tga_doc.default(node._tga_plain, key, lambda: shape.take(value, Where(node, key)))
    return _read(node, key, plain, shape)


def _set_field(node: Node, field: Field, value: Any) -> None:
    key = field.key
    if _is_itself(node, key, value):
        return
    if field.is_frozen:
        where = str(Where(node, key))
        raise ValueInvalid(f"{where} is frozen, and cannot be set", where=where)
    _set(node, key, _taken_by_record(node, field, value) if field.by_record else _take(node, key, field.shape, value))


def _taken_by_record(node: Node, field: Field, value: Any) -> Any:
    """What a field becomes whose record has validators or serializers for it."""
    model = node._tga_shape.bare
    there = {name: unproxied(one) for name, one in RecordProxy.__iter__(node) if name != field.name}  # type: ignore[arg-type]
    instance = model.model_construct(**there)
    try:
        model.__pydantic_validator__.validate_assignment(instance, field.name, unproxied(value))
    except ValidationError as error:
        raise invalid(error, Where(node)) from None
    except AttributeError:  # a validator of the whole model asks for what is not there yet
        return _take(node, field.key, field.shape, value)
    dumped = instance.model_dump(mode="json", by_alias=True, include={field.name}, warnings=False)
    return ANY.take(dumped[field.key], Where(node, field.key))


def _no_field(node: Node, name: str) -> ValueInvalid:
    shape = node._tga_shape
    known = ", ".join(shape.fields.by_name) or "none"
    where = f"{Where(node)}.{name}"
    return ValueInvalid(f"{where}: {shape.bare.__name__} has no such field; it has {known}", where=where)


def _proxy_of(shape: Shape) -> Any:
    """The class of proxies for a record: its fields, and the methods and properties that its author wrote."""
    members: dict[str, Any] = {"__slots__": ()}
    for base in reversed(shape.bare.__mro__):
        if base is object or base is BaseModel or base.__module__.startswith("pydantic."):
            continue
        for name, own in vars(base).items():
            if isinstance(own, functools.cached_property):
                members[name] = property(own.func)
            elif isinstance(own, types.FunctionType | property) and (
                not name.startswith("__") or _is_told(name, shape)
            ):
                members[name] = own
    for name, field in shape.fields.by_name.items():
        members[name] = property(functools.partial(_get_field, field=field))
    shape.proxy = type(shape.bare.__name__, (RecordProxy,), members)
    return shape.proxy


_OWN: Final = frozenset(
    {"__init__", "__new__", "__eq__", "__hash__", "__repr__", "__setattr__", "__getattr__", "__delattr__"}
)


def _is_told(name: str, shape: Shape) -> bool:
    """Whether a special method that the author of a record wrote is one of its proxies, too, like __len__."""
    return not (
        name in _OWN
        or name.startswith(("__pydantic", "__get_pydantic", "__dataclass", "__init", "__reduce", "__replace"))
        or (dataclasses.is_dataclass(shape.bare) and name in ("__lt__", "__le__", "__gt__", "__ge__"))
    )
