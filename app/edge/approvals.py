"""What waits for a person, for every way in: calls and the questions that runs have asked, soonest expiry first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from app.core.errors import TgaError, ToolNotFound
from app.domain.identity import Principal
from app.domain.ledger.queries import Page
from app.domain.tga.documents import ActionRequest
from app.domain.tools import Tool
from app.edge.cursors import list_cursor, list_position
from app.edge.parameters import own_name
from app.edge.permissions import scope_of
from app.edge.runs import own_run_id
from app.edge.services import Services
from app.postgres.approvals import WaitingCall, WaitingCount, WaitingQuestion, count_waiting, list_waiting

PinStatus = Literal["pinned", "changed", "unknown"]


@dataclass(frozen=True, slots=True)
class PolicyReason:
    """What the policy in force says of a request that waits: why a person decides, or that it is denied or allowed by
    now. Of the policy as it is now; the one that was asked first may have been another."""

    answer: Literal["allow", "deny", "ask"]
    rationale: str | None
    policy_ids: list[str]
    policy_digest: str | None


async def load_approvals(
    services: Services, principal: Principal, *, cursor: str | None, limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """A page, and the cursor of the next. It may have fewer items than `limit`, also none, and go on all the same."""
    page: Page[WaitingCall | WaitingQuestion] = await list_waiting(
        services.sessions, scope_of(principal), after=list_position("approvals", cursor), limit=limit
    )
    items = [
        await _call(services, principal.tenant, one) if isinstance(one, WaitingCall) else _question(principal, one)
        for one in page.items
    ]
    return items, list_cursor("approvals", page.next)


async def load_approvals_count(services: Services, principal: Principal) -> WaitingCount:
    return await count_waiting(services.sessions, scope_of(principal))


async def _call(services: Services, tenant: str, one: WaitingCall) -> dict[str, Any]:
    said: dict[str, Any] = one.request or {}
    request = _read(one)
    tool = _tool_of(services, request)
    reason = await _policy_reason(services, request, tool)
    return {
        "kind": "call",
        "trace_id": one.trace_id,
        "action_request_digest": one.action_request_digest,
        "server_id": own_name(tenant, one.server_id),
        "tool_name": one.tool_name,
        "principal_id": one.principal_id,
        "principal_roles": None if request is None else list(request.principal.roles or ()),
        "tool_class": said.get("tool_class"),
        "arguments": said.get("arguments"),
        "intent": said.get("intent"),
        "idempotency_key": said.get("idempotency_key"),
        "policy": None if reason is None else asdict(reason),
        "pin_status": _pin_status(services, request, tool),
        "on_unknown_outcome": None if tool is None else tool.on_unknown_outcome,
        "requested_at": said.get("requested_at"),
        "expires_at": one.expires_at,
        "problem": one.problem,
    }


def _question(principal: Principal, one: WaitingQuestion) -> dict[str, Any]:
    return {"kind": "run", **asdict(one), "run_id": own_run_id(principal.tenant, one.run_id)}


def _read(one: WaitingCall) -> ActionRequest | None:
    """The request as a document; None where it is not the recorded one."""
    if one.request is None:
        return None
    try:
        return ActionRequest.made(**one.request)
    except TgaError:
        return None


def _tool_of(services: Services, request: ActionRequest | None) -> Tool | None:
    if request is None:
        return None
    try:
        return services.registry.resolve(request.server_id, request.tool_name)
    except ToolNotFound:
        return None


def _pin_status(services: Services, request: ActionRequest | None, tool: Tool | None) -> PinStatus:
    """Whether the tool is the one that the request was made for: approving needs `pinned`."""
    if request is None or tool is None:
        return "unknown"
    pin = services.pins.state_of(tool)
    if pin.pinned_digest is None:
        return "unknown"
    is_same = request.tool_definition_digest in (None, tool.definition_digest)
    return "pinned" if is_same and pin.status == "pinned" else "changed"


async def _policy_reason(services: Services, request: ActionRequest | None, tool: Tool | None) -> PolicyReason | None:
    if request is None or tool is None or services.policy is None:
        return None
    verdict = services.policy.policy.judge(request, tool)
    return PolicyReason(verdict.answer, verdict.rationale, list(verdict.policy_ids), verdict.policy_digest)
