"""A signature fits one key and one message, and nothing that anyone sends makes the check raise."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from app.core.ed25519 import is_usable_public_key, key_id_of, verify_signature
from app.domain.ledger.documents import Signature

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
PUBLIC = KEY.public_key().public_bytes_raw()


def signature_of(value: bytes) -> Signature:
    return Signature(algorithm="Ed25519", key_id=key_id_of(PUBLIC), value=base64.b64encode(value).decode())


def test_the_first_vector_of_rfc_8032_verifies() -> None:
    public = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    value = bytes.fromhex(
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )
    assert verify_signature(public, signature_of(value), b"")
    assert not verify_signature(public, signature_of(value), b"\0")


@given(st.binary(max_size=100), st.integers(0, 511), st.integers(0, 255))
def test_any_flipped_bit_is_found(message: bytes, bit: int, key_bit: int) -> None:
    value = KEY.sign(message)
    assert verify_signature(PUBLIC, signature_of(value), message)
    flipped = bytearray(value)
    flipped[bit // 8] ^= 1 << bit % 8
    assert not verify_signature(PUBLIC, signature_of(bytes(flipped)), message)
    other = bytearray(PUBLIC)
    other[key_bit // 8] ^= 1 << key_bit % 8
    assert not verify_signature(bytes(other), signature_of(value), message)
    assert not verify_signature(PUBLIC, signature_of(value), message + b"x")


_anything = st.none() | st.integers() | st.text() | st.binary() | st.lists(st.integers()) | st.floats()


@given(_anything, _anything, _anything, _anything)
def test_nothing_makes_it_raise(public_key: Any, value: Any, message: Any, whole: Any) -> None:
    made = Signature.model_construct(algorithm="Ed25519", key_id="k", value=value)
    assert verify_signature(public_key, made, message) is False
    assert verify_signature(PUBLIC, made, b"m") is False
    assert verify_signature(PUBLIC, whole, b"m") is False
    if not isinstance(message, bytes):
        assert verify_signature(PUBLIC, signature_of(KEY.sign(b"m")), message) is False


def test_a_signature_has_one_spelling() -> None:
    written = signature_of(KEY.sign(b"m")).value
    last = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    other = written[:-3] + last[last.index(written[-3]) ^ 1] + "=="
    assert base64.b64decode(other) == base64.b64decode(written)
    respelled = Signature(algorithm="Ed25519", key_id="k", value=other)
    assert not verify_signature(PUBLIC, respelled, b"m")


@pytest.mark.parametrize("sign_bit", [0, 0x80])
@pytest.mark.parametrize(
    "point",
    [
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    ],
)
def test_a_key_under_which_one_signature_fits_many_messages_is_none(point: str, sign_bit: int) -> None:
    raw = bytearray.fromhex(point)
    raw[-1] |= sign_bit
    forged = (b"\x01" + bytes(31)) + bytes(32)  # the neutral point, and zero
    taken_by_openssl = 0
    for number in range(64):
        message = str(number).encode()
        assert not verify_signature(bytes(raw), signature_of(forged), message)
        try:
            Ed25519PublicKey.from_public_bytes(bytes(raw)).verify(forged, message)
            taken_by_openssl += 1
        except (InvalidSignature, ValueError):
            continue
    assert not is_usable_public_key(bytes(raw))
    if point == "01" + "00" * 31 and not sign_bit:
        assert taken_by_openssl == 64, "the library refuses them by now: the list is no longer needed"
