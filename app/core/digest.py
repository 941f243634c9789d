"""Digests: lowercase hex SHA-256 over RFC 8785 bytes."""

from __future__ import annotations

import hashlib
from typing import Final, NewType

from app.core.canonical import JsonValue, canonical_bytes

Digest = NewType("Digest", str)

GENESIS: Final = Digest("0" * 64)


def digest_of_bytes(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())


def digest_of(value: JsonValue) -> Digest:
    return digest_of_bytes(canonical_bytes(value))
