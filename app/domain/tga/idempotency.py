"""Which plan claims a key, and what a stored claim must say (I2)."""

from __future__ import annotations

from collections.abc import Sequence

from app.domain.ledger.plans import Claim
from app.domain.tga.documents import ActionRequest, SupervisorDecision
from app.domain.tga.replay import LogRecord


def claim_of_request(request: ActionRequest) -> Claim | None:
    """The claim that this request makes, if it has a key."""
    if request.idempotency_key is None:
        return None
    return Claim(request.server_id, request.tool_name, request.idempotency_key, request.payload_digest)


def claim_at_birth(request: ActionRequest, state: str) -> Claim | None:
    """The claim that belongs into the plan that appends this request and leaves the trace in `state`.

    A request that is denied in the same transaction makes none: its key stays free.
    """
    return None if state == "DENIED" else claim_of_request(request)


def decide_claim(records: Sequence[LogRecord]) -> Claim | None:
    """The claim that belongs into the plan that appends these records."""
    if not records or not isinstance(records[0].artifact, ActionRequest):
        return None
    return claim_at_birth(records[0].artifact, records[-1].entry.to_state)


def may_lack_claim(decision: SupervisorDecision | None) -> bool:
    """Only a policy denies at once, before anything is claimed."""
    return decision is not None and decision.decision == "DENY" and decision.decided_by.type == "policy"
