"""API keys: how one is written, what is kept of it, and where it is looked up."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol, get_args

from app.domain.tga.models import Principal, Role

API_KEY_PREFIX: Final = "tga_"
DEFAULT_TENANT: Final = "default"
ROLES: Final[tuple[Role, ...]] = get_args(Role)

_API_KEY = re.compile(r"tga_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """A key as a caller sent it: which one it claims to be, and the digest of the secret that came with it."""

    key_id: str
    secret_sha256: bytes = field(repr=False)


def parse_api_key(text: str) -> PresentedKey | None:
    """The key that this text is, or None. One key has one spelling: the digest is of the secret as it is written."""
    match = _API_KEY.fullmatch(text)
    return None if match is None else PresentedKey(match[1], secret_digest(match[2]))


def secret_digest(secret: str) -> bytes:
    """What is stored of a secret. It has 256 bits of chance: a slow hash would protect nothing more."""
    return hashlib.sha256(secret.encode("ascii")).digest()


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key as people see it. `is_valid`: neither revoked nor expired, by the database's clock when it was read."""

    key_id: str
    name: str
    principal_id: str
    tenant: str
    roles: tuple[Role, ...]
    created_at: str
    created_by: str
    expires_at: str | None
    revoked_at: str | None
    is_valid: bool


@dataclass(frozen=True)
class StoredKey:
    """What the gateway holds a presented key against."""

    key_id: str
    secret_sha256: bytes = field(repr=False)
    principal_id: str
    tenant: str
    roles: tuple[Role, ...]
    is_valid: bool

    @cached_property
    def principal(self) -> Principal:
        """Made once for all calls, and only after the secret was right."""
        return Principal(principal_id=self.principal_id, tenant=self.tenant, roles=list(self.roles))


class Keys(Protocol):
    """Where keys are looked up."""

    def cached_key(self, key_id: str) -> StoredKey | None:
        """What is known of a key and still sure; None says nothing about whether it exists."""
        ...

    async def load_key(self, key_id: str) -> StoredKey | None:
        """The key as the database has it now."""
        ...
