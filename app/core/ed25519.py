"""Ed25519 signatures (RFC 8032): whose key, and does it fit."""

from __future__ import annotations

import base64
import hashlib
from typing import Final, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64

# The points of small order, without their sign bit, canonical or not. Under such a "key" one signature fits many
# messages, so that the person who registers it could disown what they signed. OpenSSL takes them; we do not.
_SMALL_ORDER: Final = frozenset(
    bytes.fromhex(point)
    for point in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)


class Signature(Protocol):
    """What is looked at of a signature: its 64 bytes in base64."""

    @property
    def value(self) -> str: ...


def key_id_of(public_key: bytes) -> str:
    """The name of a public key (its 32 raw bytes): short enough to read out, long enough not to be hit by chance."""
    return f"ed25519:{hashlib.sha256(public_key).hexdigest()[:16]}"


def is_usable_public_key(public_key: bytes) -> bool:
    """Whether it is a key to register: 32 bytes, and not one of those under which a signature binds to nothing."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        return False
    return public_key[:-1] + bytes([public_key[-1] & 0x7F]) not in _SMALL_ORDER


def verify_signature(public_key: bytes, signature: Signature, message: bytes) -> bool:
    """Whether `signature` is by the owner of `public_key` (32 raw bytes) over exactly `message`.

    Never raises, whatever it is given. It does not look at `signature.key_id`: which public key that names is for the
    caller to know, and a key id that names another key leads to one that does not fit.
    """
    try:
        value = base64.b64decode(signature.value, validate=True)
        if (
            len(value) != SIGNATURE_BYTES
            or base64.b64encode(value).decode("ascii") != signature.value  # one signature, one spelling
            or not is_usable_public_key(public_key)
        ):
            return False
        Ed25519PublicKey.from_public_bytes(public_key).verify(value, message)
    except (InvalidSignature, ValueError, TypeError, AttributeError):
        return False
    return True
