"""Schemas that programs have written for what they ask: the engine's Schemas port."""

from __future__ import annotations

from typing import Any

from app.config.bounded_schema import TooManySteps, bounded_validator_of, first_misfit, verify_discovered_schema
from app.config.input_schema import mismatch
from app.core.errors import SchemaViolation, SettingInvalid


class BoundedSchemas:
    """Checks take bounded time, whatever the schema says: a program's author may be anybody."""

    def verify(self, schema: dict[str, Any]) -> None:
        try:
            verify_discovered_schema("answer_schema", schema)
        except SettingInvalid as error:
            raise SchemaViolation(error.what, expected=error.expected, found=error.found) from None

    def misfit(self, schema: dict[str, Any], value: Any) -> str | None:
        try:
            error = first_misfit(bounded_validator_of(schema), value)
        except (TooManySteps, RecursionError):
            return "a value that can be checked in bounded time"
        if error is None:
            return None
        expected, found = mismatch(error)
        return f"at {error.json_path}: {expected}, not {found}"
