"""What people do to traces: decide, withdraw, recover, resolve; and accept a tool's changed definition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Annotated, Any, Final, Literal

import orjson
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from app.api.openapi import DECISION_EXAMPLE, MOVED, PIN_STATE, request_body
from app.api.signatures import SignatureText, own_signature
from app.api.tool_calls import WaitMs
from app.core import errors
from app.core.canonical import canonical_enclosed
from app.core.errors import OutcomeUnknown, SchemaViolation, StoreUnavailable
from app.core.limits import CALL_WAIT_MS, DOCUMENT_BYTES_MAX, STORE_ANSWER_MS
from app.domain.identity import Principal
from app.domain.ledger.documents import Name, Part, Sha256, Text, Time
from app.domain.tga.documents import JsonOutput, TraceId
from app.domain.tga.execution import Answer
from app.domain.tga.supervision import Ruling
from app.domain.tga.transitions import TRACE
from app.edge.answers import moved
from app.edge.body import read_body
from app.edge.calls import Calls
from app.edge.handover import HandedOver
from app.edge.parameters import trace_seen_by
from app.edge.permissions import Action, require
from app.edge.problems import documented
from app.edge.services import Services

_OF_TRACES: Final = (
    errors.TraceNotFound,
    errors.ConcurrentExecution,
    errors.ChecksumMismatch,
    errors.SequenceGap,
    errors.InvalidTransition,
    errors.RecoveryFailed,
    errors.SecretMissing,
    errors.ToolNotFound,
    errors.ToolQuarantined,
    errors.TraceErased,
    errors.SchemaViolation,
    errors.RequestTimeout,
    errors.LockAcquireFailed,
    errors.StoreBusy,
    errors.OutcomeUnknown,
)


class DecisionBody(Part):
    """`signature`, `key_id` and `decided_at` come together or not at all: without them the gateway signs."""

    decision: Literal["APPROVE", "DENY"]
    action_request_digest: Sha256
    rationale: Text | None = None
    signature: SignatureText | None = None
    key_id: Name | None = None
    decided_at: Time | None = None
    wait_ms: WaitMs = CALL_WAIT_MS


class ResolutionBody(Part):
    """`output`: what the tool answered, where the operator knows; only with `succeeded`."""

    action: Literal["redispatch", "succeeded", "failed"]
    tool_call_digest: Sha256
    rationale: Text
    output: Annotated[Any, Field(description="Any JSON value.")] = None
    wait_ms: WaitMs = CALL_WAIT_MS


class WithdrawalBody(Part):
    rationale: Text | None = None


class RecoveryBody(Part):
    wait_ms: WaitMs = CALL_WAIT_MS


class PinBody(Part):
    definition_digest: Sha256


class Actions:
    """Each looks first whether the principal can see the trace at all, then whether it may do this."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._calls = Calls(services)

    async def decide(self, request: Request) -> Response:
        async with self._services.admitted(request) as principal:
            trace = await self._visible(request, principal, "decide")
            body = await read_body(request.scope, request.receive, DecisionBody)
            signed = own_signature(body.signature, body.key_id, body.decided_at, "decided_at")
            ruling = Ruling(
                decision=body.decision,
                approver=principal,
                action_request_digest=body.action_request_digest,
                rationale=body.rationale,
                signature=None if signed is None else signed[0],
                decided_at=body.decided_at,
            )
            return await self._moved(trace, self._services.runtime.decide(trace, ruling, wait_ms=body.wait_ms))

    async def withdraw(self, request: Request) -> Response:
        async with self._services.admitted(request) as principal:
            trace = await self._visible(request, principal, "withdraw")
            body = await read_body(request.scope, request.receive, WithdrawalBody, is_optional=True)
            answering = self._services.runtime.withdraw(
                trace, principal, rationale=body.rationale, wait_ms=CALL_WAIT_MS
            )
            return await self._moved(trace, answering)

    async def recover(self, request: Request) -> Response:
        async with self._services.admitted(request) as principal:
            trace = await self._visible(request, principal, "recover")
            body = await read_body(request.scope, request.receive, RecoveryBody, is_optional=True)
            return await self._moved(trace, self._services.runtime.recover(trace, wait_ms=body.wait_ms))

    async def resolve(self, request: Request) -> Response:
        async with self._services.admitted(request) as principal:
            trace = await self._visible(request, principal, "resolve")
            body = await read_body(request.scope, request.receive, ResolutionBody)
            has_output = "output" in body.model_fields_set
            if has_output and body.action != "succeeded":
                raise SchemaViolation(
                    "the body at /output", expected="an output only with `succeeded`", found=body.action
                )
            canonical_enclosed(body.output, bytes_max=DOCUMENT_BYTES_MAX)  # the effect's documents stand around it
            answering = self._services.runtime.resolve(
                trace,
                action=body.action,
                tool_call_digest=body.tool_call_digest,
                resolved_by=principal.principal_id,
                rationale=body.rationale,
                output=JsonOutput(encoding="json", value=body.output) if has_output else None,
                wait_ms=body.wait_ms,
            )
            return await self._moved(trace, answering)

    async def accept_pin(self, request: Request) -> Response:
        server_id, tool_name = request.path_params["server_id"], request.path_params["tool_name"]
        async with self._services.admitted(request) as principal:
            require(principal, "pin")
            body = await read_body(request.scope, request.receive, PinBody)
            tool = self._services.registry.resolve_for(principal.tenant, server_id, tool_name)
            state = await self._services.pins.accept(
                tool, definition_digest=body.definition_digest, accepted_by=principal
            )
            document = {
                "server_id": server_id,
                "tool_name": tool_name,
                "status": state.status,
                "pinned_digest": state.pinned_digest,
                "found_digest": state.found_digest,
                "since": state.since,
            }
            return Response(orjson.dumps(document), media_type="application/json")

    async def _visible(self, request: Request, principal: Principal, action: Action) -> TraceId:
        """The id of a trace that the principal sees and may do this to; a foreign one is as good as none."""
        try:
            async with asyncio.timeout(STORE_ANSWER_MS / 1000):
                trace_id = await trace_seen_by(self._services, principal, request)
        except TimeoutError:
            raise StoreUnavailable("the store did not answer in time; nothing was changed") from None
        require(principal, action)
        return trace_id

    async def _moved(self, trace_id: TraceId, answering: Awaitable[Answer]) -> Response:
        try:
            return moved(await self._services.handover.wait(answering))
        except HandedOver:
            answer = await self._calls.as_it_stands(trace_id)
            if answer.waiting is not None:  # what was asked for may still come to pass, or not
                raise OutcomeUnknown("the gateway is stopping", stream=TRACE.stream(trace_id)) from None
            return moved(answer)


