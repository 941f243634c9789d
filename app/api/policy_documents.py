"""The shapes of the policy, and of why it decides."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.api.documents import ListPage, Shape
from app.domain.identity import Role
from app.domain.ledger.documents import Name, Sha256, Text, Time

_DIGEST: Final = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_TIME: Final = "2026-01-01T00:00:00.000Z"
_TEXT: Final = 'permit (principal, action == Action::"call", resource);'


class ExplainBody(BaseModel):
    """A call that nobody makes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    server_id: Name
    tool_name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)
    principal_id: Name = "someone"
    roles: Annotated[list[Role], Field(max_length=6)] | None = Field(None, description="`agent`, unless given.")
    intent: Text | None = None
    procedure: Name | None = Field(None, description="As a call that a run of this procedure makes.")
    version: Name = "1"


class RuleDocument(Shape):
    id: str
    effect: Literal["permit", "forbid"]
    line: int
    text: str


class PolicyDocument(Shape):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "policy_digest": _DIGEST,
                "recorded_at": _TIME,
                "rules": [{"id": "every-tool", "effect": "permit", "line": 3, "text": _TEXT}],
                "warnings": [],
                "last_error": None,
            }
        }
    )
    policy_digest: Sha256
    recorded_at: Time | None = Field(description="Since when it is on the record; null until it is.")
    rules: list[RuleDocument]
    warnings: list[str]
    last_error: str | None = Field(description="Why the file as it is now is not in force; null while it is.")


class PolicySetItem(Shape):
    sequence_number: int = Field(description="Of the entry on the stream system:default.")
    policy_digest: Sha256 | None
    recorded_at: Time | None
    recorded_by: Name | None
    text: str | None
    problem: str | None = Field(description="A code: what is stored is not what was recorded, and is not shown.")


class PolicySetPage(ListPage):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "items": [
                    {
                        "sequence_number": 2,
                        "policy_digest": _DIGEST,
                        "recorded_at": _TIME,
                        "recorded_by": "gateway",
                        "text": _TEXT,
                        "problem": None,
                    }
                ],
                "next": None,
            }
        }
    )
    items: list[PolicySetItem]


class RuleFault(Shape):
    id: str | None
    reason: str


class StandingDocument(Shape):
    id: str
    effect: Literal["permit", "forbid"]
    line: int
    standing: Literal["decides", "applies", "condition not met", "could not be evaluated", "not about this request"]
    text: str | None = Field(description="Null for tenants other than `default`.")


class ActionExplanation(Shape):
    allowed: bool
    why_not: str | None
    errors: list[RuleFault]
    policies: list[StandingDocument]


class ExplanationDocument(Shape):
    """`actions`: the two questions, `call` and `call_unattended`."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "verdict": "ask",
                "rationale": "no policy permits this call unattended",
                "principal": 'Principal::"default/billing-agent"',
                "resource": 'Tool::"pay/charge"',
                "policy_digest": _DIGEST,
                "policy_ids": ["every-tool"],
                "actions": {
                    "call": {
                        "allowed": True,
                        "why_not": None,
                        "errors": [],
                        "policies": [
                            {"id": "every-tool", "effect": "permit", "line": 3, "standing": "decides", "text": _TEXT}
                        ],
                    }
                },
            }
        }
    )
    verdict: Literal["allow", "ask", "deny"]
    rationale: str | None
    principal: str
    resource: str
    policy_digest: Sha256
    policy_ids: list[str]
    actions: dict[str, ActionExplanation]
