"""Signed notes, tree heads and proofs as text, as C2SP writes them: signed-note, tlog-checkpoint, tlog-proof.

What C2SP calls a checkpoint is a *tree head* here. Signing and verifying are given as functions: no key is here.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from app.core.errors import NoteInvalid
from app.core.limits import NOTE_BYTES_MAX, NOTE_SIGNATURES_MAX
from app.core.merkle import HASH_BYTES, TREE_SIZE_MAX, Hash

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes, bytes], bool]  # public key, signature, message

ED25519: Final = 0x01
PROOF_HEADER: Final = "c2sp.org/tlog-proof@v1"
_PUBLIC_KEY_BYTES = 32
_KEY_ID_BYTES = 4
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")
_NAME = re.compile(r"[^\s+]+")
_SIGNATURE_LINE = re.compile(r"— (?P<name>[^\s+]+) (?P<signature>[A-Za-z0-9+/=]+)")


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """Whose signature is looked for: a key's name and the key. As text: `name+key id+base64(type, public key)`."""

    name: str
    public_key: bytes

    @property
    def key_id(self) -> bytes:
        named = self.name.encode("utf-8") + b"\n" + bytes([ED25519]) + self.public_key
        return hashlib.sha256(named).digest()[:_KEY_ID_BYTES]

    def to_text(self) -> str:
        return f"{self.name}+{self.key_id.hex()}+{_base64(bytes([ED25519]) + self.public_key)}"

    @classmethod
    def from_text(cls, text: str) -> VerifierKey:
        """The key, or NoteInvalid; its id must be the one that follows from the rest."""
        name, key_id, encoded = [*text.strip().split("+", 2), "", ""][:3]
        raw = _decoded(encoded, "the key")
        if not _NAME.fullmatch(name) or len(raw) != 1 + _PUBLIC_KEY_BYTES or raw[0] != ED25519:
            raise NoteInvalid("that is no Ed25519 verifier key", expected="name+8 hex digits+base64")
        key = cls(name, raw[1:])
        if key.key_id.hex() != key_id:
            raise NoteInvalid("the verifier key's id is not its own", expected=key.key_id.hex(), found=key_id[:16])
        return key


@dataclass(frozen=True, slots=True)
class TreeHead:
    """A tree's size and root, for the log that its origin names."""

    origin: str
    size: int
    root: Hash

    def to_text(self) -> str:
        return f"{self.origin}\n{self.size}\n{_base64(self.root)}\n"

    @classmethod
    def from_text(cls, text: str) -> TreeHead:
        """The head in a note's text; extension lines, which no gateway writes, are refused."""
        lines = text.split("\n")
        if len(lines) != 4 or lines[3] or not lines[0]:
            raise NoteInvalid("that is no tree head", expected="origin, size and root, a line each")
        size = _number(lines[1], "the tree size")
        root = _decoded(lines[2], "the root")
        if len(root) != HASH_BYTES:
            raise NoteInvalid("the root is no SHA-256", expected=f"{HASH_BYTES} bytes", found=len(root))
        return cls(lines[0], size, Hash(root))


def sign_note(text: str, key: VerifierKey, sign: Sign) -> str:
    """The text, a blank line, and one signature line."""
    return f"{text}\n— {key.name} {_base64(key.key_id + sign(text.encode('utf-8')))}\n"


def open_note(note: str | bytes, keys: Sequence[VerifierKey], verify: Verify) -> str:
    """The note's text, if one of `keys` has signed it; else NoteInvalid.

    Signatures of unknown keys are passed over; a wrong one under a known key spoils the whole note.
    """
    text, signatures = _split_note(note)
    known: Mapping[tuple[str, bytes], VerifierKey] = {(key.name, key.key_id): key for key in keys}
    verified = False
    for name, key_id, signature in signatures:
        key = known.get((name, key_id))
        if key is None:
            continue
        if not verify(key.public_key, signature, text.encode("utf-8")):
            raise NoteInvalid("a signature under a known key does not fit", found=f"{name}+{key_id.hex()}")
        verified = True
    if not verified:
        raise NoteInvalid(
            "no known key has signed this",
            expected=" or ".join(f"{key.name}+{key.key_id.hex()}" for key in keys) or "a key",
            found=", ".join(f"{name[:64]}+{key_id.hex()}" for name, key_id, _ in signatures[:4]),
        )
    return text


