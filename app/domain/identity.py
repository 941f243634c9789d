"""Who is calling: principals, their roles and tenants; and API keys, by which a caller shows who it is."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Protocol, Self, get_args

from pydantic import Field, model_validator

from app.domain.ledger.documents import Name, Part, require_no_stated_null

Role = Literal["agent", "supervisor", "operator", "auditor", "worker", "admin"]

API_KEY_PREFIX: Final = "tga_"
DEFAULT_TENANT: Final = "default"
ROLES: Final[tuple[Role, ...]] = get_args(Role)

_API_KEY = re.compile(r"tga_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")


class Principal(Part):
    """Who asks: an identity of one tenant, and the roles it had when it asked."""

    principal_id: Name
    tenant: Name
    roles: Annotated[list[Role], Field(max_length=len(get_args(Role)))] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_no_stated_null(self, "roles")
        return self

    def _members(self) -> dict[str, Any]:
        if self.roles is None:
            return {"principal_id": self.principal_id, "tenant": self.tenant}
        return self.__dict__

    def is_same_as(self, other: Principal) -> bool:
        """Roles come and go; the identity stays."""
        return (self.principal_id, self.tenant) == (other.principal_id, other.tenant)


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


class ApiKeyLookup(Protocol):
    """Where keys are looked up."""

    def cached_key(self, key_id: str) -> StoredKey | None:
        """What is known of a key and still sure; None says nothing about whether it exists."""
        ...

    async def load_key(self, key_id: str) -> StoredKey | None:
        """The key as the database has it now."""
        ...