def router(services: Services) -> APIRouter:
    actions, made = Actions(services), APIRouter()
    of_trace = "/v1/traces/{trace_id}"

    def add(
        path: str,
        endpoint: Any,
        body: type[Part],
        example: Any,
        summary: str,
        *kinds: type[errors.TgaError],
        noun: str = "traces",
    ) -> None:
        made.add_api_route(
            of_trace + path,
            endpoint,
            methods=["POST"],
            summary=summary,
            tags=[noun],
            response_class=Response,
            responses={**MOVED, **documented(*_OF_TRACES, *kinds)},
            openapi_extra=request_body(body, example, in_path=("trace_id",)),
        )

    add(
        "/decision",
        actions.decide,
        DecisionBody,
        DECISION_EXAMPLE,
        "Approve or deny exactly this request, once",
        errors.AlreadyDecided,
        errors.RequestMismatch,
        errors.ApprovalExpired,
        errors.SignatureInvalid,
        noun="approvals",
    )
    add(
        "/withdraw",
        actions.withdraw,
        WithdrawalBody,
        {"rationale": "no longer needed"},
        "Take back one's own waiting request",
        errors.AlreadyDecided,
        errors.ApprovalExpired,
        noun="approvals",
    )
    add("/recover", actions.recover, RecoveryBody, {}, "Continue a trace whose executor is gone")
    add(
        "/resolve",
        actions.resolve,
        ResolutionBody,
        {"action": "failed", "tool_call_digest": "0" * 64, "rationale": "the bank has no such charge"},
        "Say what became of a call whose outcome nobody knows",
        errors.TraceNotHeld,
        errors.InputTooLarge,
    )
    made.add_api_route(
        "/v1/tools/{server_id}/{tool_name:path}/pin",
        actions.accept_pin,
        methods=["POST"],
        summary="Accept a tool's changed definition",
        tags=["tools"],
        response_class=Response,
        responses={
            **PIN_STATE,
            **documented(errors.ToolNotFound, errors.RequestMismatch, errors.SchemaViolation, errors.RequestTimeout),
        },
        openapi_extra=request_body(PinBody, {"definition_digest": "0" * 64}, in_path=("server_id", "tool_name")),
    )
    return made
