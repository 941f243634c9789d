"""Which plan claims a key, and what a stored claim must say (I2)."""

from __future__ import annotations

from collections.abc import Sequence

from app.domain.ledger import Claim
from app.domain.tga.models import ActionRequest, SupervisorDecision
from app.domain.tga.replay import LogRecord


def claim_of_request(request: ActionRequest) -> Claim | None:
    """The claim that this request makes, if it has a key."""
    if request.idempotency_key is None:
        return None
    return Claim(request.server_id, request.tool_name, request.idempotency_key, request.payload_digest)


def decide_claim(records: Sequence[LogRecord]) -> Claim | None:
    """The claim that belongs into the plan that appends these records.

    A request that is denied in the same transaction makes none: its key stays free.
    """
    if not records or not isinstance(records[0].artifact, ActionRequest):
        return None
    if records[-1].entry.to_state == "DENIED":
        return None
    return claim_of_request(records[0].artifact)


def may_lack_claim(decision: SupervisorDecision | None) -> bool:
    """Only a policy denies at once, before anything is claimed."""
    return decision is not None and decision.decision == "DENY" and decision.decided_by.type == "policy"
