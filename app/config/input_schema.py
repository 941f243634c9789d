"""A tool's `input_schema`: JSON Schema 2020-12 that fetches nothing, always ends, and says what does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import referencing
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from app.config.wording import escaped, listed, one_of, pointer_to, shown
from app.core.canonical import canonical_enclosed
from app.core.errors import InputMalformed, InputTooLarge, SettingInvalid
from app.core.limits import INPUT_SCHEMA_BYTES_MAX

_BRANCHES_SHOWN_MAX = 4
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def validator_of(schema: dict[str, Any]) -> Draft202012Validator:
    # An empty registry: jsonschema's own would fetch what it does not know.
    return Draft202012Validator(schema, registry=referencing.Registry())


def verify_input_schema(at: str, schema: dict[str, Any]) -> None:
    """Raise SettingInvalid unless every call can be checked against it, tomorrow as today."""
    if schema.get("$schema", DIALECT) != DIALECT:
        raise SettingInvalid(f"{at}.$schema", expected=DIALECT, found=shown(schema["$schema"]))
    verify_writable(at, schema)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise not_a_schema(at, error) from None
    verify_references(at, schema)
    try:
        validator_of(schema).is_valid({})
    except RecursionError:
        raise SettingInvalid(f"{at}: its references go round in a circle", expected="an end to them") from None


def verify_writable(at: str, part: Any) -> None:
    """Raise SettingInvalid unless this part of a tool's definition can stand in its pin, and is not large."""
    try:
        canonical_enclosed(part, bytes_max=INPUT_SCHEMA_BYTES_MAX)
    except (InputMalformed, InputTooLarge) as error:
        raise SettingInvalid(f"{at}: {error.what}", expected=error.expected, found=error.found) from None


def not_a_schema(at: str, error: ValidationError | SchemaError) -> SettingInvalid:
    expected, found = mismatch(error)
    pointer = pointer_to(error.absolute_path) or "the top"
    return SettingInvalid(f"{at} at {pointer} is not JSON Schema 2020-12", expected=expected, found=found)


def verify_reachable(at: str, schema: Any, steps: tuple[str, ...]) -> None:
    """Raise SettingInvalid if arguments that fit the schema can have nothing there, as far as plain objects tell.

    A misspelt pointer to a secret would leave the secret in clear.
    """
    for step in steps:
        if not isinstance(schema, dict):
            return
        members = schema.get("properties", {})
        is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        if step not in members and is_closed:
            raise SettingInvalid(at, expected=one_of("a member of the input schema", step, members), found=shown(step))
        schema = members.get(step)


def mismatch(error: ValidationError | SchemaError) -> tuple[str, str]:
    """What the schema wants there, and what is there; long values are not echoed."""
    wanted: Any = error.validator_value
    value = error.instance
    if error.validator == "required" and isinstance(value, dict):
        return f"the field {shown(next(name for name in wanted if name not in value))}", "nothing"
    if error.validator == "additionalProperties" and wanted is False and isinstance(value, dict):
        schema = error.schema if isinstance(error.schema, dict) else {}
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        extra = [name for name in value if name not in known and not any(re.search(p, name) for p in patterns)]
        return f"only the fields of the schema ({listed(known) or 'none'})", listed(extra) or "more"
    if error.validator in ("anyOf", "oneOf") and error.context:
        # What each branch wants, rather than how long their list is; of many, the first few.
        branches = dict.fromkeys(mismatch(branch)[0] for branch in error.context[:_BRANCHES_SHOWN_MAX])
        return " or ".join(branches), shown(value)
    if error.validator == "enum" and isinstance(wanted, list) and all(isinstance(one, str) for one in wanted):
        return f"one of {listed(wanted)}", shown(value)
    return f"{error.validator}: {shown(wanted)}", shown(value)


def crawled(schema: dict[str, Any]) -> Any:
    """A resolver of the schema's references that fetches nothing and has looked through the whole schema, once."""
    resource = referencing.Resource.from_contents(schema, default_specification=DRAFT202012)
    uri = (resource.id() or "").rstrip("#")
    return referencing.Registry[Any]().with_resource(uri, resource).crawl().resolver(uri)


def verify_references(at: str, schema: dict[str, Any]) -> None:
    resolver = crawled(schema)
    for pointer, keyword, reference in _references(schema):
        if keyword == "$id":
            raise SettingInvalid(f"{at} at {pointer}", expected="$id at the top only", found=shown(reference))
        if not reference.startswith("#"):  # never fetched: a schema must mean the same tomorrow
            raise SettingInvalid(f"{at} at {pointer}", expected="a local reference, #...", found=shown(reference))
        try:
            resolver.lookup(reference)
        except (Unresolvable, ValueError):
            raise SettingInvalid(
                f"{at} at {pointer}", expected="a reference to a part of this schema", found=shown(reference)
            ) from None


def _references(schema: Any, pointer: str = "") -> Iterator[tuple[str, str, str]]:
    """Every reference, and every $id that would change what the references within it mean."""
    for key, member in schema.items() if isinstance(schema, dict) else enumerate(schema):
        at = f"{pointer}/{escaped(key)}"
        if isinstance(member, dict | list):
            yield from _references(member, at)
        elif isinstance(member, str) and (key in ("$ref", "$dynamicRef") or (key == "$id" and pointer)):
            yield at, key, member
