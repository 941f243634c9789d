"""A dict of a run's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from tga_sdk.changes import MISSING, SCALARS, Document
from tga_sdk.errors import ValueInvalid
from tga_sdk.plain import copied
from tga_sdk.tracked.changing import (
    EDITS_MAX,
    Place,
    Step,
    change_many,
    fill,
    is_itself,
    is_same,
    remove_part,
    removed_at,
    set_part,
)
from tga_sdk.tracked.node import Node, Where, read_part, take_part, unproxied


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
        return read_part(self, name, self._tga_plain[name], self._tga_shape.item)

    def __setitem__(self, key: Any, value: Any) -> None:
        name = self._tga_name(key)
        if not is_itself(self, name, value):
            set_part(self, name, take_part(self, name, self._tga_shape.item, value))

    def __delitem__(self, key: Any) -> None:
        name, is_there = self._tga_has(key)
        if not is_there:
            raise KeyError(key)
        remove_part(self, name)

    def pop(self, key: Any, default: Any = MISSING) -> Any:
        name, is_there = self._tga_has(key)
        if not is_there:
            if default is MISSING:
                raise KeyError(key)
            return default
        value = unproxied(self[key])
        remove_part(self, name)
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
        if len(self._tga_plain) > EDITS_MAX and not Place(self).attach:
            fill(self, {})
        else:
            change_many(self, [removed_at(self._tga_doc, self._tga_plain, key) for key in self._tga_plain])

    def update(self, other: Any = (), /, **more: Any) -> None:
        """All of them, or, when one is refused, none."""
        taken = {
            (name := self._tga_name(key)): take_part(self, name, self._tga_shape.item, value)
            for key, value in dict(other, **more).items()
        }
        plain, doc = self._tga_plain, self._tga_doc
        steps = [
            _set_member(doc, plain, name, to)
            for name, to in taken.items()
            if not (name in plain and type(to) in SCALARS and is_same(plain[name], to))
        ]
        if steps:
            change_many(self, steps)

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


def _set_member(doc: Document, holder: dict[str, Any], name: str, to: Any) -> Step:
    return lambda: (doc.put(holder, name, to), "set", name, copied(to))
