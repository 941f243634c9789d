"""A model or a dataclass of a run's state."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from tga_sdk.changes import MISSING, SCALARS
from tga_sdk.codecs import invalid
from tga_sdk.errors import ValueInvalid
from tga_sdk.shapes import ANY, Field, Shape
from tga_sdk.tracked.changing import is_itself, remove_part, set_part
from tga_sdk.tracked.node import Node, Where, read_part, take_part, unproxied


class NotSetYet(ValueInvalid, AttributeError):
    """A required field of the state is read before it was set."""


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
            if not is_itself(self, name, value):
                set_part(self, name, take_part(self, name, ANY, value))
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
        remove_part(self, key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        shape = self._tga_shape
        field = shape.fields.by_name.get(name)
        if field is not None:
            where = str(Where(self, field.key))
            raise NotSetYet(f"{where} is required and was not set yet", where=where)
        if name in self._tga_plain and self._tga_has_extra():
            return read_part(self, name, self._tga_plain[name], ANY)
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
    return read_part(node, field.key, plain, field.shape)


def _default_of(node: Node, field: Field) -> Any:
    if field.is_required:
        raise AttributeError(field.name)  # __getattr__ says it better
    value = field.default()
    if type(value) in SCALARS or field.shape.kind == "leaf":
        return frozenset(value) if type(value) is set else value
    shape, key = field.shape, field.key
    plain = node._tga_doc.default(node._tga_plain, key, lambda: shape.take(value, Where(node, key)))
    return read_part(node, key, plain, shape)


def _set_field(node: Node, field: Field, value: Any) -> None:
    key = field.key
    if is_itself(node, key, value):
        return
    if field.is_frozen:
        where = str(Where(node, key))
        raise ValueInvalid(f"{where} is frozen, and cannot be set", where=where)
    set_part(
        node, key, _taken_by_record(node, field, value) if field.by_record else take_part(node, key, field.shape, value)
    )


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
        return take_part(node, field.key, field.shape, value)
    dumped = instance.model_dump(mode="json", by_alias=True, include={field.name}, warnings=False)
    return ANY.take(dumped[field.key], Where(node, field.key))


def _no_field(node: Node, name: str) -> ValueInvalid:
    shape = node._tga_shape
    known = ", ".join(shape.fields.by_name) or "none"
    where = f"{Where(node)}.{name}"
    return ValueInvalid(f"{where}: {shape.bare.__name__} has no such field; it has {known}", where=where)


def proxy_of(shape: Shape) -> Any:
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
