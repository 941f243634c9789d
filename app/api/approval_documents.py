"""The shapes of what waits for a person."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, StringConstraints

from app.api.documents import ScopedPage, Shape
from app.domain.addresses import OWN_RUN_ID_PATTERN, Path
from app.domain.identity import Role
from app.domain.ledger.documents import IdempotencyKey, Name, Sha256, Text, Time, Uuid7
from app.domain.tools import ToolClass

_TRACE: Final = "019b76da-a800-7000-8000-000000000001"
_TIME: Final = "2026-01-01T00:00:00.000Z"
_DIGEST: Final = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_CALL: Final[dict[str, Any]] = {
    "kind": "call",
    "trace_id": _TRACE,
    "action_request_digest": _DIGEST,
    "server_id": "pay",
    "tool_name": "charge",
    "principal_id": "agent-1",
    "principal_roles": ["agent"],
    "tool_class": "write",
    "arguments": {"amount": 7},
    "intent": None,
    "idempotency_key": "order-17",
    "policy": {
        "answer": "ask",
        "rationale": "no policy permits this call unattended",
        "policy_ids": ["every-tool"],
        "policy_digest": _DIGEST,
    },
    "pin_status": "pinned",
    "on_unknown_outcome": "redispatch",
    "requested_at": _TIME,
    "expires_at": "2026-01-02T00:00:00.000Z",
    "problem": None,
}


class PolicyReason(Shape):
    """What the policy in force says of the request now; `ask`: a person must decide."""

    answer: Literal["allow", "deny", "ask"]
    rationale: str | None
    policy_ids: list[str]
    policy_digest: Sha256 | None


class ApprovalItem(Shape):
    """A call that waits for a decision: POST /v1/traces/{trace_id}/decision."""

    kind: Literal["call"]
    trace_id: Uuid7
    action_request_digest: Sha256
    server_id: Name | None
    tool_name: Name | None
    principal_id: Name | None
    principal_roles: list[Role] | None = Field(description="Its roles when it asked.")
    tool_class: ToolClass | None
    arguments: dict[str, Any] | None = Field(description="As recorded: secret arguments are commitments.")
    intent: Text | None
    idempotency_key: IdempotencyKey | None
    policy: PolicyReason | None = Field(description="Null when the tool is gone.")
    pin_status: Literal["pinned", "changed", "unknown"] = Field(
        description="Whether the tool is the one that the request was made for; only then can it be approved. "
        "`unknown`: the tool is gone, or was never pinned."
    )
    on_unknown_outcome: Literal["redispatch", "reconcile", "hold"] | None = Field(
        description="What happens if the tool's answer is lost; null when the tool is gone."
    )
    requested_at: Time | None
    expires_at: Time | None
    problem: str | None = Field(description="A code: the request is not the recorded one, and nobody can decide on it.")


class QuestionItem(Shape):
    """A question of a run, to be answered with POST /v1/runs/{run_id}/signals and `path`, `answer` and
    `intent_digest`."""

    kind: Literal["run"]
    run_id: Annotated[str, StringConstraints(pattern=OWN_RUN_ID_PATTERN)]
    path: Path
    procedure: Name
    principal_id: Name = Field(description="Who started the run.")
    name: Name | None
    request: dict[str, Any] | None = Field(
        description="As recorded: form, message, context, answer_schema, expires_at, default, webhooks and escalations."
    )
    intent_digest: Sha256 | None = Field(description="Of exactly this question: an answer that names it fits no other.")
    asked_at: Time
    expires_at: Time | None
    level: int = Field(description="How often it was escalated; 0: only those who were told first know of it.")
    problem: str | None = Field(description="A code: the question is not the recorded one, and is not shown.")


class ApprovalCount(Shape):
    calls: int
    questions: int
    is_exact: bool = Field(description="False where there are more than are counted.")


class ApprovalPage(ScopedPage):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "items": [_CALL],
                "next": None,
                "scope": "tenant",
                "count": {"calls": 1, "questions": 0, "is_exact": True},
            }
        }
    )
    count: ApprovalCount = Field(description="How many wait within the scope, on all pages.")
    items: list[Annotated[ApprovalItem | QuestionItem, Field(discriminator="kind")]]
