"""Digests: lowercase hex SHA-256 over RFC 8785 bytes."""

from __future__ import annotations

import hashlib
from typing import Final, NewType

from app.core.canonical import JsonValue, canonical_bytes

Digest = NewType("Digest", str)

GENESIS: Final = Digest("0" * 64)


_EMPTY: Final = hashlib.sha256()  # copied, which costs less than asking OpenSSL for the algorithm each time


def digest_of_bytes(data: bytes) -> Digest:
    state = _EMPTY.copy()
    state.update(data)
    return Digest(state.hexdigest())


def digest_of(value: JsonValue) -> Digest:
    return digest_of_bytes(canonical_bytes(value))
