"""Accepts most arguments a hundred times faster than `jsonschema`, which stays the judge of all that is not accepted.

jsonschema-rs answers only yes or no here, and only for schemas of which both mean the same: keywords whose meaning
leaves no room, and patterns in a plain subset of regular expressions in which Python's and ECMA's agree. A yes is
final. A no, an error, or any other schema is judged by `app.config.input_schema`, whose words callers are told.
Left to the judge alone are, among others: `multipleOf` (floats), `uniqueItems` (1 and 1.0), `not`, `if` and `contains`
(there a no inside would be a yes), `unevaluated*`, `$dynamicRef`, and numbers beyond 2^53 in a schema.

Only for schemas that the operator wrote: what a tool server lists is checked in counted steps (bounded_schema.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from app.core.limits import SAFE_INTEGER_MAX

Accepts = Callable[[Any], bool]

_SAID_ONLY: Final = frozenset(
    {"$schema", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"format"}  # of 2020-12 an annotation; jsonschema checks it only if it is told to
)
_COUNTS: Final = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_SCHEMAS: Final = frozenset({"additionalProperties", "items", "propertyNames"})
_LISTS_OF_SCHEMAS: Final = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_MAPS_OF_SCHEMAS: Final = frozenset({"properties", "$defs"})
_LOCAL: Final = re.compile(r"#(?:/\$defs/[A-Za-z0-9_-]+)?")

_MEMBER: Final = r"(?:a-z|A-Z|0-9|[A-Za-z0-9_ :@/.,=])"
# Literal characters, escaped ones, classes, groups and anchors, each with one quantifier at most. Not `.`, nor `\d`,
# `\w`, `\s` and classes without them in them: they mean other sets of characters in Python.
_PLAIN_PATTERN: Final = re.compile(
    r"\^?(?:(?:[A-Za-z0-9_ :@/,=-]|\\[.+*?()\[\]{}|^$/-]|"
    rf"\[\^?{_MEMBER}+-?\]|\((?!\?)|\)|\|)(?:[*+?]|\{{[0-9]{{1,3}}(?:,[0-9]{{0,3}})?\}})?)*\$?"
)


def acceptance_of(schema: dict[str, Any]) -> Accepts | None:
    """What says yes only where `input_schema.validator_of(schema)` finds nothing wrong; None: no such thing."""
    is_exclusive = any(key == "oneOf" for key, _ in _members(schema))
    if not all(_is_alike(key, value, is_exclusive=is_exclusive) for key, value in _members(schema)):
        return None
    import jsonschema_rs  # serving needs it; commands that only look at a configuration do not

    try:
        validator = jsonschema_rs.Draft202012Validator(
            schema, validate_formats=False, pattern_options=jsonschema_rs.RegexOptions(), offline=True
        )
    except Exception:  # a schema that it cannot take is the judge's
        return None
    is_valid = validator.is_valid

    def accepts(instance: Any) -> bool:
        try:
            return is_valid(instance)
        except Exception:  # what it cannot read (a lone surrogate, a number) is the judge's
            return False

    return accepts


def _members(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every keyword with its value, of the schema and of those in it; `?` for what is no schema."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield "?", schema
        return
    for key, value in schema.items():
        yield key, value
        if key in _SCHEMAS:
            yield from _members(value)
        elif key in _LISTS_OF_SCHEMAS:
            for part in value if isinstance(value, list) else [None]:
                yield from _members(part)
        elif key in _MAPS_OF_SCHEMAS:
            for part in value.values() if isinstance(value, dict) else [None]:
                yield from _members(part)


def _is_alike(key: str, value: Any, *, is_exclusive: bool) -> bool:
    """Whether both mean the same by it, or jsonschema-rs accepts less. Beside a `oneOf`, less inside may be more."""
    if key in _SAID_ONLY or key in _SCHEMAS or key in _LISTS_OF_SCHEMAS or key in _MAPS_OF_SCHEMAS:
        return True
    if key == "type":
        return isinstance(value, str | list)
    if key == "required":
        return isinstance(value, list)
    if key in _COUNTS:
        return type(value) is int and 0 <= value <= SAFE_INTEGER_MAX
    if key in _BOUNDS:
        return type(value) is int and -SAFE_INTEGER_MAX <= value <= SAFE_INTEGER_MAX
    if key == "enum":
        return isinstance(value, list) and all(type(one) is str for one in value)
    if key == "const":
        return type(value) is str
    if key == "$ref":
        return isinstance(value, str) and _LOCAL.fullmatch(value) is not None
    if key == "pattern":
        return not is_exclusive and isinstance(value, str) and _PLAIN_PATTERN.fullmatch(value) is not None
    return False
