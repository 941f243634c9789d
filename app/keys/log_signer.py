"""The log's own key, and the signer's memory.

| what    | file                       | variable      |
|---------|----------------------------|---------------|
| the key | `log.key`                  | `TGA_LOG_KEY` |
| retired | `log.<key id>.retired`     |               |
| memory  | `log.head`, a signed note  |               |

The memory is what keeps the key from signing two histories: the last head that was signed, in the folder of the keys
and not in the database. It is durable before its head is shown to anyone, and nothing is signed that does not follow
from it. An old database that was put back without the folder is found out here; so keep the two apart, and never
restore the folder from a backup together with the database.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.core.ed25519 import key_id_of
from app.core.errors import ConcurrentExecution, LogForked, NoteInvalid, SettingInvalid
from app.core.limits import NOTE_BYTES_MAX
from app.core.merkle import Hash
from app.core.note import TreeHead, VerifierKey, open_note, sign_note
from app.domain.log.epochs import base_of, epoch_of, next_origin
from app.domain.log.heads import SignedHead, fits, verify_follows
from app.keys.key_files import (
    decoded,
    load_or_make,
    locked,
    make_folder,
    read_key,
    read_private,
    rotated,
    verify_private,
    write_private,
)

LOG_VARIABLE: Final = "TGA_LOG_KEY"

_KEY_FILE = "log.key"
_RETIRED = "log.*.retired"
_MEMORY_FILE = "log.head"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LogSigner:
    """The HeadSigner. Several processes may share one folder: each signature is a compare-and-swap on the memory.

    Hosts that share the key but not the folder each have a memory of their own, kept up by following the published
    heads; none of them knows what was signed while it was away and is in no database any more.
    """

    def __init__(self, folder: Path, origin: str | None, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._configured_origin = origin
        self._is_given = bool(environment.get(LOG_VARIABLE))
        if self._is_given:
            self._use(decoded(environment[LOG_VARIABLE], LOG_VARIABLE))
            make_folder(folder)
        else:
            self._use(load_or_make(folder, _KEY_FILE))
        self._origin_seen: str | None = None
        self.load_remembered()

    @classmethod
    def open(cls, folder: Path, *, origin: str | None = None, environment: Mapping[str, str] | None = None) -> Self:
        """The signer, its key made and durable if there was none; SettingInvalid when key or memory cannot be used."""
        with _files_explained(folder):
            return cls(folder, origin, os.environ if environment is None else environment)

    def __repr__(self) -> str:
        return f"LogSigner({self.verifier_key.to_text()})"

    @property
    def origin(self) -> str:
        """The log's name: configured, or the one that its heads have always had, or one made from its first key."""
        made = f"tga.local/{hashlib.sha256(self._public_key).hexdigest()[:16]}"
        seen = self._origin_seen
        if seen is not None and self._configured_origin == base_of(seen):
            return seen  # an epoch of the one that is configured
        return self._configured_origin or seen or made

    @property
    def public_key(self) -> bytes:
        return self._public_key

    @property
    def verifier_key(self) -> VerifierKey:
        """What verifies the heads that are signed from here on."""
        return VerifierKey(self.origin, self._public_key)

    def load_remembered(self) -> SignedHead | None:
        """The last head that was signed or followed here; None if there never was one."""
        remembered = load_memory(self._folder)
        if remembered is not None:
            self._origin_seen = remembered.head.origin
        return remembered

    def sign(self, size: int, root: Hash, proof: Sequence[bytes], *, after: SignedHead | None) -> SignedHead:
        with self._alone(after):
            head = TreeHead(self.origin, size, root)
            verify_follows(head, proof, after=None if after is None else after.head)
            if after is not None and after.head.size == size:
                return after
            signed = SignedHead(head, self._note_of(head, after))
            self._write(signed)
            return signed

    def remember(self, signed: SignedHead, proof: Sequence[bytes], *, after: SignedHead | None) -> None:
        with self._alone(after):
            if after is None or not self.is_later_epoch(signed, after=after):
                verify_follows(signed.head, proof, after=None if after is None else after.head)
            self._write(signed)

    def begin_epoch(self, head: TreeHead, *, after: SignedHead) -> SignedHead:
        with self._alone(after):
            if head.origin != next_origin(after.head.origin):
                raise LogForked("no new epoch of this log", expected=next_origin(after.head.origin), found=head.origin)
            key = VerifierKey(head.origin, self._public_key)
            signed = SignedHead(head, sign_note(head.to_text(), key, self._key.sign))
            self._write(signed)
            return signed

    def is_later_epoch(self, signed: SignedHead, *, after: SignedHead) -> bool:
        new, old = signed.head.origin, after.head.origin
        return base_of(new) == base_of(old) and epoch_of(new) > epoch_of(old) and _is_signed_by(self._key, signed)

    def has_signed(self, signed: SignedHead) -> bool:
        if _is_signed_by(self._key, signed):
            return True
        kept = (read_key(file) for file in (self._folder / _KEY_FILE, *sorted(self._folder.glob(_RETIRED))))
        return any(_is_signed_by(Ed25519PrivateKey.from_private_bytes(raw), signed) for raw in kept if raw is not None)

    def rotate(self) -> VerifierKey:
        """A new key; the old one is kept as retired. It is to be announced on the system stream before it signs.

        The first head under the new key carries the old one's signature too, if the old one is still in the folder.
        """
        if self._is_given:
            raise SettingInvalid(
                f"the key comes from {LOG_VARIABLE} and is rotated there",
                remedy=f"Set {LOG_VARIABLE} to a new key and start again; keep the old one as log.<name>.retired.",
            )
        with _files_explained(self._folder):
            self._use(rotated(self._folder, _KEY_FILE, lambda old: key_id_of(_public_of(old)).partition(":")[2]))
        return self.verifier_key

    def _use(self, raw: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(raw)
        self._public_key = _public_of(raw)

    def _write(self, signed: SignedHead) -> None:
        write_private(self._folder / _MEMORY_FILE, signed.note.encode("utf-8"))
        self._origin_seen = signed.head.origin

    @contextmanager
    def _alone(self, after: SignedHead | None) -> Iterator[None]:
        with _files_explained(self._folder), locked(self._folder):
            found = self.load_remembered()
            if found != after:
                raise ConcurrentExecution(
                    "another process has signed a head meanwhile",
                    expected=after and f"{after.head.size} leaves",
                    found=found and f"{found.head.size} leaves",
                    remedy="Look at the tree again.",
                )
            yield

    def _note_of(self, head: TreeHead, after: SignedHead | None) -> str:
        text = head.to_text()
        note = sign_note(text, self.verifier_key, self._key.sign)
        if after is None or _is_signed_by(self._key, after):
            return note
        for file in (self._folder / _KEY_FILE, *sorted(self._folder.glob(_RETIRED))):
            raw = read_key(file)
            old = None if raw is None else Ed25519PrivateKey.from_private_bytes(raw)
            if old is not None and _is_signed_by(old, after):
                key = VerifierKey(after.head.origin, old.public_key().public_bytes_raw())
                return note + sign_note(text, key, old.sign).rpartition("\n\n")[2]
        return note


def load_memory(folder: Path) -> SignedHead | None:
    """What the signer of this folder remembers; no key is needed, and none is made."""
    if not folder.is_dir():
        return None
    with _files_explained(folder):
        verify_private(folder)
        raw = read_private(folder / _MEMORY_FILE, bytes_max=NOTE_BYTES_MAX)
    if raw is None:
        return None
    try:
        return SignedHead.from_note(raw.decode("utf-8"))
    except (NoteInvalid, UnicodeDecodeError):
        raise SettingInvalid(
            f"{folder / _MEMORY_FILE} holds no tree head",
            remedy="Nothing is signed without it. Put back the last head that any client holds.",
        ) from None


def end_log(folder: Path, environment: Mapping[str, str] | None = None) -> str | None:
    """The log of this folder is over, because its database was dropped: key and memory are put aside. The next log has
    a key of its own, so nothing of it can be taken for the old one's. Returns the old key's id, if there was one.

    The key first: after a crash in between the memory still refuses what is not its log.
    """
    verify_log_can_end(environment)
    with _files_explained(folder), locked(folder):
        raw = read_key(folder / _KEY_FILE)
        if raw is None:
            (folder / _MEMORY_FILE).unlink(missing_ok=True)
            return None
        key_id = key_id_of(_public_of(raw)).partition(":")[2]
        (folder / _KEY_FILE).rename(folder / f"log.{key_id}.retired")
        if (folder / _MEMORY_FILE).exists():
            (folder / _MEMORY_FILE).rename(folder / f"log.{key_id}.head")
        return key_id


def verify_log_can_end(environment: Mapping[str, str] | None = None) -> None:
    if (os.environ if environment is None else environment).get(LOG_VARIABLE):
        raise SettingInvalid(
            f"the log's key comes from {LOG_VARIABLE}, and would sign a second history under the same name",
            remedy=f"Unset {LOG_VARIABLE} for this command, and set it to a new key before a gateway starts again.",
        )


def _is_signed_by(key: Ed25519PrivateKey, signed: SignedHead) -> bool:
    public = VerifierKey(signed.head.origin, key.public_key().public_bytes_raw())
    try:
        open_note(signed.note, [public], fits)
    except NoteInvalid:
        return False
    return True


def _public_of(raw: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(raw).public_key().public_bytes_raw()


@contextmanager
def _files_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_full = error.errno in _NO_ROOM
        raise SettingInvalid(
            f"the log's key or its memory cannot be read or written: {error.strerror}",
            found=error.filename or folder,
            remedy="Make room where the keys folder is: nothing is signed until then, and nothing that was is lost."
            if is_full
            else "Name a folder of your own in TGA_KEYS; without its memory the log signs nothing.",
        ) from None
