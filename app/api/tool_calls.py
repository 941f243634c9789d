"""POST /v1/tool-calls: the hot route. It authenticates, admits, parses and asks the runtime; nothing else."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from pydantic import Field
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from app.config import qualify
from app.core.errors import ConcurrentExecution, InputMalformed, SequenceGap
from app.core.limits import CALL_WAIT_MS, CALL_WAIT_MS_MAX
from app.domain.identity import Principal
from app.domain.ledger.documents import IdempotencyKey, Name, Part, Text, Uuid7
from app.domain.tga.documents import TraceId
from app.domain.tga.execution import Answer
from app.domain.tga.runtime import CheckedCall
from app.domain.tga.transitions import TRACE
from app.edge.answers import accepted, denied, send_effect
from app.edge.body import checked, read_body
from app.edge.calls import Calls, traceparent_in
from app.edge.handover import HandedOver
from app.edge.permissions import require
from app.edge.services import Services, header_of

PATH: Final = "/v1/tool-calls"

WaitMs = Annotated[int, Field(ge=0, le=CALL_WAIT_MS_MAX)]


class ToolCallBody(Part):
    """What a caller asks for. `wait_ms`: how long to wait for the effect before 202.

    Given, it holds while a person decides, too; without it a call that waits for a person is answered at once.
    """

    server_id: Name
    tool_name: Name
    arguments: dict[str, Any]
    idempotency_key: IdempotencyKey | None = None
    intent: Text | None = None
    trace_id: Uuid7 | None = None
    wait_ms: WaitMs = CALL_WAIT_MS


class _KeyHeader(Part):
    idempotency_key: IdempotencyKey


class ToolCalls:
    """Plain ASGI: what a framework adds to a route costs more than all that is done here."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._calls = Calls(services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._services.admitted(_Scoped(scope)) as principal:
            require(principal, "call")
            body = await read_body(scope, receive, ToolCallBody)
            call = self._checked_call(scope, body, principal)
            answer = await self._answer(call, body)
            if answer.effect is not None:
                await send_effect(scope, send, answer)
            elif answer.state == "DENIED":
                await denied(answer)(scope, receive, send)
            else:
                await accepted(answer.trace_id, answer.state, answer.waiting)(scope, receive, send)

    def _checked_call(self, scope: Scope, body: ToolCallBody, principal: Principal) -> CheckedCall:
        return CheckedCall(
            server_id=qualify(principal.tenant, body.server_id),
            tool_name=body.tool_name,
            arguments=body.arguments,
            idempotency_key=_key(scope, body),
            principal=principal,
            intent=body.intent,
            # Chosen here, so that a call without a key can be found again when the gateway has to stop.
            trace_id=TraceId(body.trace_id or self._services.clock.new_id()),
            traceparent=traceparent_in(scope["headers"]),
            is_trace_id_chosen=body.trace_id is not None,
        )

    async def _answer(self, call: CheckedCall, body: ToolCallBody) -> Answer:
        deadline = asyncio.get_running_loop().time() + body.wait_ms / 1000
        try:
            with self._services.read_scheduler.behind():
                answer = await self._services.handover.wait(self._calls.in_line(call, wait_ms=body.wait_ms))
            if answer.waiting is not None and "wait_ms" in body.model_fields_set:
                # Out of the server's line: people take their time.
                answer = await self._services.handover.wait(self._calls.followed(answer, deadline))
            return answer
        except (SequenceGap, ConcurrentExecution) as error:
            if body.trace_id is None or error.stream not in (None, TRACE.stream(body.trace_id)):
                raise
            # Tell only its owner whose it is and how far it has come.
            raise ConcurrentExecution(
                "a trace with this trace_id exists", remedy="Leave trace_id out, or choose a new one.", is_lasting=True
            ) from None
        except HandedOver:
            return await self._calls.handed_over(call)


class _Scoped:
    __slots__ = ("scope",)

    def __init__(self, scope: Scope) -> None:
        self.scope = scope


def routes(services: Services) -> list[BaseRoute]:
    return [Route(PATH, ToolCalls(services), methods=["POST"], name="call_tool")]


def _key(scope: Scope, body: ToolCallBody) -> str | None:
    header = header_of(scope, b"idempotency-key")
    if header is None:
        return body.idempotency_key
    # Space around a value is not part of it (RFC 9110, 5.5).
    key = checked(_KeyHeader, {"idempotency_key": header.strip(" \t")}).idempotency_key
    if body.idempotency_key not in (None, key):
        raise InputMalformed("two idempotency keys", expected="one key, or the same one twice", found="two")
    return key
