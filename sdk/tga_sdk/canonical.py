"""RFC 8785: one JSON value, one sequence of bytes. What the gateway refuses to write is refused here, too.

Sections of the RFC: literals 3.2.2.1, strings 3.2.2.2, numbers 3.2.2.3, order of members 3.2.3, UTF-8 3.2.4.
"""

from __future__ import annotations

import json
from typing import Any, Final

SAFE_INTEGER_MAX: Final = 2**53 - 1
LEVELS_MAX: Final = 64
"""So many lists and objects may stand inside each other; the gateway reads no more."""

# RFC 8785 writes doubles from here on with an exponent. Below, beyond the safe integers, they would be integers that
# a reader cannot tell from their neighbours.
_EXPONENT_FROM: Final = 1e21

_encode_plain = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode
_encode_text = json.JSONEncoder(ensure_ascii=False).encode


class NotCanonical(ValueError):
    """A value has no canonical form that every reader would understand in the same way."""


def canonical(value: Any) -> bytes:
    """The RFC 8785 bytes of a JSON value (dict, list, str, int, float, bool, None), or NotCanonical.

    Refused: NaN and infinities, integers beyond 2^53-1 and doubles that would be written as one, lone surrogates, NUL,
    keys that are not text, more than 64 levels, and whatever is not JSON (tuples among them). Equal values have equal
    bytes: 5.0 is written as 5.
    """
    if is_plain(value):
        return canonical_plain(value)
    return _encoded(_written(value, LEVELS_MAX), value)


def canonical_plain(value: Any) -> bytes:
    """The same for what `is_plain`: the standard library writes it as the RFC wants it, ten times faster."""
    return _encoded(_encode_plain(value), value)


def _encoded(text: str, value: Any) -> bytes:
    try:
        written = text.encode("utf-8")
    except UnicodeEncodeError:
        raise NotCanonical("a text holds a lone surrogate, which no encoding can write") from None
    if b"\\u0000" in written:
        _refuse_nul(value)
    return written


def is_plain(value: object, levels: int = LEVELS_MAX) -> bool:
    """Whether these are exactly JSON's types, and written alike by RFC 8785 and the standard library.

    Not plain, although JSON: keys beyond ASCII (their order is that of UTF-16), subclasses, doubles that the two write
    differently.
    """
    kind = type(value)
    if kind is dict:
        if not levels:
            return False
        for key, member in value.items():  # type: ignore[attr-defined]
            if type(key) is not str or not key.isascii():
                return False
            # Most members are text; asking here saves a call for each.
            if type(member) is not str and member is not None and not is_plain(member, levels - 1):
                return False
        return True
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return -SAFE_INTEGER_MAX <= value <= SAFE_INTEGER_MAX  # type: ignore[operator]
    if kind is float:
        return 1e-4 <= abs(value) <= SAFE_INTEGER_MAX and not value.is_integer()  # type: ignore[arg-type, attr-defined]
    if kind is list and levels:
        for item in value:  # type: ignore[attr-defined]  # noqa: SIM110 (a generator costs twice as much)
            if type(item) is not str and not is_plain(item, levels - 1):
                return False
        return True
    return False


def _written(value: Any, levels: int) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _encode_text(str.__str__(value))
    if isinstance(value, int):
        if not -SAFE_INTEGER_MAX <= value <= SAFE_INTEGER_MAX:
            raise NotCanonical("an integer is beyond 2^53-1, which a double cannot hold exactly: send it as text")
        return int.__repr__(value)
    if isinstance(value, float):
        return _number(value)
    if not isinstance(value, dict | list):
        raise NotCanonical(f"{type(value).__name__} is not a type of JSON")
    if not levels:
        raise NotCanonical(f"nested deeper than {LEVELS_MAX} levels")
    if isinstance(value, list):
        return f"[{','.join([_written(item, levels - 1) for item in value])}]"
    return f"{{{','.join(_members(value, levels - 1))}}}"


def _members(value: dict[Any, Any], levels: int) -> list[str]:
    for key in value:
        if not isinstance(key, str):
            raise NotCanonical(f"a key is {type(key).__name__} and not text")
    in_order = sorted(value, key=_utf16)
    return [f"{_encode_text(str.__str__(key))}:{_written(value[key], levels)}" for key in in_order]


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be", "surrogatepass")


def _number(value: float) -> str:
    """As ECMAScript writes it: the shortest digits that read back as this double, of which repr() knows them."""
    size = abs(value)
    if not (size <= SAFE_INTEGER_MAX or _EXPONENT_FROM <= size < float("inf")):
        raise NotCanonical(f"{float.__repr__(value)} is a number that JSON cannot hold, or not exactly")
    if not size:
        return "0"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent = float.__repr__(size).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    # The decimal point stands after so many of the digits.
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    if 0 < point <= 21:
        text = digits.ljust(point, "0") if len(digits) <= point else f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = f"0.{'0' * -point}{digits}"
    else:
        tail = f".{digits[1:]}" if len(digits) > 1 else ""
        text = f"{digits[0]}{tail}e{'+' if point > 0 else '-'}{abs(point - 1)}"
    return sign + text


def _refuse_nul(value: Any) -> None:
    if isinstance(value, str):
        if "\x00" in value:
            raise NotCanonical("a text holds NUL, which the gateway does not store")
    elif isinstance(value, dict):
        for key, member in value.items():
            _refuse_nul(key)
            _refuse_nul(member)
    elif isinstance(value, list):
        for item in value:
            _refuse_nul(item)
