"""Schemas that a tool server wrote: checked like configured ones, in bounded time, whatever is in them.

A server could write a schema that takes for ever: a regular expression that backtracks, references that double at
every step. So expressions are not run (`pattern`, `patternProperties`; the server checks them itself), nor what depends
on them, and everything else is counted, also while the schema itself is checked. A `$schema` in a part of the schema
changes nothing: jsonschema would go over to its own validator there, which counts nothing and runs expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

import attrs
import orjson
import referencing
from jsonschema import Draft7Validator, Draft201909Validator, Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from app.config.input_schema import DIALECT, crawled, not_a_schema, verify_references, verify_writable
from app.config.wording import shown
from app.core.errors import SettingInvalid
from app.core.limits import (
    SCHEMA_REFERENCE_STEPS,
    SCHEMA_STEPS_MAX,
    SCHEMA_STEPS_OF_SCHEMA_MAX,
    SCHEMA_STEPS_ON_NOTHING_MAX,
)

_Keyword = Callable[[Any, Any, Any, Any], Any]
# Of these, the work grows with what is checked, whatever the keyword says.
_OVER_INSTANCE: Final = frozenset(
    {"items", "additionalItems", "prefixItems", "contains", "additionalProperties", "propertyNames", "uniqueItems"}
)
_REFERENCES: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_CHARS_A_STEP: Final = 500  # that are written in the time of a step


class TooManySteps(Exception):
    """The check was given up."""


class _Budget:
    """The steps that are left of one check, and how long each part of what is checked is when it is written:
    jsonschema writes it into every error, also into those of alternatives that nobody will read."""

    __slots__ = ("_chars_of", "_left")

    def __init__(self, instance: Any, steps_max: int) -> None:
        self._left = steps_max
        self._chars_of: dict[int, int] = {}
        self._measure(instance)

    def count(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise TooManySteps

    def chars_of(self, instance: Any) -> int:
        return len(instance) if isinstance(instance, str) else self._chars_of.get(id(instance), 0)

    def _measure(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value)
        if isinstance(value, dict):
            chars = sum(len(key) + 4 + self._measure(member) for key, member in value.items())
        elif isinstance(value, list):
            chars = sum(map(self._measure, value), 2 * len(value))
        else:
            return 8
        self._chars_of[id(value)] = chars
        return chars


_budget: ContextVar[_Budget] = ContextVar("budget")


def _bounded(kind: Any) -> Any:
    replaced = {
        **kind.VALIDATORS,
        "uniqueItems": _unique,
        "additionalProperties": _additional(kind.VALIDATORS["additionalProperties"]),
    }
    keywords = {name: _counted(name, keyword) for name, keyword in replaced.items()}
    for name in ("pattern", "patternProperties", "unevaluatedProperties", "unevaluatedItems"):
        if name in keywords:
            keywords[name] = _unchecked
    bounded: Any = extend(kind, keywords)  # type: ignore[no-untyped-call]
    fields = [(field.name, field.alias) for field in attrs.fields(bounded) if field.init]

    def evolve(validator: Any, **changes: Any) -> Any:
        """As jsonschema's own, but always to this class, whatever `$schema` stands in the part."""
        return bounded(**{alias: getattr(validator, name) for name, alias in fields} | changes)

    bounded.evolve = evolve
    return bounded


def _counted(name: str, keyword: _Keyword) -> _Keyword:
    steps = SCHEMA_REFERENCE_STEPS if name in _REFERENCES else 1
    is_over_instance = name in _OVER_INSTANCE

    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        budget = _budget.get()
        passes = _size(instance) if is_over_instance else 0
        budget.count(steps + _size(value) + passes + budget.chars_of(instance) // _CHARS_A_STEP)
        yield from keyword(validator, value, instance, schema) or ()

    return check


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    return iter(())


def _unique(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    # jsonschema's own compares every item with every other.
    if value and isinstance(instance, list):
        written = {orjson.dumps(item, option=orjson.OPT_SORT_KEYS) for item in instance}
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
    # Crawled once: otherwise every reference to an anchor would look through the whole schema again.
    return kind(schema, registry=referencing.Registry(), _resolver=crawled(schema))


def first_misfit(validator: Any, arguments: Any, *, steps_max: int = SCHEMA_STEPS_MAX) -> ValidationError | None:
    """The first thing that does not fit. Raises TooManySteps, and RecursionError as jsonschema does."""
    token = _budget.set(_Budget(arguments, steps_max))
    try:
        return next(validator.iter_errors(arguments), None)
    finally:
        _budget.reset(token)


def verify_discovered_schema(at: str, schema: dict[str, Any]) -> None:
    """Raise SettingInvalid unless every call can be checked against it, and soon."""
    dialect = str(schema.get("$schema", DIALECT)).removesuffix("#")
    if dialect not in _KINDS:
        raise SettingInvalid(f"{at}.$schema", expected="JSON Schema 2020-12, 2019-09 or draft-07", found=shown(dialect))
    verify_writable(at, schema)
    kind = _KINDS[dialect]
    try:
        error = first_misfit(
            kind(kind.META_SCHEMA, registry=referencing.Registry()), schema, steps_max=SCHEMA_STEPS_OF_SCHEMA_MAX
        )
        if error is not None:
            raise not_a_schema(at, error)
        verify_references(at, schema)
        first_misfit(bounded_validator_of(schema), {}, steps_max=SCHEMA_STEPS_ON_NOTHING_MAX)
    except (RecursionError, TooManySteps):
        raise SettingInvalid(f"{at}: it takes too long to check anything against it") from None
