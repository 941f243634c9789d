"""The gateway's own keys: one to sign with (Ed25519), one to seal with (AES-256-GCM).

They live in a folder of mode 0700, one line of base64 in a file of mode 0600 each, or come from the environment:

| key     | file          | variable          | retired ones                 | what retired ones are for            |
|---------|---------------|-------------------|------------------------------|--------------------------------------|
| signing | `signing.key` | `TGA_SIGNING_KEY` | `signing.<key id>.retired`   | the record; their public keys verify |
| sealing | `sealing.key` | `TGA_SEALING_KEY` | `sealing.<key id>.retired`   | they still open what they sealed     |

A key from the environment comes before the file, which is then neither made nor needed; a sealing key in the folder
still opens what it sealed. Key material is in no repr, error or log, and is not kept as bytes after it was read.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from app.core.ed25519 import key_id_of
from app.core.errors import SecretMissing, SettingInvalid
from app.domain.ledger.documents import Signature
from app.keys.key_files import decoded, load_or_make, read_key, rotated, verify_private

SIGNING_VARIABLE: Final = "TGA_SIGNING_KEY"
SEALING_VARIABLE: Final = "TGA_SEALING_KEY"

_SIGNING_FILE = "signing.key"
_SEALING_FILE = "sealing.key"
_RETIRED_SEALING = "sealing.*.retired"

# A sealed value: version, which key, nonce, ciphertext with its tag. The nonce is random, which is safe for 2^32 values
# under one key: long before that, rotate.
_VERSION = b"\x01"
_KEY_ID_BYTES = 8
_NONCE_BYTES = 12
_TAG_BYTES = 16
_HEADER_BYTES = len(_VERSION) + _KEY_ID_BYTES


class Unsealer:
    """Opens what was sealed with the keys that are in the folder or in the environment; makes none."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._given_openers: dict[bytes, AESGCM] = {}
        if environment.get(SEALING_VARIABLE):
            given = decoded(environment[SEALING_VARIABLE], SEALING_VARIABLE)
            self._given_openers = {_sealing_key_id(given): AESGCM(given)}
        self._openers = self._load_openers()

    @classmethod
    def find(cls, folder: Path, environment: Mapping[str, str] | None = None) -> Unsealer | None:
        """None where there is no sealing key. SettingInvalid when others could read or replace one."""
        with _files_explained(folder):
            found = Unsealer(folder, os.environ if environment is None else environment)
        return found if found._openers else None

    def unseal(self, sealed: bytes, *, context: str) -> bytes:
        """What was sealed in this context, whole, or SecretMissing."""
        version, key_id = sealed[: len(_VERSION)], sealed[len(_VERSION) : _HEADER_BYTES]
        if version != _VERSION or len(sealed) < _HEADER_BYTES + _NONCE_BYTES + _TAG_BYTES:
            raise SecretMissing("not a sealed value of this version", found=f"{len(sealed)} bytes")
        opener = self._openers.get(key_id) or self._reloaded_openers().get(key_id)
        if opener is None:
            raise SecretMissing("the key that sealed the value is not in the folder", expected=f"key {key_id.hex()}")
        nonce, ciphertext = sealed[_HEADER_BYTES : _HEADER_BYTES + _NONCE_BYTES], sealed[_HEADER_BYTES + _NONCE_BYTES :]
        try:
            return opener.decrypt(nonce, ciphertext, context.encode("utf-8"))
        except InvalidTag:
            raise SecretMissing(
                "the sealed value was changed, or was sealed for another place",
                remedy="Restore the row from a backup; the key is the right one.",
            ) from None

    def _load_openers(self) -> dict[bytes, AESGCM]:
        openers = dict(self._given_openers)
        if self._folder.is_dir():
            verify_private(self._folder)
            for file in (self._folder / _SEALING_FILE, *sorted(self._folder.glob(_RETIRED_SEALING))):
                raw = read_key(file)
                if raw is not None:
                    openers[_sealing_key_id(raw)] = AESGCM(raw)
        return openers

    def _reloaded_openers(self) -> dict[bytes, AESGCM]:
        # Keys that were once read stay: a folder that is away for a moment must not take them.
        with suppress(OSError):
            self._openers = {**self._openers, **self._load_openers()}
        return self._openers


