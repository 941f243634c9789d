"""Strict JSON in (RFC 8259 without its ambiguities), RFC 8785 bytes out.

What `canonical_bytes` writes, `parse_json` reads, and writing that again gives the same bytes. What `parse_json`
accepts can be written, unless that takes more bytes than a document may have. What JSON libraries read differently
from one another is refused: repeated keys, NaN, overflow, integers that a double cannot hold, lone surrogates, NUL,
a byte order mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import orjson
import rfc8785

from app.core.errors import InputMalformed, InputTooLarge
from app.core.limits import (
    ARTIFACT_BYTES_MAX,
    DEPTH_MAX,
    DOCUMENT_BYTES_MAX,
    ENCLOSED_BYTES_MAX,
    ENCLOSED_KEYS_MAX,
    ENCLOSING_DEPTH,
    KEYS_MAX,
    NUMBER_CHARS_MAX,
    SAFE_INTEGER_MAX,
)

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
Embedded: TypeAlias = orjson.Fragment

# RFC 8785 writes doubles from here on with an exponent, so they read back as doubles and not as integers.
_EXPONENT_FROM = 1e21
_BACKSLASH = ord("\\")
# Without escapes a string is one run. Neither pattern can fail after a long match, so no text costs quadratic time.
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_STRING = re.compile(r'"[^"]*"?')
_BRACKETS = re.compile(r"[\[\]{}]")
_SUSPECT_ESCAPE = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
# What `read_canonical` leaves to the strict reader: a double (with a point, or with an exponent), an integer of more
# than fifteen digits, NUL, a key that is not ASCII. A text that only looks so is left to it, too. Each begins with one
# byte that is searched for quickly, and none can match in two ways: time is linear.
_FRACTION = re.compile(rb"\.[0-9]+(?:e[+-]?[0-9]+)?[,}\]]")
_EXPONENT = re.compile(rb"e[+-]?[0-9]+[,}\]]")
_LONG_INTEGER = re.compile(rb"[0-9]{16}[,}\]]")
_KEY_BEYOND_ASCII = re.compile(rb'"[^"\x80-\xff]*[\x80-\xff][^"]*":')
_ANY_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
_SIXTEEN_DIGITS = b"0" * 16
_QUICK_BYTES_MAX = 65_536


class _Strict:
    """The hooks of one parse: they count keys and refuse what the standard library would let through."""

    __slots__ = ("keys_left", "keys_max")

    def __init__(self, keys_max: int) -> None:
        self.keys_left = self.keys_max = keys_max

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self.keys_left -= len(pairs)
        if self.keys_left < 0:
            raise _too_many_keys(self.keys_max)
        members = dict(pairs)
        if len(members) != len(pairs):
            seen: set[str] = set()
            repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InputMalformed("a key is repeated in one object", found=_shown(repeated))
        return members

    def integer(self, text: str) -> int:
        if len(text) > NUMBER_CHARS_MAX:
            raise _number_too_long(text)
        value = int(text)
        if not -SAFE_INTEGER_MAX <= value <= SAFE_INTEGER_MAX:
            raise _number_unsafe(text)
        return value

    def real(self, text: str) -> float:
        if len(text) > NUMBER_CHARS_MAX:
            raise _number_too_long(text)
        value = float(text)
        if not _float_is_safe(value):
            raise _number_unsafe(text)
        return value

    def constant(self, text: str) -> NoReturn:
        raise InputMalformed("not a JSON number", found=text)


def parse_json(raw: bytes | str, *, bytes_max: int = DOCUMENT_BYTES_MAX, keys_max: int = KEYS_MAX) -> JsonValue:
    """The value of a strict JSON text, or InputMalformed or InputTooLarge; nothing else escapes.

    Takes memory proportional to `bytes_max`, whatever is sent.
    """
    if len(raw) > bytes_max:
        raise _document_too_large(bytes_max, len(raw))
    if type(raw) is bytes and (usual := _read_usual(raw)) is not None:
        return usual
    text = _decoded(raw, bytes_max)
    _refuse_depth(text)
    hooks = _Strict(keys_max)
    try:
        value: JsonValue = json.loads(
            text,
            object_pairs_hook=hooks.pairs,
            parse_int=hooks.integer,
            parse_float=hooks.real,
            parse_constant=hooks.constant,
        )
    except json.JSONDecodeError as error:
        raise InputMalformed("not JSON", found=f"{error.msg} at character {error.pos}") from None
    # Only an escape can bring a surrogate or NUL in: the decoder refused their raw bytes.
    if _SUSPECT_ESCAPE.search(text):
        _refuse_unwritable(value)
    return value


def _read_usual(raw: bytes) -> JsonValue:
    """What the hooks would give, where that can be told at once, three times quicker. None says nothing of the bytes:
    the hooks must, and word what is wrong.

    orjson keeps the last of repeated keys: then its value has fewer colons than the text, where no escape stands for
    one. What else it reads in another way (doubles, large integers) is not plain.
    """
    if len(raw) > _QUICK_BYTES_MAX:  # orjson takes more memory for many lists, and speed matters for short documents
        return None
    colons = raw.count(b":")
    if colons > KEYS_MAX or (_BACKSLASH in raw and b"\\u" in raw):
        return None
    try:
        value: JsonValue = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if not _is_plain(value, DEPTH_MAX) or orjson.dumps(value).count(b":") != colons:
        return None
    return value


def parse_object(
    raw: bytes | str, *, bytes_max: int = DOCUMENT_BYTES_MAX, keys_max: int = KEYS_MAX
) -> dict[str, JsonValue]:
    """As `parse_json`, for documents, which are always objects."""
    value = parse_json(raw, bytes_max=bytes_max, keys_max=keys_max)
    if not isinstance(value, dict):
        raise InputMalformed("not a JSON object", found=type(value).__name__)
    return value


def read_canonical(raw: bytes, *, bytes_max: int = DOCUMENT_BYTES_MAX, sorts: bool = True) -> dict[str, Any] | None:
    """The object that these bytes are the RFC 8785 form of, where that can be told at once. None says nothing of them:
    `parse_object` and `canonical_bytes` must, and do the same for whatever is accepted here, ten times slower.

    Writing it again gives the same bytes, so no key was repeated, nothing was spelled otherwise, and keys stood in
    order (unless `sorts` is False: then in any order). What orjson reads or writes in another way than RFC 8785 is not
    accepted.
    """
    if len(raw) > bytes_max or _may_be_unusual(raw):
        return None
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if type(value) is not dict or orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sorts else None) != raw:
        return None
    return value


def is_canonical_value(raw: bytes) -> bool:
    """Whether these bytes are the RFC 8785 form of one value, of whatever type; False says nothing of them."""
    if _may_be_unusual(raw):
        return False
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    # A number that stands alone is followed by nothing by which `_may_be_unusual` would know it.
    if type(value) is float or (type(value) is int and not -SAFE_INTEGER_MAX <= value <= SAFE_INTEGER_MAX):
        return False
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS) == raw


def _may_be_unusual(raw: bytes) -> bool:
    """Whether it may hold what orjson reads or writes in another way than RFC 8785, or more than a document may."""
    if raw.count(b"{") + raw.count(b"[") > DEPTH_MAX or _may_have_too_many_keys(raw):
        return True
    if _FRACTION.search(raw) or _EXPONENT.search(raw) or b"\\u0000" in raw:
        return True
    if _SIXTEEN_DIGITS in raw.translate(_ANY_DIGIT) and _LONG_INTEGER.search(raw):
        return True
    return not raw.isascii() and _KEY_BEYOND_ASCII.search(raw) is not None


def canonical_bytes(
    value: JsonValue, *, bytes_max: int = ARTIFACT_BYTES_MAX, keys_max: int = KEYS_MAX, depth: int = 0
) -> bytes:
    """RFC 8785 bytes of `value`, which stands so deep in a document, or InputMalformed or InputTooLarge.

    Bounded as reading is, so that nothing is stored that cannot be read again: a document that wraps an accepted
    one has more keys, and 1e15 is written with sixteen digits.

    rfc8785 is the authority. Plain documents (exact types, ASCII keys, safe integers, no floats) take orjson, which
    writes the same bytes for them several times faster; tests prove the two equal.
    """
    levels = DEPTH_MAX - depth
    written = _written_plain(value, levels) if _is_plain(value, levels) else _written_by_authority(value, levels)
    if len(written) > bytes_max:
        raise _document_too_large(bytes_max, len(written))
    if _may_have_too_many_keys(written, keys_max) and _count_keys(value) > keys_max:
        raise _too_many_keys(keys_max)
    return written


def measure_bytes(value: JsonValue) -> int:
    """How many bytes it takes, about, whatever its size and the number of its keys. For what was accepted in parts."""
    return len(orjson.dumps(value))


def canonical_enclosed(value: JsonValue, *, bytes_max: int = ENCLOSED_BYTES_MAX) -> bytes:
    """RFC 8785 bytes of what others wrote and what is to stand inside documents, or InputMalformed or InputTooLarge.

    Whatever passes leaves room for every document around it (ENCLOSING_DEPTH and the others): none of them can fail
    later, when part of the work is done.
    """
    return canonical_bytes(value, bytes_max=bytes_max, keys_max=ENCLOSED_KEYS_MAX, depth=ENCLOSING_DEPTH)


def embedded(value: JsonValue, *, depth: int) -> Embedded:
    """Foreign JSON as a member of what `canonical_members` writes: canonical already, and not looked at again."""
    return Embedded(canonical_bytes(value, depth=depth))


def canonical_members(
    members: Mapping[str, Any],
    *,
    unfold: Callable[[Any], Mapping[str, Any]] | None = None,
    bytes_max: int = ARTIFACT_BYTES_MAX,
) -> bytes | None:
    """RFC 8785 bytes of an object with ASCII keys whose members are text, safe integers, booleans, None, `embedded`
    values, lists of these, or what `unfold` makes such an object of. None: `canonical_bytes` must say what is wrong.

    Nothing is walked through here, so the caller answers for the members: typed fields, that is.
    """
    try:
        written = orjson.dumps(members, default=unfold, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return None
    if len(written) > bytes_max or _may_have_too_many_keys(written):
        return None
    if _BACKSLASH in written and b"\\u0000" in written:  # a search for one byte costs next to nothing
        return None
    return written


def _may_have_too_many_keys(written: bytes, keys_max: int = KEYS_MAX) -> bool:
    # A key takes four bytes at least, and is followed by these two; only a document with many of them needs an exact
    # count, and only a long one can have many.
    return len(written) > 4 * keys_max and written.count(b'":') > keys_max


def _written_plain(value: JsonValue, levels: int) -> bytes:
    try:
        written = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a lone surrogate
        raise _unwritable() from None
    if b"\\u0000" in written:  # NUL, or a backslash before the text u0000
        _refuse_unwritable(value, levels)
    return written


def _written_by_authority(value: JsonValue, levels: int) -> bytes:
    _refuse_unwritable(value, levels)
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError, RecursionError) as error:
        raise InputMalformed("no canonical form", found=type(error).__name__) from None


def _decoded(raw: bytes | str, bytes_max: int) -> str:
    try:
        if isinstance(raw, str):
            size = len(raw.encode("utf-8"))
            if size > bytes_max:
                raise _document_too_large(bytes_max, size)
            text = raw
        else:
            text = raw.decode("utf-8")
    except UnicodeError as error:
        raise InputMalformed("not UTF-8", found=f"{error.reason} at {error.start}") from None  # type: ignore[attr-defined]
    if text.startswith("\ufeff"):
        raise InputMalformed("a byte order mark stands before the JSON")
    return text


def _refuse_depth(text: str) -> None:
    # A text with few brackets cannot be deep, and most texts have few.
    if text.count("[") + text.count("{") <= DEPTH_MAX:
        return
    depth = 0
    for bracket in _BRACKETS.finditer(_STRING.sub("", _ESCAPE.sub("", text))):
        if bracket.group() in "[{":
            depth += 1
            if depth > DEPTH_MAX:
                raise _nested_too_deeply(DEPTH_MAX)
        else:
            depth -= 1


def _is_plain(value: object, depth_left: int) -> bool:
    kind = type(value)
    if kind is dict:
        if depth_left == 0:
            return False
        for key, member in value.items():  # type: ignore[attr-defined]
            if type(key) is not str or not key.isascii():
                return False
            # Most members are text; asking here saves a call for each.
            if type(member) is not str and member is not None and not _is_plain(member, depth_left - 1):
                return False
        return True
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return -SAFE_INTEGER_MAX <= value <= SAFE_INTEGER_MAX  # type: ignore[operator]
    if kind is list and depth_left > 0:
        # A loop: a generator costs more than the members of most lists.
        for member in value:  # type: ignore[attr-defined]  # noqa: SIM110
            if type(member) is not str and not _is_plain(member, depth_left - 1):
                return False
        return True
    return False


def _refuse_unwritable(value: JsonValue, levels: int = DEPTH_MAX) -> None:
    try:
        _walk(value, levels)
    except _TooDeep:
        raise _nested_too_deeply(levels) from None


class _TooDeep(Exception):
    pass


def _walk(value: JsonValue, depth_left: int) -> None:
    if isinstance(value, str):
        if "\x00" in value:
            raise InputMalformed("a string holds NUL (\\u0000)")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise _unwritable() from None
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int):
        if not -SAFE_INTEGER_MAX <= value <= SAFE_INTEGER_MAX:
            raise _number_unsafe("an integer of that size")
    elif isinstance(value, float):
        if not _float_is_safe(value):
            raise _number_unsafe(repr(value))
    elif depth_left == 0:
        raise _TooDeep
    elif isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise InputMalformed("a key is not a string", found=type(key).__name__)
            _walk(key, depth_left)
            _walk(member, depth_left - 1)
    elif isinstance(value, list):
        for member in value:
            _walk(member, depth_left - 1)
    else:
        raise InputMalformed("not a JSON value", found=type(value).__name__)


def _float_is_safe(value: float) -> bool:
    # 1e20 would be written as an integer that no reader may trust; 1e21 is written with an exponent.
    size = abs(value)
    return size <= SAFE_INTEGER_MAX or _EXPONENT_FROM <= size < float("inf")


def _count_keys(value: JsonValue) -> int:
    if isinstance(value, dict):
        return len(value) + sum(_count_keys(member) for member in value.values())
    if isinstance(value, list):
        return sum(_count_keys(member) for member in value)
    return 0


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 64 else text[:64] + "…")


def _document_too_large(bytes_max: int, size_bytes: int) -> InputTooLarge:
    return InputTooLarge("the document is too large", expected=f"at most {bytes_max} bytes", found=size_bytes)


def _nested_too_deeply(levels: int) -> InputTooLarge:
    return InputTooLarge("nested too deeply", expected=f"at most {levels} levels")


def _too_many_keys(keys_max: int = KEYS_MAX) -> InputTooLarge:
    return InputTooLarge("too many keys", expected=f"at most {keys_max} in a document")


def _number_too_long(text: str) -> InputTooLarge:
    return InputTooLarge("a number is too long", expected=f"at most {NUMBER_CHARS_MAX} characters", found=len(text))


def _number_unsafe(text: str) -> InputMalformed:
    return InputMalformed("a number that a double cannot hold exactly or at all", found=_shown(text))


def _unwritable() -> InputMalformed:
    return InputMalformed("a string holds a lone surrogate")
