"""A list of a run's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any, SupportsIndex

from tga_sdk.changes import MISSING, SCALARS, Append, Document
from tga_sdk.plain import copied
from tga_sdk.tracked.changing import (
    EDITS_MAX,
    Place,
    Step,
    change,
    change_many,
    fill,
    is_itself,
    is_same,
    remove_part,
    removed_at,
    set_part,
)
from tga_sdk.tracked.node import Node, read_part, take_part, unproxied


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
        return read_part(self, self._tga_index(index), found, self._tga_shape.item)

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
        if not is_itself(self, at, value):
            set_part(self, at, take_part(self, at, self._tga_shape.item, value))

    def __delitem__(self, index: Any) -> None:
        if isinstance(index, slice):
            after = list(self._tga_plain)
            del after[index]
            self._tga_rearrange(after)
        else:
            remove_part(self, self._tga_index(index, "assignment "))

    def append(self, value: Any) -> None:
        plain = self._tga_plain
        to = take_part(self, len(plain), self._tga_shape.item, value)
        change(self, Append(plain, to), "set", "-", to if type(to) in SCALARS else copied(to), MISSING)

    def extend(self, values: Iterable[Any]) -> None:
        self._tga_append(self._tga_taken(values, len(self._tga_plain)))

    def insert(self, index: SupportsIndex, value: Any) -> None:
        plain = self._tga_plain
        at = index.__index__()
        at = max(at + len(plain), 0) if at < 0 else min(at, len(plain))
        if at == len(plain):
            self.append(value)
            return
        self._tga_rearrange([*plain[:at], take_part(self, at, self._tga_shape.item, value), *plain[at:]])

    def pop(self, index: SupportsIndex = -1) -> Any:
        if not self._tga_plain:
            raise IndexError("pop from empty list")
        at = self._tga_index(index, "pop ")
        value = unproxied(self[at])
        remove_part(self, at)
        return value

    def remove(self, value: Any) -> None:
        for index, item in enumerate(self):
            if item is value or item == value:
                remove_part(self, index)
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
        return [take_part(self, first + index, shape, value) for index, value in enumerate(list(values))]

    def _tga_append(self, items: list[Any]) -> None:
        if items:
            plain = self._tga_plain
            change_many(self, [_appended(plain, item) for item in items])

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
        if changes > EDITS_MAX and not Place(self).attach:
            # In a replay these are copies, so they are here, too.
            fill(self, copied(after))
            return
        until = len(after) if shifted else first + new
        steps: list[Step] = [_set_at(doc, before, at, after[at]) for at in range(first, min(until, len(before)))]
        steps += [_appended(before, copied(after[at])) for at in range(len(before), until)]
        gone_from, gone_until = (len(after), len(before)) if shifted else (first + new, first + old)
        steps += [removed_at(doc, before, at) for at in range(gone_until - 1, gone_from - 1, -1)]
        change_many(self, steps)


def _appended(holder: list[Any], item: Any) -> Step:
    return lambda: (Append(holder, item), "set", "-", copied(item))


def _set_at(doc: Document, holder: list[Any], at: int, item: Any) -> Step:
    return lambda: (doc.put(holder, at, copied(item)), "set", at, copied(item))


def _same_at_the_start(before: list[Any], after: list[Any]) -> int:
    same = 0
    for one, other in zip(before, after, strict=False):
        if not is_same(one, other):
            break
        same += 1
    return same


def _same_at_the_end(before: list[Any], after: list[Any], first: int) -> int:
    same = 0
    while same < min(len(before), len(after)) - first and is_same(before[-1 - same], after[-1 - same]):
        same += 1
    return same
