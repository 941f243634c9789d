"""Declared types: how a value of one becomes JSON data, and the way back.

A value without a declared type is recorded only if it is JSON data already, tuples counting as lists: nothing would say
how to read anything else back.
"""

from __future__ import annotations

import functools
import json
import types
from enum import Enum
from typing import Any, Final, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError
from pydantic_core import PydanticSerializationError

from tga_sdk.canonical import LEVELS_MAX, is_plain
from tga_sdk.errors import ValueInvalid, ValueNotSerializable
from tga_sdk.plain import SCALARS, copied, detached, key_text, type_text, verify_levels
from tga_sdk.wrappers import Artifact, Secret

WAYS_OUT: Final = (
    "Either return what can be recorded (JSON, bytes, or a type that is declared: a return annotation or type=), "
    "or have it computed again in each attempt: tier='transient', resume='recompute'"
)


class Codec:
    """A declared type: to JSON and back. Made once for each type (`codec_of`)."""

    __slots__ = ("_scalar", "adapter", "is_json", "type")

    def __init__(self, type_: Any) -> None:
        self.type = type_
        self.is_json = _is_json_type(type_)
        self._scalar = type_ if type_ in SCALARS else None
        self.adapter: TypeAdapter[Any] | None = None
        if type_ is not None and type_ is not Any and type_ is not object:
            try:
                self.adapter = TypeAdapter(type_)
            except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError):
                self.is_json = True  # a class that pydantic does not know: only JSON can be recorded of it

    def dump(self, value: Any, where: object) -> Any:
        """JSON data of the value, from which `load` reads it back: what it cannot read is refused here. It may be
        the value itself."""
        value = detached(value)
        if self.adapter is None:
            return value if is_plain(value) else _untyped(value, where, LEVELS_MAX)
        if self.is_json:
            return self.load(value if is_plain(value) else _untyped(value, where, LEVELS_MAX), where)
        try:
            try:
                plain = self.adapter.dump_python(value, mode="json", by_alias=True, warnings="error")
            except PydanticSerializationError:
                # Not of the declared type, but perhaps what can be read as such: a dict for a model.
                right = self.adapter.validate_python(value)
                plain = self.adapter.dump_python(right, mode="json", by_alias=True, warnings="error")
            self.load(plain, where)
            return plain
        except ValidationError as error:
            raise invalid(error, where) from None
        except (PydanticSerializationError, ValueError, TypeError) as error:
            raise ValueNotSerializable(
                f"{where} is {type_text(value)}, and cannot be written as {_shown(self.type)}: {error}. {WAYS_OUT}"
            ) from None

    def load(self, plain: Any, where: object) -> Any:
        """The value of JSON data, a copy."""
        if self._scalar is not None and type(plain) is self._scalar:
            return plain
        if self.adapter is None:
            return copied(plain)
        try:
            if self.is_json:
                return self.adapter.validate_python(copied(plain))
            return self.adapter.validate_json(json.dumps(plain, ensure_ascii=False))
        except ValidationError as error:
            raise invalid(error, where) from None


def codec_of(type_: Any) -> Codec:
    """The codec of a type, `Artifact[T]` and `Secret[T]` counting as T."""
    if type_ is None:
        return _UNTYPED
    try:
        return _cached_codec(type_)
    except TypeError:  # a type that cannot be hashed, like Annotated[int, {...}]
        return Codec(_unwrapped_type(type_))


def invalid(error: ValidationError, where: object) -> ValueInvalid:
    """What pydantic found, by the first place that is wrong; the others are counted. Never shows the value itself."""
    problems = error.errors(include_url=False, include_context=False, include_input=True)
    first = problems[0]
    place = str(where) + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    found = "" if first["type"] == "missing" else f"; found {type(first['input']).__name__}"
    return ValueInvalid(f"{place}: {first['msg']}{found}{more}", where=place)


@functools.lru_cache(maxsize=1024)
def _cached_codec(type_: Any) -> Codec:
    return Codec(_unwrapped_type(type_))


def _unwrapped_type(type_: Any) -> Any:
    if type_ in (Artifact, Secret):
        return None
    while get_origin(type_) in (Artifact, Secret):
        (type_,) = get_args(type_)
    return type_


def _is_json_type(type_: Any) -> bool:
    """Whether all values of the type are JSON data as they are, Any inside it counting as JSON."""
    if type_ is None or type_ is Any or type_ is object or type_ in (dict, list) or type_ in SCALARS:
        return True
    origin, inner = get_origin(type_), get_args(type_)
    if origin is Literal:
        return all(type(one) in SCALARS for one in inner)
    if origin is dict:
        return inner[0] is str and _is_json_type(inner[1])
    return origin in (list, Union, types.UnionType) and all(_is_json_type(one) for one in inner)


def _untyped(value: Any, where: object, levels: int) -> Any:
    """JSON data of what has no declared type; tuples become lists, and nothing else changes silently."""
    value = detached(value)
    if isinstance(value, Enum) and isinstance(value, str | int | float):
        return value.value
    if value is None or isinstance(value, bool | str | int | float):
        return value
    verify_levels(levels, where)
    if isinstance(value, dict):
        return {key_text(key, where): _untyped(member, f"{where}.{key}", levels - 1) for key, member in value.items()}
    if isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        return [_untyped(item, f"{where}[{index}]", levels - 1) for index, item in enumerate(value)]
    raise _not_serializable(value, where)


def _not_serializable(value: Any, where: object) -> ValueNotSerializable:
    if isinstance(value, Artifact | Secret):
        return ValueNotSerializable(
            f"{where} is {type_text(value)} inside of another value: return it alone, from an operation of its own"
        )
    if isinstance(value, bytes | bytearray | memoryview):
        return ValueNotSerializable(
            f"{where} is bytes inside of another value: return them alone, from an operation of their own, or as "
            "base64 text"
        )
    if isinstance(value, set | frozenset):
        return ValueNotSerializable(f"{where} is {type_text(value)}, which JSON does not know. {WAYS_OUT}")
    return ValueNotSerializable(f"{where} is {type_text(value)}, and nothing says how to read it back. {WAYS_OUT}")


def _shown(type_: Any) -> str:
    return getattr(type_, "__qualname__", None) or str(type_)


_UNTYPED: Final = Codec(None)
