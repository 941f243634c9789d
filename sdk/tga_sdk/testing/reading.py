"""How the in-memory gateway reads requests: strict JSON, exactly the fields that there are, parameters that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError

from tga_sdk.canonical import NotCanonical, canonical
from tga_sdk.testing.messages import DOCUMENT_BYTES_MAX, SAFE_INTEGER_MAX
from tga_sdk.testing.problems import Problem

M = TypeVar("M", bound=BaseModel)


def body_of(model: type[M], raw: bytes, *, is_optional: bool = False, bytes_max: int = DOCUMENT_BYTES_MAX) -> M:
    """The body as `model`; Problem naming the place."""
    if len(raw) > bytes_max:
        raise Problem("INPUT_TOO_LARGE", "the body is too large", expected=f"at most {bytes_max} bytes", found=len(raw))
    fields = {} if is_optional and not raw else parse_object(raw)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        what = "the body at " + "".join(f"/{step}" for step in first["loc"])
        if first["type"] == "extra_forbidden":
            raise Problem("SCHEMA_VIOLATION", what, expected="only known fields", found="another one") from None
        if first["type"] == "missing":
            raise Problem("SCHEMA_VIOLATION", what, expected="the field", found="nothing") from None
        found = ascii(first["input"])
        raise Problem("SCHEMA_VIOLATION", what, expected=first["msg"], found=found[:200]) from None


def parse_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_number)
        canonical(value)
    except UnicodeDecodeError:
        raise Problem("INPUT_MALFORMED", "not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Problem("INPUT_MALFORMED", "not JSON", found=f"{error.msg} at character {error.pos}") from None
    except (NotCanonical, RecursionError) as error:
        raise Problem("INPUT_MALFORMED", "a number that a double cannot hold exactly or at all", found=error) from None
    if not isinstance(value, dict):
        raise Problem("INPUT_MALFORMED", "not a JSON object", found=type(value).__name__)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise Problem("INPUT_MALFORMED", "a key is repeated in one object")
    return members


def _no_number(text: str) -> NoReturn:
    raise Problem("INPUT_MALFORMED", "not a JSON number", found=text)


def parameters(query: bytes, *allowed: str) -> dict[str, str]:
    """The query's parameters; Problem for one that the route does not have, or has twice."""
    found: dict[str, str] = {}
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise Problem("INPUT_MALFORMED", "the query cannot be read", expected="name=value pairs") from None
    for name, value in pairs:
        if name not in allowed:
            known = ", ".join(sorted(allowed)) or "no parameter at all"
            raise Problem("INPUT_MALFORMED", "there is no such parameter", expected=known, found=ascii(name))
        if name in found:
            raise Problem("INPUT_MALFORMED", f"the parameter {name} is repeated", expected="each once")
        found[name] = value
    return found


def number_in(given: Mapping[str, str], name: str, default: int, *, at_most: int = SAFE_INTEGER_MAX) -> int:
    text = given.get(name, str(default))
    if re.fullmatch(r"0|[1-9][0-9]{0,15}", text) is None or int(text) > at_most:
        raise Problem("INPUT_MALFORMED", name, expected=f"a whole number, at most {at_most}", found=ascii(text))
    return int(text)


def moment_in(given: Mapping[str, str], name: str) -> str | None:
    """A moment in UTC, to the millisecond: so written, earlier ones come first."""
    text = given.get(name)
    if text is None:
        return None
    try:
        if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{3})?Z", text) is None:
            raise ValueError(text)
        return datetime.fromisoformat(text).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    except ValueError:
        expected = "a moment such as 2026-01-31T12:00:00.000Z"
        raise Problem("INPUT_MALFORMED", name, expected=expected, found=ascii(text)) from None


def limit_in(given: Mapping[str, str], *, at_most: int = 200) -> int:
    limit = number_in(given, "limit", 50, at_most=at_most)
    if limit < 1:
        raise Problem("INPUT_MALFORMED", "limit", expected=f"1 to {at_most}", found="0")
    return limit


def position_in(given: Mapping[str, str], first: int) -> int:
    """After which number of a journal; a fork's begins below 0."""
    text = given.get("after_seq")
    if text is None:
        return first
    if re.fullmatch(r"0|-?[1-9][0-9]{0,15}", text) is None:
        raise Problem("INPUT_MALFORMED", "after_seq", expected="a whole number", found=text[:32])
    return max(first, int(text))


def one_of(given: Mapping[str, str], name: str, known: Mapping[str, Any]) -> str | None:
    value = given.get(name)
    if value is not None and value not in known:
        raise Problem("INPUT_MALFORMED", name, expected=", ".join(sorted(known)), found=ascii(value))
    return value
