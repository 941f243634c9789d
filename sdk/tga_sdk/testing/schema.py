"""As much of JSON Schema as procedures and questions use: what pydantic writes for a type.

`type`, `enum`, `const`, `properties`, `required`, `additionalProperties`, `items`, `prefixItems`, `anyOf`, `oneOf`,
`allOf`, `not`, `$ref` to `$defs`, and the bounds of numbers, texts, lists and objects. Other words are taken for
remarks; the real gateway knows all of draft 2020-12.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final

from tga_sdk.testing.problems import Problem

_TYPES: Final = ("null", "boolean", "object", "array", "number", "integer", "string")


def verify_schema(where: str, schema: Mapping[str, Any] | None) -> None:
    """Problem unless it is a schema."""
    if schema is None:
        return
    stated = schema.get("type")
    for name in [stated] if isinstance(stated, str) else stated or ():
        if name not in _TYPES:
            raise Problem(
                "SCHEMA_VIOLATION",
                f"{where} at /type is not JSON Schema 2020-12",
                expected=f"one of {', '.join(_TYPES)}",
                found=name,
            )


def misfit(schema: Any, value: Any) -> str | None:
    """Where the value does not fit, and what was expected there; None when it fits."""
    return _misfit(schema, value, "$", schema)


def _misfit(schema: Any, value: Any, at: str, root: Any) -> str | None:
    if schema is True or schema == {}:
        return None
    if schema is False:
        return f"at {at}: nothing is allowed here"
    if "$ref" in schema:
        return _misfit(_referred(schema["$ref"], root), value, at, root)
    stated = schema.get("type")
    if stated is not None:
        kinds = [stated] if isinstance(stated, str) else stated
        if not any(_is_of(kind, value) for kind in kinds):
            return f"at {at}: {' or '.join(kinds)}, not {value!r}"
    if "const" in schema and not _equal(schema["const"], value):
        return f"at {at}: {schema['const']!r}, not {value!r}"
    if "enum" in schema and not any(_equal(one, value) for one in schema["enum"]):
        return f"at {at}: one of {schema['enum']!r}, not {value!r}"
    for found in (
        _misfit_of_any(schema, value, at, root),
        _misfit_of_bounds(schema, value, at),
        _misfit_of_members(schema, value, at, root) if isinstance(value, dict) else None,
        _misfit_of_items(schema, value, at, root) if isinstance(value, list) else None,
    ):
        if found is not None:
            return found
    return None


def _misfit_of_any(schema: Mapping[str, Any], value: Any, at: str, root: Any) -> str | None:
    for one in schema.get("allOf", ()):
        found = _misfit(one, value, at, root)
        if found is not None:
            return found
    for word in ("anyOf", "oneOf"):
        if word in schema:
            found_all = [_misfit(one, value, at, root) for one in schema[word]]
            fitting = found_all.count(None)
            if fitting == 0 or (word == "oneOf" and fitting > 1):
                return found_all[0] or f"at {at}: exactly one of the forms"
    if "not" in schema and _misfit(schema["not"], value, at, root) is None:
        return f"at {at}: something else"
    return None


def _misfit_of_bounds(schema: Mapping[str, Any], value: Any, at: str) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        for word, is_right in (
            ("minimum", operator.ge),
            ("maximum", operator.le),
            ("exclusiveMinimum", operator.gt),
            ("exclusiveMaximum", operator.lt),
        ):
            if word in schema and not is_right(value, schema[word]):
                return f"at {at}: {word} {schema[word]}, not {value}"
    elif isinstance(value, str | list | dict):
        what = {str: "Length", list: "Items", dict: "Properties"}[type(value)]
        least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
        if len(value) < least or (most is not None and len(value) > most):
            return f"at {at}: from {least} to {'any number' if most is None else most}, not {len(value)}"
    return None


def _misfit_of_members(schema: Mapping[str, Any], value: dict[str, Any], at: str, root: Any) -> str | None:
    for name in schema.get("required", ()):
        if name not in value:
            return f"at {at}: the member {name}, not nothing"
    known = schema.get("properties", {})
    for name, member in value.items():
        inside = known.get(name, schema.get("additionalProperties", True))
        found = _misfit(inside, member, f"{at}.{name}", root)
        if found is not None:
            return found
    return None


def _misfit_of_items(schema: Mapping[str, Any], value: list[Any], at: str, root: Any) -> str | None:
    first = schema.get("prefixItems", [])
    for index, item in enumerate(value):
        inside = first[index] if index < len(first) else schema.get("items", True)
        found = _misfit(inside, item, f"{at}[{index}]", root)
        if found is not None:
            return found
    return None


def _referred(name: str, root: Any) -> Any:
    found = root
    for step in name.removeprefix("#").split("/")[1:]:
        found = found[step.replace("~1", "/").replace("~0", "~")]
    return found


def _is_of(kind: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "number":
            return is_number
        case "integer":
            return is_number and float(value).is_integer()
        case _:
            return isinstance(value, str)


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
