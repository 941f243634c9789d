"""Approvals as MCP tools, for principals with the role supervisor: list what waits, approve, deny, answer."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import StringConstraints

from app.core.errors import TraceNotFound
from app.core.limits import CALL_WAIT_MS, CURSOR_CHARS_MAX
from app.domain.identity import Principal
from app.domain.ledger.documents import Name, Part, Sha256, Text, Uuid7
from app.domain.runs.values import Path
from app.domain.tga.documents import TraceId
from app.domain.tga.supervision import Ruling
from app.domain.tga.transitions import TRACE
from app.edge.approvals import load_approvals
from app.edge.body import checked
from app.edge.permissions import require, scope_of
from app.edge.runs import run_seen_by
from app.edge.services import Services

_ITEMS: Final = 20
_DECISION_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "trace_id": {"type": "string", "description": "Of the request, as tga__approvals lists it."},
        "action_request_digest": {
            "type": "string",
            "pattern": "^[0-9a-f]{64}$",
            "description": "Of exactly the request that was looked at, as tga__approvals lists it.",
        },
        "rationale": {"type": "string", "description": "Why. It goes on the record."},
    },
    "required": ["trace_id", "action_request_digest"],
    "additionalProperties": False,
}
_ANSWER_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "run_id": {"type": "string", "description": "Of the run, as tga__approvals lists it."},
        "path": {"type": "string", "description": "Where in the run the question stands, likewise."},
        "intent_digest": {
            "type": "string",
            "pattern": "^[0-9a-f]{64}$",
            "description": "Of exactly the question that was looked at, likewise.",
        },
        "answer": {
            "description": "A JSON value that fits the question's answer_schema; for an approval true or false."
        },
    },
    "required": ["run_id", "path", "intent_digest", "answer"],
    "additionalProperties": False,
}
SUPERVISOR_TOOLS: Final[tuple[dict[str, Any], ...]] = (
    {
        "name": "tga__approvals",
        "title": "What waits for a decision",
        "description": "List tool calls that wait for a person to decide, oldest first, with all their arguments; "
        "then the questions that runs have asked.",
        "inputSchema": {
            "type": "object",
            "properties": {"cursor": {"type": "string", "description": "The `next` of the page before."}},
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": True, "openWorldHint": False},
    },
    {
        "name": "tga__approve",
        "title": "Approve a call",
        "description": "Approve one waiting tool call. It is executed then, and cannot be called back.",
        "inputSchema": _DECISION_SCHEMA,
        "annotations": {"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False},
    },
    {
        "name": "tga__deny",
        "title": "Deny a call",
        "description": "Deny one waiting tool call. It is never executed; its caller is told, with the rationale.",
        "inputSchema": _DECISION_SCHEMA,
        "annotations": {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": False},
    },
    {
        "name": "tga__answer",
        "title": "Answer a question of a run",
        "description": "Answer one question that a run has asked. The first answer counts; the run goes on with it.",
        "inputSchema": _ANSWER_SCHEMA,
        "annotations": {"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False},
    },
)
SUPERVISOR_NAMES: Final = frozenset(tool["name"] for tool in SUPERVISOR_TOOLS)


class _Listing(Part):
    cursor: Annotated[str, StringConstraints(max_length=CURSOR_CHARS_MAX)] | None = None


class _Deciding(Part):
    trace_id: Uuid7
    action_request_digest: Sha256
    rationale: Text | None = None


class _Answering(Part):
    run_id: Name
    path: Path
    intent_digest: Sha256
    answer: Any


async def supervise(services: Services, principal: Principal, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the tool answers, as a JSON object; TgaErrors where it may not, or cannot."""
    require(principal, "decide")
    if name == "tga__approvals":
        return await _listed(services, principal, checked(_Listing, arguments))
    if name == "tga__answer":
        return await _answered(services, principal, checked(_Answering, arguments))
    return await _decided(
        services, principal, checked(_Deciding, arguments), "APPROVE" if name == "tga__approve" else "DENY"
    )


async def _listed(services: Services, principal: Principal, asked: _Listing) -> dict[str, Any]:
    items, cursor = await load_approvals(services, principal, cursor=asked.cursor, limit=_ITEMS)
    return {"items": items, "next": cursor}


async def _answered(services: Services, principal: Principal, asked: _Answering) -> dict[str, Any]:
    run_id = await run_seen_by(services, principal, asked.run_id, "answer_run")
    engine = services.runs
    value = await engine.starting.value_of(principal.tenant, asked.answer)
    state = await engine.answering.answer(
        run_id, asked.path, asked.answer, value, principal, intent_digest=asked.intent_digest
    )
    return {"run_id": asked.run_id, "path": asked.path, "state": state}


async def _decided(
    services: Services, principal: Principal, asked: _Deciding, decision: Literal["APPROVE", "DENY"]
) -> dict[str, Any]:
    trace_id = TraceId(asked.trace_id)
    if not await services.queries.is_visible(TRACE.stream(trace_id), scope_of(principal)):
        raise TraceNotFound("no such trace")
    ruling = Ruling(decision, principal, asked.action_request_digest, asked.rationale)
    answer = await services.handover.wait(services.runtime.decide(trace_id, ruling, wait_ms=CALL_WAIT_MS))
    return {
        "trace_id": answer.trace_id,
        "state": answer.state,
        "waiting": answer.waiting,
        "tool_effect": None if answer.effect is None else answer.effect.to_json(),
    }
