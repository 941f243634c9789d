"""A supervisor's own key: made here, kept by its owner, and used to sign a decision before it leaves this machine.

A private key is one line of base64 (32 bytes, Ed25519) in a file that only its owner can read, as the gateway keeps its
own; its public half stands beside it in `.pub`.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.core.ed25519 import key_id_of
from app.core.errors import SettingInvalid
from app.core.limits import KEY_FILE_BYTES_MAX
from app.domain.ledger.documents import Signature
from app.domain.runs.documents import RunAnswer
from app.domain.tga.documents import SupervisorDecision
from app.keys.key_files import decoded, read_key


def make_key(path: Path) -> str:
    """Write a new key to `path` and its public half to `path.pub`, and return its id. What is there is not touched."""
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    _write_new(path, private.private_bytes_raw(), mode=0o600)
    _write_new(path.with_name(f"{path.name}.pub"), public, mode=0o644)
    return key_id_of(public)


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """SettingInvalid when it cannot be read, is no key, or can be read by others. What it holds is not shown."""
    try:
        raw = read_key(path)
    except OSError as error:
        raise SettingInvalid(f"{path} cannot be read", found=error.strerror) from None
    if raw is None:
        raise SettingInvalid(f"there is no {path}", remedy="Name the file with your key; `tga keys make` makes one.")
    return Ed25519PrivateKey.from_private_bytes(raw)


def load_public_key(path: Path) -> bytes:
    """The 32 bytes that a `.pub` file holds; whether they are a key is for who registers them to say."""
    try:
        with path.open("rb") as file:
            written = file.read(KEY_FILE_BYTES_MAX)
    except OSError as error:
        raise SettingInvalid(f"{path} cannot be read", found=error.strerror) from None
    return decoded(written.decode("ascii", "replace"), str(path))


def signed(decision: SupervisorDecision | RunAnswer, key: Ed25519PrivateKey) -> Signature:
    value = base64.b64encode(key.sign(decision.signed_bytes())).decode("ascii")
    return Signature(algorithm="Ed25519", key_id=key_id_of(key.public_key().public_bytes_raw()), value=value)


def _write_new(path: Path, raw: bytes, *, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(base64.b64encode(raw) + b"\n")
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise SettingInvalid(f"{path} cannot be made", found=error.strerror, remedy="Name a new file.") from None
