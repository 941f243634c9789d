"""Plain JSON data: copies of it, and what all that turn values into it share."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable
from enum import Enum
from typing import Any, Final

from tga_sdk.canonical import LEVELS_MAX
from tga_sdk.errors import ValueNotSerializable

SCALARS: Final = frozenset({str, int, float, bool, type(None)})


def copied(value: Any) -> Any:
    """A copy of plain JSON data."""
    kind = type(value)
    if kind is dict:
        return {key: member if type(member) in SCALARS else copied(member) for key, member in value.items()}
    if kind is list:
        return [item if type(item) in SCALARS else copied(item) for item in value]
    return value


def tool_output(output: Any) -> Any:
    """What a tool answered, in Python: JSON as it is, other bytes as `bytes`, None where it answered nothing; of what
    was too large to be kept the record itself (`{encoding: digest, sha256, size_bytes}`)."""
    if not isinstance(output, dict):
        return output
    if output.get("encoding") == "json":
        return output.get("value")
    if output.get("encoding") == "base64":
        try:
            return base64.b64decode(str(output.get("data")), validate=True)
        except (binascii.Error, ValueError):
            return output
    return output


def text_or_base64(output: bytes) -> Any:
    """Bytes for those who take JSON: the text where they are one."""
    try:
        return output.decode()
    except UnicodeDecodeError:
        return {"encoding": "base64", "data": base64.b64encode(output).decode()}


def detached(value: Any) -> Any:
    """A part of the run's state as a value of its own; everything else as it is."""
    take = getattr(type(value), "_tga_value", None)
    return value if take is None else take(value)


def verify_levels(levels: int, where: object) -> None:
    if not levels:
        raise ValueNotSerializable(f"{where} is nested deeper than {LEVELS_MAX} levels, or contains itself")


def key_text(key: Any, where: object) -> str:
    if isinstance(key, Enum) and isinstance(key.value, str):
        return key.value
    if isinstance(key, str):
        return str.__str__(key)
    raise ValueNotSerializable(
        f"{where} has the key {key!r} ({type(key).__name__}), and keys of JSON are text: use str(...) of it"
    )


def type_text(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    said = f"of type {name}"
    return f"{said} (was `await` forgotten before it?)" if isinstance(value, Awaitable) else said
