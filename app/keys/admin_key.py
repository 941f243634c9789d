"""The file that holds the administrator's API key on this machine."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from app.core.errors import SettingInvalid

_READ_BYTES_MAX = 512


def read_key_file(path: Path) -> str | None:
    """What the file says, or None if there is none. Other users who could read it cannot any more, where that is ours
    to decide."""
    try:
        with path.open("rb") as file:
            with suppress(OSError):
                os.fchmod(file.fileno(), 0o600)
            return file.read(_READ_BYTES_MAX).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from None


def replace_key_file(path: Path, text: str) -> None:
    """Put the key there whole, for its owner only, or change nothing. On disk when this returns."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: OSError) -> SettingInvalid:
    return SettingInvalid(
        "the file for the administrator's key cannot be used",
        expected=f"{path}, readable and writable",
        found=error.strerror or type(error).__name__,
        remedy="Make the home directory writable for the gateway's user.",
    )
