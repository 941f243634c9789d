"""What ends a wait: a person's decision, the caller's withdrawal, or time. Each is a signed or unsigned document that
binds to exactly the request that waits; nothing here is stored or sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from app.core.digest import GENESIS, Digest
from app.core.errors import (
    AlreadyDecided,
    Forbidden,
    RequestMismatch,
    SchemaViolation,
    ToolNotFound,
    ToolQuarantined,
)
from app.domain.identity import Principal
from app.domain.ledger.documents import Signature
from app.domain.policy.question import Verdict
from app.domain.tga.documents import ActionRequest, DecidedBy, SupervisorDecision
from app.domain.tga.execution import TraceExecution, known
from app.domain.tga.executor import TraceExecutor
from app.domain.tga.ports import Ports
from app.domain.tools import Tool


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a person says about a waiting request. `signature` and `decided_at` come together, or not at all."""

    decision: Literal["APPROVE", "DENY"]
    approver: Principal
    action_request_digest: str
    rationale: str | None = None
    signature: Signature | None = None
    decided_at: str | None = None


class Supervision:
    """Makes the decision documents of people, callers and expiry; raises where one is not allowed, changing nothing."""

    def __init__(self, ports: Ports, executor: TraceExecutor) -> None:
        self._tools = ports.tools
        self._supervisor = ports.supervisor
        self._pins = ports.pins
        self._decision_signer = ports.decision_signer
        self._executor = executor

    async def decide(self, execution: TraceExecution, ruling: Ruling) -> SupervisorDecision:
        """The person's decision, signed by its own key or by the gateway for it. Before an approval counts, policy and
        pin are asked again: they may have changed while the request waited."""
        _verify_waiting(execution)
        if known(execution.state).action_request_digest != ruling.action_request_digest:
            raise RequestMismatch(
                "the decision is about another request",
                expected=known(execution.state).action_request_digest,
                found=ruling.action_request_digest,
            )
        if (ruling.signature is None) != (ruling.decided_at is None):
            raise SchemaViolation("a signed decision says when", expected="signature and decided_at, or neither")
        if ruling.decision == "APPROVE":
            verdict = await self._verify_approvable(execution.request, ruling.approver)
        else:
            tool = self.tool_or_stand_in(execution.request)
            verdict = await self._supervisor.judge_approval(execution.request, tool, ruling.approver)
        decision = self._executor.decision(
            execution,
            ruling.decision,
            DecidedBy(type="person", id=ruling.approver.principal_id),
            verdict,
            rationale=ruling.rationale,
            decided_at=ruling.decided_at,
            signature=ruling.signature,
        )
        if ruling.signature is None:
            return self._signed(decision)
        await self._decision_signer.verify(decision, tenant=execution.request.principal.tenant)
        return decision

    def withdraw(self, execution: TraceExecution, principal: Principal, rationale: str | None) -> SupervisorDecision:
        """The caller takes its own request back; no other principal can."""
        if not principal.is_same_as(execution.request.principal):
            raise Forbidden("the request is another principal's", remedy="Have a supervisor deny it.")
        _verify_waiting(execution)
        by = DecidedBy(type="withdrawal", id=principal.principal_id)
        return self._signed(self._executor.decision(execution, "DENY", by, None, rationale=rationale))

    def expire(self, execution: TraceExecution) -> SupervisorDecision:
        """No person decided in time. When this is appended, the store judges by its own clock whether the time is
        over."""
        _verify_waiting(execution)
        by = DecidedBy(type="expiry", id="expiry")
        return self._executor.decision(
            execution, "DENY", by, None, rationale=f"nobody decided by {execution.request.expires_at}"
        )

    async def verify_reader(self, request: ActionRequest, reader: Principal) -> Verdict:
        """Whether the policy still lets this principal make the call whose recorded answer it asks for."""
        asked = request.model_copy(update={"principal": reader})
        return await self._supervisor.judge(asked, self.tool_or_stand_in(request))

    def tool_or_stand_in(self, request: ActionRequest) -> Tool:
        """The tool; if it is gone, what the record says of it."""
        try:
            return self._tools.resolve(request.server_id, request.tool_name)
        except ToolNotFound:
            digest = Digest(request.tool_definition_digest or GENESIS)
            tenant = request.principal.tenant
            return Tool(request.server_id, request.tool_name, request.tool_class, digest, tenant=tenant)

    async def _verify_approvable(self, request: ActionRequest, approver: Principal) -> Verdict:
        tool = self._tools.resolve(request.server_id, request.tool_name)
        await self._pins.verify(tool, refresh_first=True)
        if request.tool_definition_digest not in (None, tool.definition_digest):
            raise ToolQuarantined(
                "the tool has changed since the request was made",
                expected=request.tool_definition_digest,
                found=tool.definition_digest,
                remedy="Deny the request and have it made again: it was checked against the old definition.",
            )
        call = await self._supervisor.judge(request, tool)
        if call.answer == "deny":
            raise Forbidden(
                "the policy does not allow this call any more",
                found=call.rationale,
                remedy="Deny the request, or have the policy changed.",
            )
        approval = await self._supervisor.judge_approval(request, tool, approver)
        if approval.answer == "deny":
            raise Forbidden(
                "the policy does not let this principal approve this request",
                found=approval.rationale,
                remedy="Have another supervisor decide.",
            )
        return replace(approval, policy_ids=list(dict.fromkeys((*approval.policy_ids, *call.policy_ids)))[:64])

    def _signed(self, decision: SupervisorDecision) -> SupervisorDecision:
        return decision.model_copy(update={"signature": self._decision_signer.sign(decision.signed_bytes())})


def _verify_waiting(execution: TraceExecution) -> None:
    state = known(execution.state)
    if state.state != "PENDING":
        raise AlreadyDecided("the request is already decided", expected="PENDING", found=state.state)
