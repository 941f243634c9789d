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


Act = Literal[
    "approved",
    "denied",
    "withdrew",
    "resolved_as_succeeded",
    "resolved_as_failed",
    "redispatched",
    "answered",
    "signalled",
    "cancelled",
    "resumed",
    "forked",
    "accepted_tool",
    "erased",
    "announced_key",
    "retired_key",
    "began_epoch",
]


class ActItem(Shape):
    """One thing that a person did, and the entry on whose record it stands."""

    act: Act
    by: Name
    at: Time
    kind: Literal["trace", "run", "system"] = Field(description="Of which kind the stream is that has the entry.")
    id: str | None = Field(description="The trace's or run's id; null for the tenant's system stream.")
    sequence_number: int
    leaf_index: int = Field(description="Where the entry stands in the log, from 0.")
    server_id: Name | None
    tool_name: Name | None
    procedure: Name | None
    about: str | None = Field(
        description="Of a question its path, of a signal its name, of a fork its source, of a resumption the version "
        "that it accepts, of an erasure the stream, of a key its id, of an epoch its number."
    )
    reason: str | None


class ActPage(ListPage):
    model_config = _example(
        items=[
            {
                "act": "resolved_as_succeeded",
                "by": "omar",
                "at": _TIME,
                "kind": "trace",
                "id": _TRACE,
                "sequence_number": 4,
                "leaf_index": 17,
                "server_id": "pay",
                "tool_name": "charge",
                "procedure": None,
                "about": None,
                "reason": "it is in the bank's book, line 331",
            }
        ],
        next=None,
    )
    items: list[ActItem]
