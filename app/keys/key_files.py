"""Files of keys: private, durable, made once however many start at the same time.

A key is one line of base64 in a file of mode 0600, in a folder of mode 0700.
"""

from __future__ import annotations

import base64
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

from app.core.errors import SettingInvalid
from app.core.limits import KEY_FILE_BYTES_MAX

KEY_BYTES: Final = 32

_LOCK_FILE = ".lock"
_UNFINISHED = "*.unfinished"

_IdOf: TypeAlias = Callable[[bytes], str]
_IsKind: TypeAlias = Callable[[int], bool]


def load_or_make(folder: Path, name: str) -> bytes:
    if folder.is_dir():
        verify_private(folder)
    raw = read_key(folder / name)
    if raw is not None:  # also where the folder is read-only
        return raw
    make_folder(folder)
    with locked(folder):
        raw = read_key(folder / name)  # another may have been first
        if raw is None:
            raw = secrets.token_bytes(KEY_BYTES)
            _write_key(folder / name, raw)
        return raw


def rotated(folder: Path, name: str, id_of: _IdOf) -> bytes:
    """The new key. There is no moment, and no crash, in which the old key is nowhere or no key is in use."""
    with locked(folder):
        old = read_key(folder / name)
        if old is not None:
            _write_key(folder / f"{name.partition('.')[0]}.{id_of(old)}.retired", old)
        raw = secrets.token_bytes(KEY_BYTES)
        _write_key(folder / name, raw)
        return raw


def make_folder(folder: Path) -> None:
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    verify_private(folder)
    for made in missing:
        _sync_folder(made.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One at a time makes keys here; the system lets go of a dead one's lock. What a dead one left half is removed."""
    descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for unfinished in folder.glob(_UNFINISHED):
            unfinished.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


def _write_key(file: Path, raw: bytes) -> None:
    write_private(file, base64.b64encode(raw) + b"\n")


def write_private(file: Path, content: bytes) -> None:
    """Whole and durable, or as it was before: readers do not take the lock. Writers do (`locked`)."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.replace(file)
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_key(file: Path) -> bytes | None:
    """The key in a file; None when there is no such file."""
    written = read_private(file, bytes_max=KEY_FILE_BYTES_MAX)
    if written is None:
        return None
    try:
        return decoded(written.decode("ascii"), str(file))
    except UnicodeDecodeError:
        raise _no_key(str(file), "bytes that are not ASCII") from None


def read_private(file: Path, *, bytes_max: int) -> bytes | None:
    """What a file of ours holds, its first bytes if it is longer; None when there is no such file."""
    try:
        # Without waiting for a writer: an attacker may have put a pipe here.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        _verify_standing(file, os.fstat(descriptor), is_kind=stat.S_ISREG, kind="file", mode="600")
        return os.read(descriptor, bytes_max)
    finally:
        os.close(descriptor)


def verify_private(folder: Path) -> None:
    _verify_standing(folder, folder.stat(), is_kind=stat.S_ISDIR, kind="folder", mode="700")


def _verify_standing(path: Path, found: os.stat_result, *, is_kind: _IsKind, kind: str, mode: str) -> None:
    if not is_kind(found.st_mode):
        raise SettingInvalid(f"{path} is no {kind}", expected=f"a {kind}", remedy="Move it out of the way.")
    if found.st_uid not in (os.geteuid(), 0):
        raise SettingInvalid(
            f"the {kind} {path} belongs to another user, who could read or replace it",
            expected=f"user {os.geteuid()}",
            found=f"user {found.st_uid}",
            remedy=f"Run: chown {os.geteuid()} {path}",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise SettingInvalid(
            f"others than the owner may use the {kind} {path}",
            expected=f"mode 0{mode}",
            found=f"mode {stat.S_IMODE(found.st_mode):04o}",
            remedy=f"Run: chmod {mode} {path}. If others may have read it, rotate the key.",
        )


def decoded(written: str, where: str) -> bytes:
    """The key in one line of base64. What is written there is not shown: it may be a key with a slip in it."""
    text = written.strip()
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        raise _no_key(where, f"{len(text)} characters that are not base64") from None
    if len(raw) != KEY_BYTES:
        raise _no_key(where, f"{len(raw)} bytes")
    return raw


def _no_key(where: str, found: str) -> SettingInvalid:
    return SettingInvalid(
        f"{where} holds no key",
        expected=f"{KEY_BYTES} bytes in base64, on one line",
        found=found,
        remedy="Put the right key back; a new one cannot open what was sealed, nor sign as the old one.",
    )