def read_note(note: str | bytes) -> tuple[str, list[tuple[str, bytes]]]:
    """The text, and name and key id of each who is said to have signed it. Nothing is verified: see `open_note`."""
    text, signatures = _split_note(note)
    return text, [(name, key_id) for name, key_id, _ in signatures]


def _split_note(note: str | bytes) -> tuple[str, list[tuple[str, bytes, bytes]]]:
    try:
        written = note.decode("utf-8") if isinstance(note, bytes) else note
        size = len(written.encode("utf-8"))
    except UnicodeError:
        raise NoteInvalid("a note is UTF-8") from None
    if size > NOTE_BYTES_MAX:
        raise NoteInvalid("the note is too long", expected=f"{NOTE_BYTES_MAX} bytes at most", found=size)
    if any(ord(sign) < 0x20 and sign != "\n" for sign in written):
        raise NoteInvalid("a note has no control characters")
    text, blank, rest = written.rpartition("\n\n")
    lines = rest.split("\n")
    if not blank or lines.pop() or not lines or len(lines) > NOTE_SIGNATURES_MAX:
        raise NoteInvalid("that is no signed note", expected="text, a blank line, 1 or more signature lines")
    return text + "\n", [_signature(line) for line in lines]


def _signature(line: str) -> tuple[str, bytes, bytes]:
    match = _SIGNATURE_LINE.fullmatch(line)
    if match is None:
        raise NoteInvalid("that is no signature line", expected="— name base64")
    raw = _decoded(match["signature"], "the signature")
    if len(raw) <= _KEY_ID_BYTES:
        raise NoteInvalid("the signature is too short")
    return match["name"], raw[:_KEY_ID_BYTES], raw[_KEY_ID_BYTES:]


@dataclass(frozen=True, slots=True)
class TlogProof:
    """That an entry is in the tree of a signed head: its index, the hashes that lead to the root, the note verbatim."""

    index: int
    hashes: Sequence[Hash]
    note: str
    extra: bytes = b""

    def to_text(self) -> str:
        extra = [f"extra {_base64(self.extra)}"] if self.extra else []
        lines = [PROOF_HEADER, *extra, f"index {self.index}", *(_base64(found) for found in self.hashes)]
        return "\n".join(lines) + "\n\n" + self.note

    @classmethod
    def from_text(cls, text: str) -> TlogProof:
        if len(text) > NOTE_BYTES_MAX:
            raise NoteInvalid("the proof is too long", expected=f"{NOTE_BYTES_MAX} characters at most")
        before, blank, note = text.partition("\n\n")
        lines = before.split("\n")
        if not blank or lines[0] != PROOF_HEADER:
            raise NoteInvalid("that is no tlog proof", expected=PROOF_HEADER)
        extra = b""
        if len(lines) > 1 and lines[1].startswith("extra "):
            extra = _decoded(lines.pop(1).removeprefix("extra "), "the extra data")
        if len(lines) < 2 or not lines[1].startswith("index "):
            raise NoteInvalid("the proof names no index", expected="index N")
        index = _number(lines[1].removeprefix("index "), "the index")
        hashes = [Hash(_decoded(line, "a hash")) for line in lines[2:]]
        if any(len(found) != HASH_BYTES for found in hashes) or len(hashes) > 64:
            raise NoteInvalid("the proof's hashes are no SHA-256", expected=f"at most 64 of {HASH_BYTES} bytes")
        return cls(index, hashes, note, extra)


def _number(written: str, what: str) -> int:
    if not _DECIMAL.fullmatch(written) or int(written) > TREE_SIZE_MAX:
        raise NoteInvalid(f"{what} is no number", expected="decimal, no leading zeros", found=written[:32])
    return int(written)


def _base64(raw: bytes) -> str:
    return b64encode(raw).decode("ascii")


def _decoded(written: str, what: str) -> bytes:
    try:
        raw = b64decode(written, validate=True)
    except (Base64Error, ValueError):
        raise NoteInvalid(f"{what} is not base64") from None
    if _base64(raw) != written:  # one value, one spelling
        raise NoteInvalid(f"{what} is not base64 as it is written")
    return raw
