"""Secret arguments: taken out of a call before it is recorded, put back before it is sent.

What is recorded in their place is `{"$redacted": {"commitment": ...}}`, where the commitment is, in hex,

    HMAC-SHA256(salt, pointer + "\\n" + canonical value)

The salt is 32 random bytes of the trace, sealed with the values: without it a short value cannot be guessed from its
commitment. The pointer is part of the message so that equal values at two places do not look equal. Canonical JSON
holds no line feed, so the last one in the message always parts the two.

Places are JSON pointers (RFC 6901). Nothing here has a clock, randomness or I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from app.core.canonical import JsonValue, canonical_bytes, parse_object
from app.core.errors import ArgumentsInvalid, SecretMissing, SettingInvalid
from app.core.limits import ARTIFACT_BYTES_MAX, REDACTION_SALT_BYTES
from app.domain.tools import REDACTED

COMMITMENT: Final = "commitment"

_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)*", re.DOTALL)
_INDEX = re.compile(r"0|[1-9][0-9]*")
_INDEX_CHARS_MAX = 10
MAY_BE_SECRET: Final = b'"$redacted"'  # canonical bytes without this hold no commitment
_MARKER = b'{"$redacted":{"commitment":"'  # as RFC 8785 writes one; in a string the quotation marks would be escaped
_HEX = re.compile(r"[0-9a-f]{64}")


def verify_pointer(pointer: str) -> None:
    """Raise SettingInvalid unless `pointer` is a JSON pointer; the empty one stands for all arguments."""
    if not _POINTER.fullmatch(pointer):
        raise SettingInvalid(
            "not a JSON pointer (RFC 6901)",
            expected="/name, or /name/0; `~` written as ~0 and `/` as ~1",
            found=pointer,
        )


def find_secrets(arguments: dict[str, JsonValue], pointers: Iterable[str]) -> dict[str, JsonValue]:
    """The values at `pointers`, by pointer. Skips paths that lead nowhere, and paths inside the value of another
    pointer, which is taken whole."""
    found: dict[str, JsonValue] = {}
    outermost: set[tuple[str, ...]] = set()
    for tokens, pointer in sorted((_tokens(pointer), pointer) for pointer in set(pointers)):
        if any(tokens[:length] in outermost for length in range(len(tokens))):
            continue
        try:
            found[pointer] = _value_at(arguments, tokens)
        except LookupError:
            continue
        outermost.add(tokens)
    return found


def redact(arguments: dict[str, JsonValue], secrets: Mapping[str, JsonValue], *, salt: bytes) -> dict[str, JsonValue]:
    """A copy in which a commitment stands for each secret (as `find_secrets` gives them); `arguments` stay as they
    are, and what was not replaced is shared with the copy."""
    _verify_salt(salt)
    redacted: JsonValue = arguments
    for pointer, value in secrets.items():
        commitment = _commitment(pointer, value, salt)
        try:
            redacted = _replaced(redacted, _tokens(pointer), {REDACTED: {COMMITMENT: commitment}})
        except LookupError:
            raise SecretMissing("there is nothing to redact at this place", found=pointer) from None
    return _object(redacted)


def reveal(redacted: dict[str, JsonValue], values: Mapping[str, JsonValue], *, salt: bytes) -> dict[str, JsonValue]:
    """What was redacted, or SecretMissing: each value must be the one that the record commits to, at its place.

    It replaces the places that `values` names and no others: that these are all of them is the seal's promise.
    """
    _verify_salt(salt)
    revealed: JsonValue = redacted
    for pointer, value in values.items():
        tokens = _tokens(pointer)
        committed = _committed_at(redacted, tokens)
        if committed is None:
            raise SecretMissing("the record holds no commitment at this place", found=pointer)
        if not hmac.compare_digest(committed, _commitment(pointer, value, salt)):
            raise SecretMissing("the sealed value is not the one that the record commits to", found=pointer)
        revealed = _replaced(revealed, tokens, value)
    return _object(revealed)


def find_commitments(redacted: dict[str, JsonValue], pointers: Iterable[str]) -> list[str]:
    """Those of `pointers` at which a commitment stands, and not a value."""
    return [pointer for pointer in pointers if _committed_at(redacted, _tokens(pointer)) is not None]


def find_redactions(value: JsonValue) -> list[str]:
    """Every place at which a commitment stands, and not a value."""
    found: list[str] = []
    waiting: list[tuple[tuple[str, ...], JsonValue]] = [((), value)]
    while waiting:
        tokens, one = waiting.pop()
        if _commitment_in(one) is not None:
            found.append("".join(f"/{token.replace('~', '~0').replace('/', '~1')}" for token in tokens))
        elif isinstance(one, dict):
            waiting += [((*tokens, name), member) for name, member in one.items()]
        elif isinstance(one, list):
            waiting += [((*tokens, str(index)), member) for index, member in enumerate(one)]
    return sorted(found)


def verify_redactions(recorded: dict[str, JsonValue], written: bytes, secrets: Iterable[str]) -> None:
    """Raise ArgumentsInvalid where a caller's own argument looks like a commitment: a record must not be able to claim
    that something is sealed which is not. `written` are canonical bytes in which `recorded` stands."""
    if _MARKER not in written:
        return
    if others := [place for place in find_redactions(recorded) if place not in set(secrets)]:
        raise ArgumentsInvalid(
            f"{REDACTED} is what the record shows in place of a secret argument",
            expected="another value, or the path among the tool's secret_arguments",
            found=others[0][:128],
        )


def seal_context(stream: str, what: Literal["salt", "values"]) -> str:
    """The context that sealed bytes are bound to: under another stream or purpose they do not open."""
    return f"{stream} {what}"


def salt_document(salt: bytes, pointers: Iterable[str]) -> bytes:
    """What is sealed beside the values: the salt, and the places where commitments under it stand."""
    return canonical_bytes({"salt": salt.hex(), "pointers": list(pointers)})


def salt_from(document: bytes) -> tuple[bytes, list[str]]:
    """The salt and the places of what `salt_document` wrote."""
    match parse_object(document):
        case {"salt": str(salt), "pointers": list(pointers)}:
            return bytes.fromhex(salt), [str(pointer) for pointer in pointers]
    raise SecretMissing("the sealed salt cannot be read")


def sealed_document(values: Mapping[str, JsonValue]) -> bytes:
    """What is sealed: canonical JSON of values by pointer."""
    return canonical_bytes(dict(values))


def values_from(document: bytes) -> dict[str, JsonValue]:
    """The values by pointer of what `sealed_document` wrote."""
    values = parse_object(document, bytes_max=ARTIFACT_BYTES_MAX)
    for pointer in values:
        verify_pointer(pointer)
    return values


def _verify_salt(salt: bytes) -> None:
    if len(salt) != REDACTION_SALT_BYTES:
        raise SecretMissing(
            "the salt of the commitments is not whole", expected=f"{REDACTION_SALT_BYTES} bytes", found=len(salt)
        )


def _commitment(pointer: str, value: JsonValue, salt: bytes) -> str:
    message = pointer.encode("utf-8") + b"\n" + canonical_bytes(value)
    return hmac.new(salt, message, hashlib.sha256).hexdigest()


def _tokens(pointer: str) -> tuple[str, ...]:
    verify_pointer(pointer)
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:])


def _value_at(value: JsonValue, tokens: tuple[str, ...]) -> JsonValue:
    for token in tokens:
        if isinstance(value, dict):
            value = value[token]
        elif isinstance(value, list):
            value = value[_index(token)]
        else:
            raise LookupError(token)
    return value


def _replaced(value: JsonValue, tokens: tuple[str, ...], new: JsonValue) -> JsonValue:
    if not tokens:
        return new
    token, rest = tokens[0], tokens[1:]
    if isinstance(value, dict):
        return {**value, token: _replaced(value[token], rest, new)}
    if isinstance(value, list):
        index = _index(token)
        return [*value[:index], _replaced(value[index], rest, new), *value[index + 1 :]]
    raise LookupError(token)


def _index(token: str) -> int:
    # RFC 6901, section 4: no leading zeros; `-` is the place after the last, where nothing is.
    if len(token) > _INDEX_CHARS_MAX or not _INDEX.fullmatch(token):
        raise LookupError(token)
    return int(token)


def _committed_at(redacted: JsonValue, tokens: tuple[str, ...]) -> str | None:
    try:
        return _commitment_in(_value_at(redacted, tokens))
    except LookupError:
        return None


def _commitment_in(marker: JsonValue) -> str | None:
    inner = marker[REDACTED] if isinstance(marker, dict) and marker.keys() == {REDACTED} else None
    commitment = inner[COMMITMENT] if isinstance(inner, dict) and inner.keys() == {COMMITMENT} else None
    return commitment if isinstance(commitment, str) and _HEX.fullmatch(commitment) else None


def _object(value: JsonValue) -> dict[str, JsonValue]:
    if not isinstance(value, dict):
        raise SecretMissing("arguments are an object", found=type(value).__name__)
    return value
