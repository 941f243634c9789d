"""The schemas of a procedure's input, output and state: others wrote them, so they are checked in bounded time."""

from __future__ import annotations

from typing import Any

from app.config.bounded_schema import TooManySteps, bounded_validator_of, first_misfit, verify_discovered_schema
from app.config.input_schema import mismatch
from app.config.wording import pointer_to
from app.core.errors import SchemaViolation, SettingInvalid


def verify_procedure_schema(at: str, schema: dict[str, Any]) -> None:
    """Raise SchemaViolation unless every value can be checked against it, and soon."""
    try:
        verify_discovered_schema(at, schema)
    except SettingInvalid as error:
        raise SchemaViolation(error.what, expected=error.expected, found=error.found) from None


def verify_against_schema(at: str, value: Any, schema: dict[str, Any] | None) -> None:
    """Raise SchemaViolation naming the first place of the value that does not fit; without a schema every value does.
    Expressions in the schema (`pattern`) are not run: the worker checks them."""
    if schema is None:
        return
    try:
        error = first_misfit(bounded_validator_of(schema), value)
    except RecursionError:
        raise SchemaViolation(f"{at} nests deeper than its schema can follow") from None
    except TooManySteps:
        raise SchemaViolation(f"{at} takes too long to check against its schema") from None
    if error is not None:
        expected, found = mismatch(error)
        raise SchemaViolation(f"{at} at {pointer_to(error.absolute_path) or 'the top'}", expected=expected, found=found)
