"""Schemas that a tool server wrote: checked like configured ones, in bounded time, whatever is in them.

A server could write a schema that takes for ever: a regular expression that backtracks, references that double at
every step. So expressions are not run (`pattern`, `patternProperties`; the server checks them itself), nor what depends
on them, and everything else is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

import referencing
from jsonschema import Draft7Validator, Draft201909Validator, Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend

from app.config.input_schema import DIALECT, verify_references, verify_well_formed
from app.config.wording import shown
from app.core.errors import SettingInvalid
from app.core.limits import SCHEMA_STEPS_MAX, SCHEMA_STEPS_ON_NOTHING_MAX

_Keyword = Callable[[Any, Any, Any, Any], Any]
_steps_left: ContextVar[list[int]] = ContextVar("steps_left")


class TooManySteps(Exception):
    """The check was given up."""


def _bounded(kind: Any) -> Any:
    keywords = {name: _counted(keyword) for name, keyword in kind.VALIDATORS.items()}
    for name in ("pattern", "patternProperties", "unevaluatedProperties", "unevaluatedItems"):
        keywords.pop(name, None)
    keywords["uniqueItems"] = _counted(_unique)
    keywords["additionalProperties"] = _counted(_additional(kind.VALIDATORS["additionalProperties"]))
    unchecked = {name: _unchecked for name in kind.VALIDATORS if name not in keywords}
    return extend(kind, {**keywords, **unchecked})  # type: ignore[no-untyped-call]


def _counted(keyword: _Keyword) -> _Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        left = _steps_left.get()
        left[0] -= 1 + (len(value) if isinstance(value, list | dict) else 0)
        if left[0] < 0:
            raise TooManySteps
        yield from keyword(validator, value, instance, schema) or ()

    return check


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    return iter(())


def _unique(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    # jsonschema's own compares every item with every other.
    if value and isinstance(instance, list):
        written = {json.dumps(item, sort_keys=True) for item in instance}
        if len(written) < len(instance):
            yield ValidationError("items occur twice")


def _additional(keyword: _Keyword) -> _Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        # Which members are additional depends on expressions, which are not run.
        return () if "patternProperties" in schema else keyword(validator, value, instance, schema)

    return check


_KINDS: Final[dict[str, Any]] = {
    DIALECT: _bounded(Draft202012Validator),
    "https://json-schema.org/draft/2019-09/schema": _bounded(Draft201909Validator),
    "http://json-schema.org/draft-07/schema": _bounded(Draft7Validator),
    "https://json-schema.org/draft-07/schema": _bounded(Draft7Validator),
}


def bounded_validator_of(schema: dict[str, Any]) -> Any:
    kind = _KINDS[str(schema.get("$schema", DIALECT)).removesuffix("#")]
    return kind(schema, registry=referencing.Registry())


def first_misfit(validator: Any, arguments: Any, *, steps_max: int = SCHEMA_STEPS_MAX) -> ValidationError | None:
    """The first thing that does not fit. Raises TooManySteps, and RecursionError as jsonschema does."""
    token = _steps_left.set([steps_max])
    try:
        return next(validator.iter_errors(arguments), None)
    finally:
        _steps_left.reset(token)


def verify_discovered_schema(at: str, schema: dict[str, Any]) -> None:
    """Raise SettingInvalid unless every call can be checked against it, and soon."""
    dialect = str(schema.get("$schema", DIALECT)).removesuffix("#")
    if dialect not in _KINDS:
        raise SettingInvalid(f"{at}.$schema", expected="JSON Schema 2020-12, 2019-09 or draft-07", found=shown(dialect))
    try:
        verify_well_formed(at, schema, _KINDS[dialect])
        verify_references(at, schema)
        first_misfit(bounded_validator_of(schema), {}, steps_max=SCHEMA_STEPS_ON_NOTHING_MAX)
    except (RecursionError, TooManySteps):
        raise SettingInvalid(f"{at}: it takes too long to check anything against it") from None
    except SchemaError as error:
        raise SettingInvalid(f"{at} is not a schema", found=shown(error.message)) from None
