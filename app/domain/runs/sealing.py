"""Secret values of a run: sealed bytes for the blob store, and a commitment for the journal.

The sealed bytes are a blob like any other, under their own digest; sealed twice, the same value has two digests, so the
store tells nobody that two values are equal. The commitment is, in hex,

    HMAC-SHA256(salt, path + "\\n" + canonical value)

under the run's salt, as for secret arguments of a tool call: whoever has the salt can check an opened value against the
journal, and nobody else can guess a short one. Sealed bytes open only as what they were sealed as: the value of this
run at this address.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple, Protocol

from app.core.canonical import JsonValue, canonical_bytes, parse_object
from app.core.errors import SecretMissing

_VALUE = "value"


class Seals(Protocol):
    """AES-256-GCM under a key that is not in the database; `context` says what the sealed thing is."""

    def seal(self, plaintext: bytes, *, context: str) -> bytes: ...

    def unseal(self, sealed: bytes, *, context: str) -> bytes: ...


class SealedSecret(NamedTuple):
    """`sealed` goes to the blob store, `commitment` stands in the journal."""

    sealed: bytes
    commitment: str


def seal_secret(seals: Seals, value: JsonValue, *, stream: str, path: str, salt: bytes) -> SealedSecret:
    """Nothing of the value can be read from what this returns without the sealing key."""
    document = canonical_bytes({_VALUE: value})
    return SealedSecret(seals.seal(document, context=_context(stream, path)), _commitment(path, value, salt))


def open_secret(seals: Seals, secret: SealedSecret, *, stream: str, path: str, salt: bytes) -> JsonValue:
    """The value, or SecretMissing: the key is not here, the bytes are of another place, or others than committed to."""
    try:
        value = parse_object(seals.unseal(secret.sealed, context=_context(stream, path)))[_VALUE]
    except (KeyError, ValueError):
        raise SecretMissing("the sealed value cannot be read", stream=stream) from None
    if not hmac.compare_digest(_commitment(path, value, salt), secret.commitment):
        raise SecretMissing("the sealed value is not the one that the journal commits to", stream=stream)
    return value


def _context(stream: str, path: str) -> str:
    return f"{stream} {path} secret"


def _commitment(path: str, value: JsonValue, salt: bytes) -> str:
    return hmac.new(salt, path.encode("utf-8") + b"\n" + canonical_bytes(value), hashlib.sha256).hexdigest()
