"""What the proxies of a run's state have in common: where each stands, how a part is read, and how a value is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, SupportsIndex

from tga_sdk.changes import MISSING, SCALARS, Document
from tga_sdk.shapes import ANY, Shape


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
        set_key(self, key)

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
_set_doc, _set_plain, _set_shape, _set_slot, _set_up, set_key = (
    vars(Node)[name].__set__ for name in ("_tga_doc", "_tga_plain", "_tga_shape", "_tga_slot", "_tga_up", "_tga_key")
)


class Where:
    """The name of a place, made only when it is read."""

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


ProxyClass = Callable[[Document, Any, Shape, Shape, Node | None, Any], Node]


class Proxies:
    """The classes of proxies, which read parts of each other's kind; the package sets them when it is imported."""

    list: ProxyClass
    mapping: ProxyClass
    record: Callable[[Shape], ProxyClass]


PROXIES: Final = Proxies()


def node_of(doc: Document, plain: Any, slot: Shape, up: Node | None, key: Any) -> Node:
    shape = slot
    if slot.kind == "union":
        shape = slot.told(plain, "state" if up is None else Where(up, key))
    if type(plain) is list:
        return PROXIES.list(doc, plain, shape if shape.kind == "list" else ANY, slot, up, key)
    if shape.kind == "record":
        return (shape.proxy or PROXIES.record(shape))(doc, plain, shape, slot, up, key)
    return PROXIES.mapping(doc, plain, shape if shape.kind == "dict" else ANY, slot, up, key)


def read_part(node: Node, key: Any, plain: Any, shape: Shape) -> Any:
    """What the program gets of a member or an item."""
    kind = type(plain)
    if kind is shape.exact:
        return plain
    if (kind is dict or kind is list) and shape.kind != "leaf":
        return node_of(node._tga_doc, plain, shape, node, key)
    if shape is ANY:
        return plain
    value = shape.codec.load(plain, Where(node, key))
    return frozenset(value) if type(value) is set else value  # adding to it would not be recorded


def take_part(node: Node, key: Any, shape: Shape, value: Any) -> Any:
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
