"""Which plan claims a key, and what a stored claim must say (I2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.core.digest import Digest
from app.core.errors import RecoveryFailed, TgaError
from app.domain.ledger.plans import Claim
from app.domain.tga.documents import ActionRequest, SupervisorDecision
from app.domain.tga.execution_state import ExecutionState
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
    """Whether the trace may have no claim: a call that the policy denies at its birth claims no key."""
    return decision is not None and decision.decision == "DENY" and decision.decided_by.type == "policy"


def claim_errors(
    claim: Claim | None, claim_effect: Digest | None, *, records: Sequence[LogRecord], state: ExecutionState
) -> Iterator[TgaError]:
    """What is wrong with the stored claim of a trace whose log is sound."""
    request, decision = None, None
    for record in records:
        if isinstance(record.artifact, ActionRequest):
            request = record.artifact
        elif isinstance(record.artifact, SupervisorDecision):
            decision = record.artifact
    made = None if request is None else claim_of_request(request)
    yield from compare_claim(claim, claim_effect, made=made, may_lack=may_lack_claim(decision), state=state)


def compare_claim(
    claim: Claim | None, claim_effect: Digest | None, *, made: Claim | None, may_lack: bool, state: ExecutionState
) -> Iterator[TgaError]:
    """I2: the claim is the one that the request makes, and it is settled exactly when the log is."""
    if claim is None and made is not None and not may_lack:
        yield RecoveryFailed("the claim of the trace's key is missing", expected=made.idempotency_key)
    if claim is not None and claim != made:
        yield RecoveryFailed("the claim is not the one that the request makes", expected=made, found=claim)
    settled = state.tool_effect_digest if claim is not None else None
    if claim_effect != settled:
        yield RecoveryFailed("claim and log disagree on the effect", expected=settled, found=claim_effect)
