"""Idempotency keys that are stable by construction."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime
from enum import Enum
from typing import Any, Final
from urllib.parse import quote
from uuid import UUID, uuid4

from tga_sdk.errors import KeyUnstable

KEY_CHARS_MAX: Final = 255
_SHOWN_CHARS: Final = 180
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_INTEGER_MAX: Final = 10**100


def key_for(*parts: Any) -> str:
    """A key that is the same for the same parts, in every process and on every machine, and another for others.

    `key_for("order", 7)` is `order/7`. Parts are texts, whole numbers, booleans, UUIDs, dates, times with a time zone,
    bytes, and lists or tuples of these. Guaranteed: two keys are equal only if their parts are, type and order
    included: `("a", "bc")` and `("ab", "c")` differ, so do `7` and `"7"`. A long one is shortened by a digest.

    Refused with KeyUnstable: floats, None, sets, dicts and objects, because the same thing could have another form the
    next time. Not guaranteed: that texts which look the same are (Unicode has several forms of some characters).
    """
    if not parts:
        raise KeyUnstable("a key needs at least one part, as in key_for('order', 7)")
    text = "/".join(_written(part, str(number)) for number, part in enumerate(parts, 1))
    if len(text) <= KEY_CHARS_MAX:
        return text
    # `~` stands in no part, so a shortened key is never the whole form of another one.
    return f"{text[:_SHOWN_CHARS]}~{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def new_key() -> str:
    """A key for a call that only the client itself repeats."""
    return f"call-{uuid4()}"


def _written(part: Any, where: str) -> str:
    if isinstance(part, bool):
        return "=true" if part else "=false"
    if isinstance(part, Enum) and not isinstance(part, (str, int)):
        raise _unstable(part, where, "give its value")
    if isinstance(part, int):
        if abs(part) >= _INTEGER_MAX:
            raise _unstable(part, where, "give a shorter number, or a text")
        return str(int(part))
    if isinstance(part, str):
        return _text(str.__str__(part), part, where)
    if isinstance(part, UUID):
        return f"=uuid.{part}"
    if isinstance(part, datetime):
        if part.tzinfo is None or part.utcoffset() is None:
            raise _unstable(part, where, "give a time with a time zone: the same clock time is another one elsewhere")
        return f"=time.{part.astimezone(UTC).strftime('%Y%m%dT%H%M%S.%f')}Z"
    if isinstance(part, date):
        return f"=date.{part.isoformat()}"
    if isinstance(part, (bytes, bytearray)):
        return f"=bytes.{part.hex()}"
    if isinstance(part, Sequence) and isinstance(part, (list, tuple)):
        return "(" + ",".join(_written(inner, f"{where}[{at}]") for at, inner in enumerate(part)) + ")"
    raise _unstable(part, where, _way_out(part))


def _text(text: str, part: Any, where: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    try:
        # quote leaves `~` as it is; here it marks a shortened key.
        return "'" + quote(text, safe="").replace("~", "%7E") + "'"
    except UnicodeEncodeError:
        raise _unstable(part, where, "it has half a character (a lone surrogate): give a whole text") from None


def _way_out(part: Any) -> str:
    if part is None:
        return "leave it out, or name what is missing"
    if isinstance(part, float):
        return "give a whole number in the smallest unit, or a text"
    if isinstance(part, (set, frozenset)):
        return "a set has no order: give a sorted list"
    if isinstance(part, dict):
        return "give the values that identify it, each as a part"
    return "give its id, as a text or a whole number"


def _unstable(part: Any, where: str, way_out: str) -> KeyUnstable:
    return KeyUnstable(f"part {where} of the key is a {type(part).__name__}, which has no stable form; {way_out}")
