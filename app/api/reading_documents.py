"""The shapes of what people look at: who calls, what was found, statistics, verification, policy."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import ConfigDict, Field

from app.api.documents import ListPage, ScopedPage, Shape
from app.domain.identity import Role
from app.domain.ledger.documents import Name, Time

_TIME: Final = "2026-01-01T00:00:00.000Z"
_TRACE: Final = "019b76da-a800-7000-8000-000000000001"


def _example(**members: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"example": members})


class MeDocument(Shape):
    """The caller."""

    model_config = _example(
        principal_id="ada", tenant="default", roles=["supervisor"], scope="tenant", may=["read", "decide"]
    )
    principal_id: Name
    tenant: Name
    roles: list[Role]
    scope: Literal["tenant", "own"] = Field(description="`own`: it sees only what it asked for itself.")
    may: list[str] = Field(description="What its roles admit it to; a policy can still deny it.")


class KeyItem(Shape):
    """An API key without its secret, which is stored nowhere."""

    key_id: str
    name: str
    principal_id: Name
    tenant: Name
    roles: list[Role]
    created_at: Time
    created_by: Name
    expires_at: Time | None
    revoked_at: Time | None
    is_valid: bool = Field(description="Neither revoked nor expired, by the database's clock.")


class KeyPage(ListPage):
    model_config = _example(
        items=[
            {
                "key_id": "4a1f0b8e2c113a1f",
                "name": "billing",
                "principal_id": "billing-agent",
                "tenant": "default",
                "roles": ["agent"],
                "created_at": _TIME,
                "created_by": "cli",
                "expires_at": None,
                "revoked_at": None,
                "is_valid": True,
            }
        ],
        next=None,
    )
    items: list[KeyItem]


class FoundItem(Shape):
    kind: Literal["trace", "run"]
    id: str
    by: Literal["id", "idempotency_key", "digest"]
    sequence_number: int | None = Field(description="At which entry the digest stands; null when found otherwise.")
    state: str
    waiting: str | None
    server_id: Name | None
    tool_name: Name | None
    procedure: Name | None
    principal_id: Name | None
    updated_at: Time


class FoundPage(ScopedPage):
    model_config = _example(
        items=[
            {
                "kind": "trace",
                "id": _TRACE,
                "by": "idempotency_key",
                "sequence_number": None,
                "state": "COMPLETED",
                "waiting": None,
                "server_id": "pay",
                "tool_name": "charge",
                "procedure": None,
                "principal_id": "agent-1",
                "updated_at": _TIME,
            }
        ],
        next=None,
        scope="tenant",
    )
    items: list[FoundItem]
