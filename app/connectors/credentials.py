"""What the gateway shows a tool server to prove who it is: headers whose values come from environment or files.

They never come from callers, and never go anywhere but into the request.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from app.config import CredentialConfig
from app.core.errors import SettingInvalid
from app.core.limits import CREDENTIAL_BYTES_MAX

# RFC 9110, section 5.5, without what no credential needs: tabs and bytes beyond ASCII.
_FIELD_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_Stamp = tuple[int, int, int]


class CredentialUnavailable(Exception):
    """Why there is no value now, in words that say nothing of the value."""


class Credentials:
    """The credential headers of one server.

    Variables are read once. A file is read again when it has changed: replace it by renaming, so that no half of it is
    ever seen. Printing this shows no value.
    """

    def __init__(self, fixed: Mapping[str, SecretStr], files: Mapping[str, _SecretFile]) -> None:
        self._fixed = dict(fixed)
        self._files = dict(files)

    @classmethod
    def open(
        cls, at: str, sources: Mapping[str, CredentialConfig], environment: Mapping[str, str] | None = None
    ) -> Credentials:
        """All values must be there now, or SettingInvalid naming the header's field, `at` before it."""
        values = os.environ if environment is None else environment
        fixed, files = {}, {}
        for header, source in sources.items():
            try:
                if source.file is not None:
                    files[header] = _SecretFile(source.file, source.prefix)
                    files[header].value()
                else:
                    name = source.env or ""
                    fixed[header] = _checked(f"the variable {name}", source.prefix, values.get(name))
            except CredentialUnavailable as error:
                raise SettingInvalid(
                    f"{at}.{header}", expected="one line of printable ASCII in the variable or file", found=error
                ) from None
        return cls(fixed, files)

    def headers(self) -> dict[str, str]:
        """The headers to send now, or CredentialUnavailable."""
        secrets = {**self._fixed, **{header: file.value() for header, file in self._files.items()}}
        return {header: secret.get_secret_value() for header, secret in secrets.items()}


class _SecretFile:
    """A value in a file, kept until the file is another one or was written again."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._path = path
        self._prefix = prefix
        self._stamp: _Stamp | None = None
        self._value = SecretStr("")

    def value(self) -> SecretStr:
        what = f"the file {self._path.name}"
        try:
            # A look costs a microsecond or two; reading, which is rare, is of one small local file.
            stamp = _stamp_of(os.stat(self._path))
            if stamp != self._stamp:
                with self._path.open("rb") as file:
                    stamp = _stamp_of(os.fstat(file.fileno()))
                    raw = file.read(CREDENTIAL_BYTES_MAX + 1)
                self._value = _checked(what, self._prefix, raw.decode("ascii", "replace").strip())
                self._stamp = stamp
        except OSError as error:
            raise CredentialUnavailable(f"{what} cannot be read: {error.strerror}") from None
        return self._value


def _stamp_of(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _checked(what: str, prefix: str, value: str | None) -> SecretStr:
    if value is None:
        raise CredentialUnavailable(f"{what} is not set")
    if not value:
        raise CredentialUnavailable(f"{what} is empty")
    if len(value) > CREDENTIAL_BYTES_MAX:
        raise CredentialUnavailable(f"{what} holds more than {CREDENTIAL_BYTES_MAX} characters")
    if not _FIELD_VALUE.fullmatch(value) or not _FIELD_VALUE.fullmatch(prefix + value):
        raise CredentialUnavailable(f"{what} holds something else")
    return SecretStr(prefix + value)