class Keyring(Unsealer):
    """Signs, seals and opens. One process may rotate while others run: they go on with the keys they have, and read
    the folder again when they meet a value that was sealed with a newer one."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(folder, environment)
        self._signing_is_given = bool(environment.get(SIGNING_VARIABLE))
        self._sealing_is_given = bool(self._given_openers)
        if self._signing_is_given:
            self._use_signing(decoded(environment[SIGNING_VARIABLE], SIGNING_VARIABLE))
        else:
            self._use_signing(load_or_make(folder, _SIGNING_FILE))
        if self._sealing_is_given:
            (self._sealing_id,) = self._given_openers
        else:
            self._sealing_id = _sealing_key_id(load_or_make(folder, _SEALING_FILE))
        self._openers = self._load_openers()

    @classmethod
    def open(cls, folder: Path, environment: Mapping[str, str] | None = None) -> Self:
        """The keys, made and durable if there were none. However many start at once, they end with the same keys.

        SettingInvalid when others could read or replace a key, or when what is there is none.
        """
        with _files_explained(folder):
            return cls(folder, os.environ if environment is None else environment)

    def __repr__(self) -> str:
        return f"Keyring(signing={self._key_id}, sealing={self._sealing_id.hex()})"

    @property
    def key_id(self) -> str:
        """The name of the signing key that is in use."""
        return self._key_id

    @property
    def public_key_bytes(self) -> bytes:
        """The 32 raw bytes that verify what `sign` signs."""
        return self._public_key

    @property
    def sealing_key_id(self) -> str:
        """Which key seals now; it also stands at the head of every value that it sealed."""
        return self._sealing_id.hex()

    def sign(self, message: bytes) -> Signature:
        value = base64.b64encode(self._signing.sign(message)).decode("ascii")
        return Signature(algorithm="Ed25519", key_id=self._key_id, value=value)

    def seal(self, plaintext: bytes, *, context: str) -> bytes:
        """Encrypted so that only this keyring opens it, and only in the same context (say: the stream and the field):
        a sealed value that someone moves elsewhere does not open there. Its length is not hidden."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._openers[self._sealing_id].encrypt(nonce, plaintext, context.encode("utf-8"))
        return _VERSION + self._sealing_id + nonce + sealed

    def rotate_signing(self) -> str:
        """A new signing key; the old one is kept as retired. Returns the new key id, which is not yet announced."""
        if self._signing_is_given:
            raise _given_elsewhere(SIGNING_VARIABLE)
        raw = rotated(self._folder, _SIGNING_FILE, lambda old: key_id_of(_public_of(old)).partition(":")[2])
        self._use_signing(raw)
        return self._key_id

    def rotate_sealing(self) -> str:
        """A new sealing key; the old one stays beside it and opens what it sealed. Returns the new key's id."""
        if self._sealing_is_given:
            raise _given_elsewhere(SEALING_VARIABLE)
        raw = rotated(self._folder, _SEALING_FILE, lambda old: _sealing_key_id(old).hex())
        self._openers = self._load_openers()
        self._sealing_id = _sealing_key_id(raw)
        return self._sealing_id.hex()

    def _use_signing(self, raw: bytes) -> None:
        self._signing = Ed25519PrivateKey.from_private_bytes(raw)
        self._public_key = self._signing.public_key().public_bytes_raw()
        self._key_id = key_id_of(self._public_key)


@contextmanager
def _files_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingInvalid(
            "the keys cannot be read or made",
            found=f"{error.filename or folder}: {error.strerror}",
            remedy="Name a folder of your own in TGA_KEYS, or give the keys in the environment.",
        ) from None


def _public_of(raw: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(raw).public_key().public_bytes_raw()


def _sealing_key_id(raw: bytes) -> bytes:
    # One way, and of 256 random bits: it tells nothing of the key.
    return hashlib.sha256(b"tga sealing key\n" + raw).digest()[:_KEY_ID_BYTES]


def _given_elsewhere(variable: str) -> SettingInvalid:
    return SettingInvalid(
        f"the key comes from {variable} and is rotated there",
        remedy=f"Set {variable} to a new key and start again; keep an old sealing key as sealing.<name>.retired.",
    )
